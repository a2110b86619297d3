package sandbox

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
	standing := p.Index.Standing(p.assignment.AgentUID)
	switch standing {
	case agents.Unknown:
		p.lost = p.wasLost()
		return nil
	case agents.Present:
		p.ops.trust(p.name)
		p.lost = false
		return nil
	case agents.Absent:
		gone, err := p.podGone(ctx)
		if err != nil || gone {
			p.lost = gone || p.wasLost()
			return err
		}
	case agents.Quiet, agents.Silent:
	}
	p.after(p.Timing.Requeue)
	_, err := p.Agents.Snapshot(ctx, p.addressOf(p.fence()), p.assignment.AgentUID)
	if err == nil {
		p.ops.trust(p.name)
		p.lost = false
		return nil
	}
	// A Silent agent was heard of for the last time more than a timeout ago. Of any other only this process's own attempts
	// tell the time.
	p.lost = p.wasLost() || standing == agents.Silent || p.ops.doubt(p.name) > p.Timing.HeartbeatTimeout
	return nil
}

func (p *pass) wasLost() bool {
	return meta.IsStatusConditionTrue(p.sandbox.Status.Conditions, v1alpha1.ConditionAgentLost)
}

// podGone tells that the assigned agent's Pod is no more: the API server itself has none of its name and uid. Whatever is
// left of it on its node is the janitor's. The cache spares the API server the question while it shows the Pod.
func (p *pass) podGone(ctx context.Context) (bool, error) {
	return p.agentGone(ctx, p.name.Namespace, *p.assignment)
}

func (r *Reconciler) agentGone(ctx context.Context, namespace string, a v1alpha1.Assignment) (bool, error) {
	key := types.NamespacedName{Namespace: namespace, Name: a.AgentPod}
	for _, from := range []client.Reader{r.Client, r.Live} {
		var pod corev1.Pod
		err := from.Get(ctx, key, &pod)
		switch {
		case err == nil && string(pod.UID) == a.AgentUID:
			return false, nil
		case err != nil && !apierrors.IsNotFound(err):
			return false, fmt.Errorf("reading agent pod: %w", err)
		}
	}
	return true, nil
}
