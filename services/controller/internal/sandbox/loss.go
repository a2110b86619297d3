package sandbox

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// lossDetector decides whether the agent of a sandbox is lost. The Registry only raises the suspicion: an agent that answers
// is not lost, whatever the Registry says. While the Registry cannot be read, no agent becomes lost.
type lossDetector struct {
	agents *agentAccess
	memory *memory
	timing Timing
	// heartbeatTimeout returns the allocator's heartbeat timeout.
	heartbeatTimeout func() time.Duration
}

// detect reports whether the agent is lost, and the time after which to look again.
func (d *lossDetector) detect(ctx context.Context, t *target) (lost bool, requeue time.Duration, err error) {
	if t.assignment == nil || t.state().Finished {
		return false, 0, nil
	}
	status := d.agents.index.Status(t.assignment.AgentUID)
	switch status {
	case agents.Unknown:
		return t.wasLost(), 0, nil
	case agents.Ready:
		d.memory.agentAnswered(t.name)
		return false, 0, nil
	case agents.Absent:
		gone, err := d.agents.podGone(ctx, t.name.Namespace, *t.assignment)
		if err != nil || gone {
			return gone || t.wasLost(), 0, err
		}
	case agents.NotReady, agents.Silent:
	}
	requeue = after(d.timing.Requeue)
	if _, err := d.agents.calls.Snapshot(ctx, d.agents.address(ctx, t.name.Namespace, t.fence(), t.assignment), t.assignment.AgentUID); err == nil {
		d.memory.agentAnswered(t.name)
		return false, requeue, nil
	}
	// The Registry has already waited for the heartbeat timeout of a Silent agent. For any other agent, this process has to
	// measure the time itself.
	lost = t.wasLost() || status == agents.Silent || d.memory.agentSilent(t.name) > d.heartbeatTimeout()
	return lost, requeue, nil
}

// registry is what the Registry knows of agents. *agents.Index implements it.
type registry interface {
	Synced() bool
	Status(podUID string) agents.Status
	Agent(podUID string) (agents.Agent, bool)
	Report(f identity.Fence) *agentv1.SandboxReport
	Reports(sandboxUID string) []*agentv1.SandboxReport
}

// agentAccess is how sandboxes reach agents.
type agentAccess struct {
	// client reads from the cache, live from the API server.
	client client.Reader
	live   client.Reader
	index  registry
	calls  Agents
}

// snapshotCall is Agents.Snapshot or Agents.FreshSnapshot.
type snapshotCall func(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)

// ask returns an agent's own report of a container of the sandbox's name, or nil if it has none. The error says that the agent did not
// answer. A snapshot that the agent gave before is believed only for what it has, because it may be older than the container.
func (a *agentAccess) ask(ctx context.Context, name types.NamespacedName, f identity.Fence, address string) (*agentv1.SandboxReport, error) {
	report, err := a.find(ctx, name, f, address, a.calls.Snapshot)
	if err == nil && report == nil {
		return a.find(ctx, name, f, address, a.calls.FreshSnapshot)
	}
	return report, err
}

func (a *agentAccess) find(ctx context.Context, name types.NamespacedName, f identity.Fence, address string, snapshot snapshotCall) (*agentv1.SandboxReport, error) {
	s, err := snapshot(ctx, address, f.AgentUID)
	if err != nil {
		return nil, err
	}
	for _, r := range s.GetSandboxes() {
		has := identity.FenceOf(r.GetRecord().GetFence())
		if has.SandboxUID == f.SandboxUID && has.Attempt == f.Attempt && named(r, name) {
			return r, nil
		}
	}
	return nil, nil
}

// podGone reports whether the Pod of an agent does not exist. The API server is asked only if the cache does not have the Pod.
func (a *agentAccess) podGone(ctx context.Context, namespace string, assignment v1alpha1.Assignment) (bool, error) {
	key := types.NamespacedName{Namespace: namespace, Name: assignment.AgentPod}
	for _, from := range []client.Reader{a.client, a.live} {
		var pod corev1.Pod
		err := from.Get(ctx, key, &pod)
		switch {
		case err == nil && string(pod.UID) == assignment.AgentUID:
			return false, nil
		case err != nil && !apierrors.IsNotFound(err):
			return false, fmt.Errorf("reading agent pod: %w", err)
		}
	}
	return true, nil
}
