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

// drainer drains agents and deletes the Pods of those that are empty.
type drainer struct {
	config Config
	state  *drains
	expect *expectations
	pods   *agentPods
}

// start annotates the Pod of a member as draining. advance calls the agent.
func (d *drainer) start(ctx context.Context, i *inventory, m *member, reason string) error {
	if err := d.annotate(ctx, i, m, reason); err != nil {
		return fmt.Errorf("draining agent %s: %w", m.pod.Name, err)
	}
	logr.FromContextOrDiscard(ctx).Info("draining agent", obs.KeyAgent, m.pod.Name, obs.KeyReason, reason, obs.KeySandboxes, m.usage.Held)
	d.config.Recorder.Eventf(i.pool, nil, corev1.EventTypeNormal, "AgentDraining", "DrainAgent",
		"agent Pod %s accepts no new sandboxes (%s) and is deleted when it has none; it has %d", m.pod.Name, reason, m.usage.Held)
	return nil
}

// annotate writes why a Pod is drained; an empty reason removes the annotation.
func (d *drainer) annotate(ctx context.Context, i *inventory, m *member, reason string) error {
	old, next := m.pod, m.pod.DeepCopy()
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	next.Annotations[v1alpha1.AnnotationDraining] = reason
	if reason == "" {
		delete(next.Annotations, v1alpha1.AnnotationDraining)
	}
	if err := d.config.Client.Patch(ctx, next, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
		return err
	}
	d.expect.drained(i.name, m.pod.UID, reason)
	m.drain = reason
	return nil
}

// resume makes a draining agent serve again. If it does not answer it counts as silent, and another agent replaces it.
func (d *drainer) resume(ctx context.Context, i *inventory, m *member) error {
	if err := d.call(ctx, m, true); err != nil {
		logr.FromContextOrDiscard(ctx).Info("agent not resumed", obs.KeyAgent, m.pod.Name, obs.KeyError, err.Error())
		return nil
	}
	if err := d.annotate(ctx, i, m, ""); err != nil {
		return fmt.Errorf("resuming agent %s: %w", m.pod.Name, err)
	}
	d.state.forget(m.pod.UID)
	d.config.Recorder.Eventf(i.pool, nil, corev1.EventTypeNormal, "AgentResumed", "DrainAgent", "agent Pod %s accepts sandboxes again", m.pod.Name)
	return nil
}

// advance calls draining agents, and deletes those that are empty. It returns the time after which to look again.
func (d *drainer) advance(ctx context.Context, i *inventory) (time.Duration, error) {
	var wg sync.WaitGroup
	requeue := time.Duration(0)
	for _, m := range i.members {
		switch {
		case m.drain == "" && m.known && m.agent.GetReason() == reasonDraining:
			// A person has removed the annotation, or a controller died while it resumed the agent.
			requeue = d.config.Requeue
			if d.state.due(m.pod.UID, d.config.Requeue) {
				wg.Go(func() { _ = d.call(ctx, m, true) }) // repeated until the Registry shows the agent as ready
			}
		case m.drain != "" && !neverStarted(m.pod) && (!m.usage.Busy() && !d.state.silent(m.pod.UID) || d.state.due(m.pod.UID, d.config.Requeue)):
			wg.Go(func() { _ = d.call(ctx, m, false) }) // deleteIfEmpty reads the response
		}
	}
	wg.Wait()
	for _, m := range i.sorted() {
		if m.drain == "" {
			continue
		}
		deleted, err := d.deleteIfEmpty(ctx, i, m)
		if err != nil {
			return 0, err
		}
		if !deleted {
			requeue = d.config.Requeue
		}
	}
	return requeue, nil
}

// reasonDraining is the reason of a draining agent (AgentSnapshot.not_accepting_reason).
const reasonDraining = "Draining"

// deleteIfEmpty deletes the Pod of a draining agent that has nothing left, according to its last response, the resources and,
// while it can be read, the Registry. A Pod in which no agent has started has nothing. An agent that was never ready, does not
// answer and has sent no heartbeat has nothing that was acknowledged.
func (d *drainer) deleteIfEmpty(ctx context.Context, i *inventory, m *member) (bool, error) {
	d.state.dropReservations(m)
	last := d.state.last(m.pod.UID)
	if m.usage.Held == 0 { // the agent has just answered
		m.usage.Held = last.sandboxes
	}
	if m.usage.Busy() {
		return false, nil
	}
	switch {
	case neverStarted(m.pod):
		// The precondition fails if an agent starts now, because that changes the Pod.
		return d.pods.delete(ctx, i, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID, ResourceVersion: &m.pod.ResourceVersion})
	case last.empty:
		return d.pods.delete(ctx, i, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID})
	case errdefs.IsNotImplemented(last.err) && d.config.Index.Synced():
		// This version of the agent cannot be drained: only the resources and the Registry count.
		return d.pods.delete(ctx, i, m.pod, m.drain, client.Preconditions{UID: &m.pod.UID})
	case last.err != nil && d.config.Index.Synced() && m.agent.GetLastHeartbeatTime() == nil && neverReady(m.pod):
		return d.pods.delete(ctx, i, m.pod, reasonNeverReady, client.Preconditions{UID: &m.pod.UID})
	case last.err != nil && d.state.reportSilence(m.pod.UID, d.config.Requeue):
		d.config.Recorder.Eventf(i.pool, nil, corev1.EventTypeWarning, "DrainStuck", "DrainAgent",
			"agent Pod %s is draining and does not answer; it stays until it answers or terminates: %s", m.pod.Name, truncate(last.err.Error()))
	}
	return false, nil
}

// call asks an agent to drain, or to resume, and records its response.
func (d *drainer) call(ctx context.Context, m *member, resume bool) error {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	response := drainResponse{at: d.config.Clock.Now()}
	response.sandboxes, response.empty, response.err = d.request(ctx, m, resume)
	response.drained = !resume && response.err == nil
	d.state.answered(m.pod.UID, response)
	return response.err
}

func (d *drainer) request(ctx context.Context, m *member, resume bool) (sandboxes int, empty bool, err error) {
	address := m.agent.GetAddress()
	if address == "" && m.pod.Status.PodIP != "" {
		address = net.JoinHostPort(m.pod.Status.PodIP, strconv.Itoa(int(d.config.Injection.AgentPort)))
	}
	uid := string(m.pod.UID)
	c, err := d.config.Agents.Client(address, uid)
	if err != nil {
		return 0, false, err
	}
	resp, err := c.Drain(ctx, &agentv1.DrainRequest{AgentUid: uid, Resume: resume})
	if err != nil {
		return 0, false, fmt.Errorf("draining agent %s: %w", m.pod.Name, rpc.FromStatus(err))
	}
	sandboxes = int(resp.GetSandboxes())
	if resume || sandboxes > 0 {
		return sandboxes, false, nil
	}
	// A tombstone is a deletion that the API server may not have yet. It is lost with the agent.
	snapshot, err := d.config.Agents.FreshSnapshot(ctx, address, uid)
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
