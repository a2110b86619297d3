// Package recovery brings order into what a leader that has ended, or a create that has failed, left behind: containers
// that no create, write or deletion of this process owns are adopted or deleted, custom resources that no create wants are
// deleted, and strong creates are rolled back, or resumed for a caller that asks again. It owns these decisions, and the
// evidence that they take: no other package asks whose a container or a custom resource is. All methods may be called
// concurrently.
//
// Of each container that its agent reports as not persisted the sweep decides, once the agent knows of this process's
// leadership (before that a former leader may be about to delete it):
//
//	its sandbox is deleted, or the name is another's -> deleted by its fence
//	a later attempt superseded it, or its request was answered with another sandbox -> deleted by its fence
//	written, and this container is the assigned one  -> its agent is asked to mark it
//	written, and another container is assigned       -> a leftover: deleted after the orphan timeout
//	not written, and it never started                -> a leftover: deleted after the orphan timeout
//	not written, and it started                      -> adopted: its custom resource is written from the agent's record
//
// Adoption must not bring back what another process has just deleted. A deletion removes the container before the custom
// resource; so after the API server has said that there is none, two more messages of the agent must still report it.
package recovery

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// sweepInterval is how often unpersisted containers are looked at.
const sweepInterval = time.Second

// Fleet is the part of fleet.Fleet that is used.
type Fleet interface {
	Agent(uid string) (*allocatorv1.Agent, bool)
	// Unpersisted returns the reports of sandboxes whose custom resource their agents do not know to be written.
	Unpersisted() []fleet.Unpersisted
	// Tombstones returns the tombstones that agents keep.
	Tombstones() []*agentv1.Tombstone
}

// Config is what a Recoverer needs.
type Config struct {
	Store     *store.Store
	Fleet     Fleet
	API       *apiserver.Client
	Deletions *deletion.Manager
	Persist   *persistence.Tracker
	Creates   *idempotency.Calls[*sandboxv1.CreateSandboxResponse]
	Names     *keylock.Map[store.Key]
	Tasks     *tasks.Set
	Clock     clock.WithTicker
	// Synced reports whether pools and sandboxes of the API server have been seen once.
	Synced func() bool
	// Leads reports whether this process leads.
	Leads func() bool
	// Announced reports whether an agent knows of this process's leadership: only then can no former leader act on it.
	Announced func(agentUID string) bool
	// Creating reports whether a create of this process makes a sandbox.
	Creating func(uid string) bool
	// Adopted counts adoptions.
	Adopted func()
	// OrphanTimeout is how long a container that belongs to no sandbox may stay before it is deleted.
	OrphanTimeout time.Duration
}

// Recoverer sweeps, and rolls back or resumes creates.
type Recoverer struct {
	config Config

	mu        sync.Mutex
	abandoned map[string]struct{}             // creates that failed and are being rolled back, by callOf
	late      map[types.UID]*v1alpha1.Sandbox // custom resources of sandboxes that are gone, or abandoned

	// sightings is the sweep's own.
	sightings map[identity.Fence]sighting
}

// sighting is what is known of a container that its agent reports as not persisted and that this process does not own.
type sighting struct {
	since time.Time
	// absentAt is how many messages its agent had sent when the API server said that there is no custom resource; zero
	// before that.
	absentAt int64
}

// New returns a recoverer that has seen nothing.
func New(cfg Config) *Recoverer {
	return &Recoverer{
		config: cfg, abandoned: map[string]struct{}{}, late: map[types.UID]*v1alpha1.Sandbox{}, sightings: map[identity.Fence]sighting{},
	}
}

// Run sweeps each second, while this process leads, until ctx ends. It is called once.
func (r *Recoverer) Run(ctx context.Context) error {
	ticker := r.config.Clock.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			r.sweep(ctx)
		}
	}
}

func (r *Recoverer) sweep(ctx context.Context) {
	if !r.config.Synced() || !r.config.Leads() {
		clear(r.sightings) // what was seen under another leadership is no evidence under the next
		return
	}
	r.sweepLate()
	r.config.Deletions.Resume()
	reported := r.config.Fleet.Unpersisted()
	now := r.config.Clock.Now()
	sightings := make(map[identity.Fence]sighting, len(reported))
	superseded := r.superseded()
	for _, u := range reported {
		fence := identity.FenceOf(u.Report.GetRecord().GetFence())
		if r.owned(fence) || !r.config.Announced(fence.AgentUID) {
			continue
		}
		if superseded[attempt{fence, nameOf(u.Report.GetRecord())}] {
			r.config.Deletions.Container(u.Report.GetRecord().GetFence())
			continue
		}
		seen, ok := r.sightings[fence]
		if !ok {
			seen = sighting{since: now}
		}
		r.judge(ctx, u, fence, &seen, now)
		sightings[fence] = seen
	}
	r.sightings = sightings
}

// attempt is a container of a name.
type attempt struct {
	fence identity.Fence
	name  store.Key
}

// superseded returns the attempts that deleted sandboxes superseded, with the names of these, as far as agents keep tombstones of
// them. An agent can name any container in a tombstone: only one of the same name is a superseded attempt.
func (r *Recoverer) superseded() map[attempt]bool {
	out := map[attempt]bool{}
	for _, t := range r.config.Fleet.Tombstones() {
		for _, s := range t.GetSuperseded() {
			out[attempt{identity.FenceOf(s.GetFence()), store.Key{Namespace: t.GetNamespace(), Name: t.GetName()}}] = true
		}
	}
	return out
}

func nameOf(r *agentv1.SandboxRecord) store.Key {
	return store.Key{Namespace: r.GetNamespace(), Name: r.GetName()}
}

// owned reports whether a create, write or deletion of this process owns a container.
func (r *Recoverer) owned(fence identity.Fence) bool {
	return r.config.Deletions.Owns(fence) || r.config.Creating(fence.SandboxUID) || r.config.Persist.Owns(fence.SandboxUID)
}

// judge decides about one container.
func (r *Recoverer) judge(ctx context.Context, u fleet.Unpersisted, fence identity.Fence, seen *sighting, now time.Time) {
	record := u.Report.GetRecord()
	name := nameOf(record)
	item, known := r.config.Store.Get(name)
	overdue := now.Sub(seen.since) >= r.config.OrphanTimeout
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, name.String(), obs.KeySandboxUID, fence.SandboxUID, obs.KeyAgentUID, fence.AgentUID)
	switch {
	case r.config.Store.Deleting(name, fence.SandboxUID):
		r.config.Deletions.Container(record.GetFence())
	case known && item.Resource != nil && item.Sandbox.GetUid() == fence.SandboxUID:
		if identity.FenceOf(item.Fence) == fence {
			r.config.Persist.Mark(name, record.GetFence())
		} else if overdue && r.unassigned(ctx, name, fence) {
			log.Info("deleting leftover container of a sandbox that runs elsewhere")
			r.config.Deletions.Container(record.GetFence())
		}
	case !started(u.Report):
		if overdue && r.unassigned(ctx, name, fence) {
			log.Info("deleting leftover container that never started")
			r.config.Deletions.Container(record.GetFence())
		}
	case seen.absentAt == 0:
		r.checkAbsent(ctx, u, name, seen)
	case u.Messages >= seen.absentAt+2:
		r.adopt(ctx, u, name)
	}
}

// started reports whether a container came so far that the caller of its create may have been answered.
func started(r *agentv1.SandboxReport) bool {
	return r.GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED
}

// unassigned asks the API server itself whether no custom resource assigns a container: the informer may be behind, and
// what it misses is no evidence. Without an answer it returns false.
func (r *Recoverer) unassigned(ctx context.Context, name store.Key, fence identity.Fence) bool {
	there, err := r.config.API.Lookup(ctx, name, "")
	switch {
	case err != nil:
		return false
	case there == nil:
		return true
	}
	r.config.Store.SetResource(there)
	if there.EffectiveUID() != fence.SandboxUID {
		return true
	}
	a, err := there.Assignment()
	switch {
	case err != nil: // a container may run there
		return false
	case a == nil: // not assigned (yet): an attempt that is over leaves one that is later, or none
		return there.Status.Attempt >= fence.Attempt
	}
	return identity.Fence{SandboxUID: a.SandboxUID, Attempt: a.Attempt, AgentUID: a.AgentUID} != fence
}

// checkAbsent asks the API server itself about a container that seems to have no custom resource.
func (r *Recoverer) checkAbsent(ctx context.Context, u fleet.Unpersisted, name store.Key, seen *sighting) {
	there, err := r.config.API.Lookup(ctx, name, "")
	fence := u.Report.GetRecord().GetFence()
	switch {
	case err != nil: // no evidence, no action
	case there == nil:
		seen.absentAt = u.Messages
	case there.EffectiveUID() == fence.GetSandboxUid():
		r.config.Store.SetResource(there)
	default:
		logr.FromContextOrDiscard(ctx).Info("deleting container whose name is another sandbox's",
			obs.KeySandbox, name.String(), obs.KeySandboxUID, fence.GetSandboxUid())
		r.config.Store.MarkGone(name, fence.GetSandboxUid())
		r.config.Deletions.Container(fence)
	}
}

// adoptTimeout is how long an adoption waits for the lock of a name: a name that is in use is left to the next sweep.
const adoptTimeout = 10 * time.Millisecond

// adopt writes the custom resource of a sandbox from its agent's record.
func (r *Recoverer) adopt(ctx context.Context, u fleet.Unpersisted, name store.Key) {
	record := u.Report.GetRecord()
	fence := identity.FenceOf(record.GetFence())
	agent, ok := r.config.Fleet.Agent(fence.AgentUID)
	if !ok {
		return
	}
	lockCtx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	unlock, err := r.config.Names.Lock(lockCtx, name)
	if err != nil {
		return
	}
	defer unlock()
	item, known := r.config.Store.Get(name)
	if r.owned(fence) || r.config.Store.ContainerRemoved(fence) || r.config.Store.Deleting(name, fence.SandboxUID) ||
		!known || item.Resource != nil || identity.FenceOf(item.Fence) != fence {
		return
	}
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, name.String(), obs.KeySandboxUID, fence.SandboxUID)
	if r.config.Store.RequestGone(record.GetNamespace(), record.GetRequestId()) {
		log.Info("deleting sandbox whose create was answered with another one that is deleted")
		r.config.Deletions.Container(record.GetFence())
		return
	}
	if running, other := r.repeated(record); running {
		return
	} else if other != "" {
		log.Info("deleting sandbox whose create was repeated before the sandbox was reported", obs.KeyAnsweredWith, other)
		r.config.Deletions.Container(record.GetFence())
		return
	}
	log.Info("adopting sandbox", obs.KeyAgent, agent.GetInfo().GetPodName())
	r.config.Persist.AdmitAlways()
	adopted := &store.Record{
		Record: record, Report: u.Report, AgentPod: agent.GetInfo().GetPodName(),
		NodeName: agent.GetInfo().GetNodeName(), AgentAddress: agent.GetAddress(),
	}
	r.config.Store.SetRecord(adopted)
	r.config.Persist.Persist(adopted, false)
	r.config.Adopted()
}

// repeated returns whether the create call of a sandbox that a former leader made is being repeated here, or the uid of another
// sandbox that it was answered with: then no caller knows of this one.
func (r *Recoverer) repeated(record *agentv1.SandboxRecord) (running bool, other string) {
	if record.GetRequestId() == "" {
		return false, ""
	}
	running, prior := r.config.Creates.Peek(idempotency.Key{Namespace: record.GetNamespace(), RequestID: record.GetRequestId()})
	if prior != nil && (*prior).GetSandbox().GetUid() != record.GetFence().GetSandboxUid() {
		other = (*prior).GetSandbox().GetUid()
	}
	return running, other
}
