package pool

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// An agent goes in three steps, each of which may be repeated by a process that knows nothing of the one before:
//
//	annotation on the Pod -> Drain: it refuses new sandboxes -> empty: the Pod is deleted
//	        ^                          |
//	        +---- Drain(resume) -------+ the pool wants it again; the annotation goes last
//
// The agent's own word decides, for it alone knows what it has admitted: none is admitted after its answer to Drain.

// drainTimeout bounds what one agent is asked; all of a pool are asked at once.
const drainTimeout = 2 * time.Second

// drain marks a member for draining, durably; the agent is told by progress.
func (r *Reconciler) drain(ctx context.Context, s *survey, m *member, reason string) error {
	if err := r.annotate(ctx, s, m, reason); err != nil {
		return fmt.Errorf("draining agent %s: %w", m.pod.Name, err)
	}
	logr.FromContextOrDiscard(ctx).Info("draining agent", "pod", m.pod.Name, "reason", reason, "sandboxes", m.used)
	r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, "AgentDraining", "DrainAgent", "agent Pod %s takes no new sandboxes (%s) and goes when it has none; it has %d",
		m.pod.Name, reason, m.used)
	return nil
}

// annotate writes why a Pod drains; empty for not at all.
func (r *Reconciler) annotate(ctx context.Context, s *survey, m *member, reason string) error {
	old, next := m.pod, m.pod.DeepCopy()
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	next.Annotations[v1alpha1.AnnotationDraining] = reason
	if reason == "" {
		delete(next.Annotations, v1alpha1.AnnotationDraining)
	}
	if err := r.Client.Patch(ctx, next, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
		return err
	}
	r.expect.drained(s.name, m.pod.UID, reason)
	m.drain = reason
	return nil
}

// resume has a draining agent serve again. One that does not answer is held silent, and another one takes its part.
func (r *Reconciler) resume(ctx context.Context, s *survey, m *member) error {
	if err := r.tell(ctx, m, true).err; err != nil {
		logr.FromContextOrDiscard(ctx).Info("agent does not resume", "pod", m.pod.Name, "err", err.Error())
		return nil
	}
	if err := r.annotate(ctx, s, m, ""); err != nil {
		return fmt.Errorf("resuming agent %s: %w", m.pod.Name, err)
	}
	r.drains.forget(m.pod.UID)
	r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, "AgentResumed", "DrainAgent", "agent Pod %s takes sandboxes again", m.pod.Name)
	return nil
}

// progress tells draining agents that they drain, and deletes those that are empty. It returns when to look again.
func (r *Reconciler) progress(ctx context.Context, s *survey) (time.Duration, error) {
	var wg sync.WaitGroup
	after := time.Duration(0)
	for _, m := range s.members {
		switch {
		case m.drain == "" && m.known && m.agent.GetReason() == reasonDraining:
			// The annotation was taken away by hand, or this process's predecessor died while resuming.
			after = r.Requeue
			if r.drains.due(m.pod.UID, r.Requeue) {
				wg.Go(func() { r.tell(ctx, m, true) })
			}
		case m.drain != "" && !neverStarted(m.pod) && (m.used == 0 && !r.drains.silent(m.pod.UID) || r.drains.due(m.pod.UID, r.Requeue)):
			wg.Go(func() { r.tell(ctx, m, false) })
		}
	}
	wg.Wait()
	for _, name := range slices.Sorted(maps.Keys(s.members)) {
		m := s.members[name]
		if m.drain == "" {
			continue
		}
		gone, err := r.retire(ctx, s, m)
		if err != nil {
			return 0, err
		}
		if !gone {
			after = r.Requeue
		}
	}
	return after, nil
}

// reasonDraining is the agents' word for it (AgentSnapshot.not_accepting_reason).
const reasonDraining = "Draining"

// retire deletes the Pod of a draining agent that has nothing left. Its last word counts, together with what the
// resources say and, while it can be read, the Registry. One that never started has nothing; one that never was ready,
// does not answer, and that the Registry never heard of, can have nothing that was acknowledged.
func (r *Reconciler) retire(ctx context.Context, s *survey, m *member) (bool, error) {
	r.vacate(m)
	last := r.drains.last(m.pod.UID)
	if m.used == 0 { // it was asked now
		m.used = last.left
	}
	if m.used > 0 {
		return false, nil
	}
	switch {
	case neverStarted(m.pod):
		// Bound to what was read: an agent that starts at this moment changes its Pod.
		return r.deletePod(ctx, s, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID, ResourceVersion: &m.pod.ResourceVersion})
	case last.empty:
		return r.deletePod(ctx, s, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID})
	case errdefs.IsNotImplemented(last.err) && r.Index.Synced():
		// An agent of a version that cannot be drained: what everybody else knows has to do.
		return r.deletePod(ctx, s, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID})
	case last.err != nil && r.Index.Synced() && m.agent.GetLastHeartbeatTime() == nil && neverReady(m.pod):
		return r.deletePod(ctx, s, m.pod, "never ready", client.Preconditions{UID: &m.pod.UID})
	case last.err != nil && r.drains.complain(m.pod.UID, r.Requeue):
		r.Recorder.Eventf(s.pool, nil, corev1.EventTypeWarning, "DrainStuck", "DrainAgent",
			"agent Pod %s drains and does not answer; it stays until it does, or until its Pod is gone: %s", m.pod.Name, truncate(last.err.Error()))
	}
	return false, nil
}

// vacate takes the reservations off an agent that has answered Drain: whoever holds one is refused there, so that they are
// void, however long the Registry keeps them.
func (r *Reconciler) vacate(m *member) {
	if m.drain != "" && r.drains.last(m.pod.UID).drained {
		m.used = m.held
	}
}

// tell has an agent drain, or resume, and remembers its answer.
func (r *Reconciler) tell(ctx context.Context, m *member, resume bool) answer {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	a := answer{at: r.Clock.Now()}
	a.left, a.empty, a.err = r.ask(ctx, m, resume)
	a.drained = !resume && a.err == nil
	r.drains.answered(m.pod.UID, a)
	return a
}

func (r *Reconciler) ask(ctx context.Context, m *member, resume bool) (left int, empty bool, err error) {
	address := m.agent.GetAddress()
	if address == "" && m.pod.Status.PodIP != "" {
		address = net.JoinHostPort(m.pod.Status.PodIP, strconv.Itoa(int(r.Injection.AgentPort)))
	}
	c, err := r.Agents.Client(address)
	if err != nil {
		return 0, false, err
	}
	uid := string(m.pod.UID)
	resp, err := c.Drain(ctx, &agentv1.DrainRequest{AgentUid: uid, Resume: resume})
	if err != nil {
		return 0, false, fmt.Errorf("draining agent %s: %w", m.pod.Name, rpc.FromStatus(err))
	}
	left = int(resp.GetSandboxes())
	if resume || left > 0 {
		return left, false, nil
	}
	// A tombstone is a deletion that the API server may not know of yet: it is not lost while the agent keeps it.
	snapshot, err := r.Agents.Ask(ctx, address, uid)
	if err != nil {
		return 0, false, fmt.Errorf("asking agent %s: %w", m.pod.Name, err)
	}
	return 0, !snapshot.GetAccepting() && len(snapshot.GetSandboxes()) == 0 && len(snapshot.GetTombstones()) == 0, nil
}

// neverStarted tells that no process of the agent has ever run in the Pod.
func neverStarted(p *corev1.Pod) bool {
	if p.Status.Phase != corev1.PodPending && p.Status.Phase != "" {
		return false
	}
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == agentContainer && (c.RestartCount > 0 || c.State.Running != nil || c.State.Terminated != nil || c.LastTerminationState.Terminated != nil) {
			return false
		}
	}
	return true
}

// neverReady tells that the Pod has not been ready once: the condition has stood still since the kubelet took the Pod in.
func neverReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status != corev1.ConditionTrue && p.Status.StartTime != nil && !c.LastTransitionTime.After(p.Status.StartTime.Add(time.Second))
		}
	}
	return true
}
