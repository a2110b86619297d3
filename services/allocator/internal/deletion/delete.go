package deletion

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

const (
	// agentTimeout is how long a delete waits for the agent to accept it, and bounds short calls to agents.
	agentTimeout = 5 * time.Second
	// leadershipPeriod is how often a delete that waits for its agent checks that this process leads.
	leadershipPeriod = 50 * time.Millisecond
)

// Delete makes the deletion of a sandbox durable, and has it carried out in the background. A later call that sets another
// grace period replaces it. The caller holds the lock of the name. After an error the deletion is not durable, and a repeated
// call makes it so: the sandbox stays, or, if an agent may have received the deletion, this process continues it.
func (m *Manager) Delete(ctx context.Context, item store.Item, o Options) error {
	if item.Fence != nil {
		if done, err := m.amend(ctx, item, o); done || err != nil {
			return err
		}
	}
	resource, outcome, stopped := m.stopWrite(ctx, item)
	if resource == nil {
		return m.deleteUnwritten(ctx, item, outcome, stopped, o)
	}
	err := m.deleteWritten(ctx, item, resource, o)
	if fault.ReasonOf(err) != fault.APIUnavailable {
		return err
	}
	if item.Fence == nil || m.config.Agents.Gone(item.Fence.GetAgentUid()) {
		return err // no agent could remember it
	}
	if err := m.config.Persist.Admit(); err != nil {
		return err
	}
	return m.entrust(ctx, item, record{room: true}, nil, o)
}

// amend changes a deletion of which the agent keeps, or is asked to keep, a tombstone; done is false if there is none.
func (m *Manager) amend(ctx context.Context, item store.Item, o Options) (done bool, err error) {
	fence := identity.FenceOf(item.Fence)
	m.mu.Lock()
	d, ok := m.deletions[fence]
	ok = ok && d.request.Tombstone != nil
	m.mu.Unlock()
	switch {
	case !ok && !m.config.Fleet.HasTombstone(fence):
		return false, nil
	case !ok && o.Grace == nil:
		return true, nil // a former leader accepted it
	case !ok:
		if d = m.takeOver(fence); d == nil {
			return false, nil // it is over by now
		}
	}
	if o.Grace != nil && !proto.Equal(o.Grace, d.current().Grace) && item.Resource != nil {
		ctx, cancel := context.WithTimeout(ctx, m.config.API.Timeout())
		defer cancel()
		// Before the record half has deleted the resource, it sets the grace period itself.
		if err := m.resources.annotate(ctx, item.Resource, Options{Grace: o.Grace}); err != nil && d.State() != state.Accepted && d.State() != state.Removed {
			return true, err
		}
	}
	m.Request(Request{Fence: fence, Grace: o.Grace})
	switch accepted, err := m.awaitAccepted(ctx, d); {
	case err != nil:
		return true, err
	case !accepted:
		return true, m.unaccepted(d.Err(), true)
	}
	return true, m.awaitDurable(ctx, d)
}

// takeOver resumes the deletion of a tombstone that an agent reports; nil if it reports none.
func (m *Manager) takeOver(fence identity.Fence) *Deletion {
	for _, t := range m.config.Fleet.Tombstones() {
		if identity.FenceOf(t.GetFence()) == fence {
			return m.resume(t)
		}
	}
	return nil
}

// deleteUnwritten deletes a sandbox whose custom resource is not known to be there.
func (m *Manager) deleteUnwritten(ctx context.Context, item store.Item, outcome writer.Outcome, stopped *persistence.Job, o Options) error {
	if stopped != nil && stopped.Ours && outcome != writer.Unknown {
		return m.entrust(ctx, item, record{absent: true}, stopped, o) // no process ever wrote it
	}
	m.config.Persist.AdmitAlways() // it had room as a write
	return m.entrust(ctx, item, record{mayLand: true, room: true}, stopped, o)
}

// stopWrite ends the write of a sandbox's custom resource, if one runs, and returns the custom resource, if it is known to be
// there. A write that does not end soon is Unknown: it ends later, and is never begun again.
func (m *Manager) stopWrite(ctx context.Context, item store.Item) (*v1alpha1.Sandbox, writer.Outcome, *persistence.Job) {
	uid := item.Sandbox.GetUid()
	job, ok := m.config.Persist.Writing(uid)
	if !ok || job.Record.Record.GetNamespace() != item.Key.Namespace || job.Record.Record.GetName() != item.Key.Name {
		// It may have landed since the caller looked. What a former process wrote is not known.
		if now, there := m.config.Store.Get(item.Key); there && now.Sandbox.GetUid() == uid && now.Resource != nil {
			return now.Resource, writer.Landed, nil
		}
		return item.Resource, writer.Unknown, nil
	}
	ctx, cancel := context.WithTimeout(ctx, m.config.API.Timeout())
	defer cancel()
	outcome, there, err := job.Stop(ctx)
	switch {
	case err != nil:
		return item.Resource, writer.Unknown, &job
	case outcome == writer.Landed:
		return there, outcome, &job
	}
	// The informer may have shown what a writer, its answer lost, was about to send again.
	return item.Resource, outcome, &job
}

// deleteWritten deletes a custom resource, and only the one that is meant, and has the container deleted at once.
func (m *Manager) deleteWritten(ctx context.Context, item store.Item, resource *v1alpha1.Sandbox, o Options) error {
	callCtx, cancel := context.WithTimeout(ctx, m.config.API.Timeout())
	defer cancel()
	if err := m.resources.remove(callCtx, resource, o); err != nil {
		return err
	}
	m.config.Store.MarkDeleting(item.Key, item.Sandbox.GetUid())
	if item.Fence != nil {
		m.Request(Request{Fence: identity.FenceOf(item.Fence), Grace: o.Grace, Traceparent: o.Traceparent})
	}
	return nil
}

// record is what is known of the record of a deletion when it begins; the fields are those of Deletion.
type record struct{ mayLand, absent, room bool }

// entrust has the agent keep a deletion, and carry it out.
func (m *Manager) entrust(ctx context.Context, item store.Item, known record, stopped *persistence.Job, o Options) error {
	d := m.begin(Request{
		Fence: identity.FenceOf(item.Fence), Grace: o.Grace, Traceparent: o.Traceparent, Tombstone: &agentv1.Tombstone{
			Fence: item.Fence, Namespace: item.Key.Namespace, Name: item.Key.Name, RequestId: item.RequestID,
			DeleteTime: timestamppb.New(m.config.Clock.Now()), GracePeriod: o.Grace, DeleteRequestId: o.RequestID, Traceparent: o.Traceparent,
			Superseded: item.Superseded,
		},
	}, known)
	accepted, err := m.awaitAccepted(ctx, d)
	withdrawn := !accepted && d.Withdraw()
	if withdrawn {
		followerOf(d).leaveRoom()
		if stopped != nil && item.Resource == nil {
			m.config.Persist.AdmitAlways()
			m.config.Persist.Persist(stopped.Record, stopped.Ours && !known.mayLand)
		}
	} else {
		m.follow(d) // whether or not there is still a caller
	}
	switch {
	case err != nil:
		return err
	case !accepted:
		return m.unaccepted(d.Err(), !withdrawn)
	}
	m.config.Store.MarkDeleting(item.Key, item.Sandbox.GetUid())
	return m.awaitDurable(ctx, d)
}

// begin has a container deleted, with a tombstone and what is known of its record.
func (m *Manager) begin(r Request, known record) *Deletion {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.deletions[r.Fence]
	if ok {
		d.merge(r)
	} else {
		d = m.add(r, state.Queued)
	}
	if d.following { // it took a former leader's tombstone over in this moment
		if known.room {
			m.config.Persist.Abandon()
		}
	} else {
		d.mayLand, d.absent, d.room = known.mayLand, known.absent, known.room
	}
	m.startCalls(d)
	return d
}

// follow has the record half of a deletion carried out.
func (m *Manager) follow(d *Deletion) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.startFollowing(d)
}

// awaitDurable waits, no longer than is useful, until the record half has looked at the custom resource, if no agent keeps the
// tombstone: the container is gone, with its agent perhaps, and the API server alone can make the deletion durable.
func (m *Manager) awaitDurable(ctx context.Context, d *Deletion) error {
	timer := m.config.Clock.NewTimer(apiserver.CallTimeout)
	defer timer.Stop()
	for {
		durable, changed := d.durable()
		if durable {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fault.FromContext(ctx, "deleting the custom resource", nil)
		case <-timer.C():
			return apiserver.Unavailable(nil)
		}
	}
}

// awaitAccepted waits until the agent has accepted a request, or its container is gone, no longer than is useful.
func (m *Manager) awaitAccepted(ctx context.Context, d *Deletion) (bool, error) {
	timer := m.config.Clock.NewTimer(agentTimeout)
	defer timer.Stop()
	ticker := m.config.Clock.NewTicker(leadershipPeriod)
	defer ticker.Stop()
	for {
		acknowledged, changed := d.progress()
		if acknowledged {
			return true, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false, fault.FromContext(ctx, "deleting the container", d.Err())
		case <-timer.C():
			return false, nil
		case <-ticker.C():
			if !m.config.Leads() {
				return false, nil
			}
		}
	}
}

// unaccepted returns the error of a deletion that no agent has accepted; received says that one may have received it.
func (m *Manager) unaccepted(last error, received bool) error {
	switch {
	case !m.config.Leads():
		return LostLeadership(last)
	case fault.ReasonOf(last) == fault.Overloaded:
		return last
	case received:
		return fault.Wrap(last, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent has not answered yet; the deletion continues").
			RetryIn(time.Second)
	}
	return fault.Wrap(last, errdefs.ErrUnavailable, fault.AgentUnavailable, "the sandbox's agent cannot be reached").RetryIn(time.Second)
}

// LostLeadership returns the error of a call that another allocator has to carry out.
func LostLeadership(cause error) error {
	return fault.Wrap(cause, errdefs.ErrUnavailable, fault.NotLeader, "another allocator has taken over").RetryIn(200 * time.Millisecond)
}
