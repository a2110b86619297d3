package sandbox

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// observeLoss judges whether the agent is lost. The Registry raises the doubt, the agent itself settles it: one that
// answers is not lost, whatever the Registry has (not) heard. While the Registry cannot be read nothing is lost.
func (p *pass) observeLoss(ctx context.Context) error {
	if p.assignment == nil || p.state().Finished {
		p.lost = false
		return nil
	}
	standing, last := p.Index.Standing(p.assignment.AgentUID, p.now, p.Timing.HeartbeatTimeout)
	switch standing {
	case agents.Unknown:
		p.lost = p.wasLost()
		return nil
	case agents.Present:
		p.ops.trust(p.name)
		p.lost = false
		if !last.IsZero() { // not ready: look again when the timeout is over
			p.after(p.Timing.HeartbeatTimeout)
		}
		return nil
	case agents.Absent:
		gone, err := p.podGone(ctx)
		if err != nil || gone {
			p.lost = gone || p.wasLost()
			return err
		}
	case agents.Silent:
	}
	p.after(p.Timing.Requeue)
	_, err := p.Agents.Snapshot(ctx, p.addressOf(p.fence()), p.assignment.AgentUID)
	if err == nil {
		p.ops.trust(p.name)
		p.lost = false
		return nil
	}
	// A Silent agent was heard of for the last time more than a timeout ago. Of one that this Registry has never heard,
	// because one of the two has just started, only this process's own attempts tell the time.
	p.lost = p.wasLost() || standing == agents.Silent && !last.IsZero() || p.ops.doubt(p.name) > p.Timing.HeartbeatTimeout
	return nil
}

func (p *pass) wasLost() bool {
	return meta.IsStatusConditionTrue(p.sandbox.Status.Conditions, v1alpha1.ConditionAgentLost)
}

// podGone tells that the assigned agent can never act again: the API server itself has no Pod of its name and uid, and
// the Registry knows no such agent.
func (p *pass) podGone(ctx context.Context) (bool, error) {
	if standing, _ := p.Index.Standing(p.assignment.AgentUID, p.now, p.Timing.HeartbeatTimeout); standing != agents.Absent {
		return false, nil
	}
	var pod corev1.Pod
	err := p.Live.Get(ctx, types.NamespacedName{Namespace: p.name.Namespace, Name: p.assignment.AgentPod}, &pod)
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("reading agent pod: %w", err)
	default:
		return string(pod.UID) != p.assignment.AgentUID, nil
	}
}
