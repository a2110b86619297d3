// Package deletion deletes sandboxes and containers to certainty. It has each container deleted on its agent, repeated
// until the agent reports it removed or the agent's Pod is gone (its containers are the janitor's then), and makes the
// deletion of a sandbox durable before it is acknowledged: by the custom resource's deletion where the API server answers,
// otherwise by a tombstone that the agent keeps until no custom resource of the sandbox stays or comes. It owns all
// deletions that run; package state draws the life of one. It never decides that a sandbox is to be deleted.
//
// A deletion whose process stops leading ends: the next leader finds the container or the tombstone reported, and continues.
//
// All methods may be called concurrently; the caller of Delete holds the lock of the sandbox's name.
package deletion

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// DefaultSettle is how long a write that was sent may still land. The client that sent it gives up after 5 s, and the API
// server ends a request after 60 s (its --request-timeout); 5 s are for the way there. What a process writes that was stopped
// in the middle for longer than this is caught by the uids that every replica remembers for an hour.
const DefaultSettle = 70 * time.Second

// Agents finds agents.
type Agents interface {
	// Client returns the connection to an agent; false if there is none now.
	Client(uid string) (agentv1.AgentServiceClient, bool)
	// Gone reports whether the agent's Pod is certainly gone.
	Gone(uid string) bool
}

// Fleet is what agents report.
type Fleet interface {
	// Release gives up the reservation of a container.
	Release(fence *agentv1.Fence)
	// Tombstones returns the tombstones that agents keep; HasTombstone reports whether there is one of a container.
	Tombstones() []*agentv1.Tombstone
	HasTombstone(fence identity.Fence) bool
	// Reported reports whether its agent still reports a container; Superseded, whether that can be one that an attempt under a
	// name has left.
	Reported(fence identity.Fence) bool
	Superseded(fence identity.Fence, namespace, name string) bool
}

// Config is what a Manager needs.
type Config struct {
	Agents Agents
	Fleet  Fleet
	Store  *store.Store
	API    *apiserver.Client
	// Persist has the writes that a Delete stops.
	Persist *persistence.Tracker
	Tasks   *tasks.Set
	Clock   clock.WithTicker
	// Leads reports whether this process leads: another process's decision is not forestalled.
	Leads func() bool
	// Announced reports whether an agent knows of this process's leadership: only then can no former leader act on it.
	Announced func(agentUID string) bool
	// Settle is how long after a custom resource was seen to be absent a write of it may still land. Zero: DefaultSettle.
	Settle time.Duration
	// Traced says that spans are exported, so that a delete call's trace is worth a write to the API server.
	Traced bool
}

// Manager runs deletions.
type Manager struct {
	config    Config
	resources resources

	mu        sync.Mutex
	deletions map[identity.Fence]*Deletion
}

// New returns a manager with nothing to do.
func New(cfg Config) *Manager {
	if cfg.Settle == 0 {
		cfg.Settle = DefaultSettle
	}
	return &Manager{
		config: cfg, resources: resources{api: cfg.API, traced: cfg.Traced}, deletions: map[identity.Fence]*Deletion{},
	}
}

// Request says what to delete and how.
type Request struct {
	// Fence of the container.
	Fence identity.Fence
	// Grace is the time between SIGTERM and SIGKILL; nil takes the sandbox's own, or that of an earlier request.
	Grace *durationpb.Duration
	// Tombstone that the agent is to keep; nil for none.
	Tombstone *agentv1.Tombstone
	// Traceparent of the call that asked for it.
	Traceparent string
}

// Container has a container deleted in the background. A deletion of it that runs already takes what is new of the request,
// a tombstone or another grace period.
func (m *Manager) Container(fence *agentv1.Fence) *Deletion {
	return m.Request(Request{Fence: identity.FenceOf(fence)})
}

// Request has a container deleted as Container does, with everything that can be asked for.
func (m *Manager) Request(r Request) *Deletion {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.deletions[r.Fence]
	if !ok {
		d = m.add(r, state.Queued)
	} else if !d.merge(r) {
		return d
	}
	m.startCalls(d)
	return d
}

// add makes a deletion known. m.mu is held.
func (m *Manager) add(r Request, s state.State) *Deletion {
	d := &Deletion{manager: m, state: s, request: r, revision: 1, removed: make(chan struct{}), changed: make(chan struct{})}
	m.deletions[r.Fence] = d
	return d
}

// startCalls has the agent called until the container is gone, if that does not happen already. m.mu is held.
func (m *Manager) startCalls(d *Deletion) {
	if d.calling || d.state.ContainerRemoved() || d.state.Terminal() {
		return
	}
	d.calling = true
	trace := d.request.Traceparent
	m.config.Tasks.Go(func(ctx context.Context) { callerOf(d).run(obs.WithTraceparent(ctx, trace)) })
}

// Deleting reports whether this process has a container deleted, and does not know yet that it is gone.
func (m *Manager) Deleting(fence identity.Fence) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.deletions[fence]
	return ok && d.calling
}

// Owns reports whether a deletion of a container runs, be it that only its record is left.
func (m *Manager) Owns(fence identity.Fence) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.deletions[fence]
	return ok
}

// Resume takes over the tombstones that agents report and no deletion of this process works on: a former leader's.
func (m *Manager) Resume() {
	for _, t := range m.config.Fleet.Tombstones() {
		if m.config.Announced(t.GetFence().GetAgentUid()) {
			m.resume(t)
		}
	}
}

func (m *Manager) resume(t *agentv1.Tombstone) *Deletion {
	m.mu.Lock()
	defer m.mu.Unlock()
	fence := identity.FenceOf(t.GetFence())
	if d, ok := m.deletions[fence]; ok {
		if d.kept { // its record half may have ended without success
			m.startFollowing(d)
		}
		return d
	}
	d := m.add(Request{Fence: fence, Tombstone: t, Grace: t.GetGracePeriod(), Traceparent: t.GetTraceparent()}, state.Accepted)
	d.accepted, d.kept, d.mayLand = d.revision, true, true
	m.startFollowing(d)
	return d
}

// startFollowing has the record half of a deletion carried out, if that does not happen already. m.mu is held.
func (m *Manager) startFollowing(d *Deletion) {
	if d.following || d.state.Terminal() {
		return
	}
	d.following = true
	trace := d.request.Traceparent
	m.config.Tasks.Go(func(ctx context.Context) {
		f := followerOf(d)
		err := f.run(obs.WithTraceparent(ctx, trace))
		f.leaveRoom()
		m.mu.Lock()
		d.following = false
		if m.deletions[d.request.Fence] == d && !d.calling {
			delete(m.deletions, d.request.Fence)
		}
		m.mu.Unlock()
		if err != nil {
			logr.FromContextOrDiscard(ctx).V(2).Info("leaving tombstone to the next leader", obs.KeyFence, d.request.Fence.String(), obs.KeyReason, err.Error())
		}
	})
}

// containerRemoved notes that a container is certainly gone: its capacity is free, and no create is answered with it. At no
// moment is a container neither being deleted nor known to be gone.
func (m *Manager) containerRemoved(d *Deletion) {
	m.mu.Lock()
	done := d.state.ContainerRemoved() || d.state.Terminal()
	m.mu.Unlock()
	if done {
		return
	}
	fence := convert.FenceToProto(d.request.Fence)
	m.config.Fleet.Release(fence)
	m.config.Store.SetContainerRemoved(fence)
	m.mu.Lock()
	defer m.mu.Unlock()
	if d.state.ContainerRemoved() {
		return
	}
	d.apply(state.ContainerRemoved)
	d.calling, d.cancel = false, nil
	close(d.removed)
	if d.request.Tombstone == nil {
		d.apply(state.Unrecorded)
		delete(m.deletions, d.request.Fence)
	}
}
