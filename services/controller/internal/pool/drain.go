package pool

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// An agent is removed in three steps. A controller that starts at any point finds the annotation and continues:
//
//	annotation on the Pod -> Drain: it refuses new sandboxes -> empty: the Pod is deleted
//	        ^                          |
//	        +---- Drain(resume) -------+ the pool needs it again; the annotation is removed last
//
// The agent's response decides, because only the agent knows what it has admitted: it admits no sandbox after its response.

// drainTimeout bounds the call to one agent. All agents of a pool are called at the same time.
const drainTimeout = 2 * time.Second

// drain annotates the Pod of a member as draining. advanceDrains calls the agent.
func (r *Reconciler) drain(ctx context.Context, i *inventory, m *member, reason string) error {
	if err := r.annotate(ctx, i, m, reason); err != nil {
		return fmt.Errorf("draining agent %s: %w", m.pod.Name, err)
	}
	logr.FromContextOrDiscard(ctx).Info("draining agent", obs.KeyAgent, m.pod.Name, obs.KeyReason, reason, obs.KeySandboxes, m.usage.Held)
	r.Recorder.Eventf(i.pool, nil, corev1.EventTypeNormal, "AgentDraining", "DrainAgent",
		"agent Pod %s accepts no new sandboxes (%s) and is deleted when it has none; it has %d", m.pod.Name, reason, m.usage.Held)
	return nil
}

// annotate writes why a Pod is drained; an empty reason removes the annotation.
func (r *Reconciler) annotate(ctx context.Context, i *inventory, m *member, reason string) error {
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
	r.expect.drained(i.name, m.pod.UID, reason)
	m.drain = reason
	return nil
}

// resume makes a draining agent serve again. If it does not answer it counts as silent, and another agent replaces it.
func (r *Reconciler) resume(ctx context.Context, i *inventory, m *member) error {
	if err := r.callDrain(ctx, m, true); err != nil {
		logr.FromContextOrDiscard(ctx).Info("agent not resumed", obs.KeyAgent, m.pod.Name, obs.KeyError, err.Error())
		return nil
	}
	if err := r.annotate(ctx, i, m, ""); err != nil {
		return fmt.Errorf("resuming agent %s: %w", m.pod.Name, err)
	}
	r.drains.forget(m.pod.UID)
	r.Recorder.Eventf(i.pool, nil, corev1.EventTypeNormal, "AgentResumed", "DrainAgent", "agent Pod %s accepts sandboxes again", m.pod.Name)
	return nil
}

// advanceDrains calls draining agents, and deletes those that are empty. It returns the time after which to look again.
func (r *Reconciler) advanceDrains(ctx context.Context, i *inventory) (time.Duration, error) {
	var wg sync.WaitGroup
	requeue := time.Duration(0)
	for _, m := range i.members {
		switch {
		case m.drain == "" && m.known && m.agent.GetReason() == reasonDraining:
			// A person has removed the annotation, or a controller died while it resumed the agent.
			requeue = r.Requeue
			if r.drains.due(m.pod.UID, r.Requeue) {
				wg.Go(func() { _ = r.callDrain(ctx, m, true) }) // repeated until the Registry shows the agent as ready
			}
		case m.drain != "" && !neverStarted(m.pod) && (!m.usage.Busy() && !r.drains.silent(m.pod.UID) || r.drains.due(m.pod.UID, r.Requeue)):
			wg.Go(func() { _ = r.callDrain(ctx, m, false) }) // deleteIfEmpty reads the response
		}
	}
	wg.Wait()
	for _, m := range i.sorted() {
		if m.drain == "" {
			continue
		}
		deleted, err := r.deleteIfEmpty(ctx, i, m)
		if err != nil {
			return 0, err
		}
		if !deleted {
			requeue = r.Requeue
		}
	}
	return requeue, nil
}

// reasonDraining is the reason of a draining agent (AgentSnapshot.not_accepting_reason).
const reasonDraining = "Draining"

// deleteIfEmpty deletes the Pod of a draining agent that has nothing left, according to its last response, the resources and,
// while it can be read, the Registry. A Pod in which no agent has started has nothing. An agent that was never ready, does not
// answer and has sent no heartbeat has nothing that was acknowledged.
func (r *Reconciler) deleteIfEmpty(ctx context.Context, i *inventory, m *member) (bool, error) {
	r.dropReservations(m)
	last := r.drains.last(m.pod.UID)
	if m.usage.Held == 0 { // the agent has just answered
		m.usage.Held = last.sandboxes
	}
	if m.usage.Busy() {
		return false, nil
	}
	switch {
	case neverStarted(m.pod):
		// The precondition fails if an agent starts now, because that changes the Pod.
		return r.deletePod(ctx, i, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID, ResourceVersion: &m.pod.ResourceVersion})
	case last.empty:
		return r.deletePod(ctx, i, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID})
	case errdefs.IsNotImplemented(last.err) && r.Index.Synced():
		// This version of the agent cannot be drained: only the resources and the Registry count.
		return r.deletePod(ctx, i, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID})
	case last.err != nil && r.Index.Synced() && m.agent.GetLastHeartbeatTime() == nil && neverReady(m.pod):
		return r.deletePod(ctx, i, m.pod, reasonNeverReady, client.Preconditions{UID: &m.pod.UID})
	case last.err != nil && r.drains.reportSilence(m.pod.UID, r.Requeue):
		r.Recorder.Eventf(i.pool, nil, corev1.EventTypeWarning, "DrainStuck", "DrainAgent",
			"agent Pod %s is draining and does not answer; it stays until it answers or terminates: %s", m.pod.Name, truncate(last.err.Error()))
	}
	return false, nil
}

// dropReservations ignores the reservations on an agent that has confirmed Drain: it refuses their holders, however long the
// Registry keeps them.
func (r *Reconciler) dropReservations(m *member) {
	if m.drain != "" && r.drains.last(m.pod.UID).drained {
		m.usage.Reserved = 0
	}
}

// callDrain asks an agent to drain, or to resume, and records its response.
func (r *Reconciler) callDrain(ctx context.Context, m *member, resume bool) error {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	response := drainResponse{at: r.Clock.Now()}
	response.sandboxes, response.empty, response.err = r.requestDrain(ctx, m, resume)
	response.drained = !resume && response.err == nil
	r.drains.answered(m.pod.UID, response)
	return response.err
}

func (r *Reconciler) requestDrain(ctx context.Context, m *member, resume bool) (sandboxes int, empty bool, err error) {
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
	sandboxes = int(resp.GetSandboxes())
	if resume || sandboxes > 0 {
		return sandboxes, false, nil
	}
	// A tombstone is a deletion that the API server may not have yet. It is lost with the agent.
	snapshot, err := r.Agents.FreshSnapshot(ctx, address, uid)
	if err != nil {
		return 0, false, fmt.Errorf("reading snapshot of agent %s: %w", m.pod.Name, err)
	}
	return 0, !snapshot.GetAccepting() && len(snapshot.GetSandboxes()) == 0 && len(snapshot.GetTombstones()) == 0, nil
}

// neverStarted reports whether no process of the agent has run in the Pod.
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

// neverReady reports whether the Pod was never ready: its condition has not changed since the kubelet accepted the Pod.
func neverReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status != corev1.ConditionTrue && p.Status.StartTime != nil && !c.LastTransitionTime.After(p.Status.StartTime.Add(time.Second))
		}
	}
	return true
}
