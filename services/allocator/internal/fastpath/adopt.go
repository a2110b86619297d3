package fastpath

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/reap"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// sweepInterval is how often loose containers are looked at.
const sweepInterval = time.Second

// looseSighting is what is known of a container that its agent reports as not written and that no create, write or delete
// of this process owns.
type looseSighting struct {
	since time.Time
	// absent is how many messages its agent had sent when the API server said that there is no custom resource; zero
	// before that.
	absent int64
}

// Adopt looks each second, while this process leads, after loose containers until ctx ends. One whose agent does not know
// of the lead yet is left alone: a former leader may be about to delete it. Each other is, by what is known of it,
//
//	deleted already, or the name is another's      -> deleted by its fence
//	written, and this container is the assigned    -> its agent is told so
//	written, and another container is the assigned -> a leftover: deleted after the orphan timeout
//	not written and it never started               -> a leftover: deleted after the orphan timeout
//	not written and it started                     -> adopted: its custom resource is written from the agent's record
//
// Adoption must not bring back what was just deleted by somebody else. A deletion removes the container before the custom
// resource; so after the API server has said that there is none, two more messages of the agent must still report it.
func (s *Server) Adopt(ctx context.Context) error {
	ticker := s.config.Clock.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			s.sweep(ctx)
		}
	}
}

func (s *Server) sweep(ctx context.Context) {
	if !s.config.Pools.Synced() || !s.config.Lead.Leads() {
		s.mu.Lock()
		clear(s.loose) // what was seen under another lead is no evidence under the next
		s.mu.Unlock()
		return
	}
	s.sweepGraves()
	loose := s.config.Fleet.Unpersisted()
	now := s.config.Clock.Now()
	sightings := make(map[identity.Fence]looseSighting, len(loose))
	for _, l := range loose {
		key := identity.FenceOf(l.Report.GetRecord().GetFence())
		if s.owned(key) || !s.config.Announced(key.AgentUID) {
			continue
		}
		s.mu.Lock()
		sighting, ok := s.loose[key]
		s.mu.Unlock()
		if !ok {
			sighting = looseSighting{since: now}
		}
		s.look(ctx, l, key, &sighting, now)
		sightings[key] = sighting
	}
	s.mu.Lock()
	s.loose = sightings
	s.mu.Unlock()
}

// owned tells whether a create, write or delete of this process has a container in hand.
func (s *Server) owned(key identity.Fence) bool {
	if s.reaper.Driving(key) {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, creating := s.creating[key.SandboxUID]
	_, marking := s.marking[key.SandboxUID]
	_, writing := s.jobs[key.SandboxUID]
	_, burying := s.burials[key]
	return creating || marking || writing || burying
}

func (s *Server) look(ctx context.Context, l fleet.Unpersisted, key identity.Fence, sighting *looseSighting, now time.Time) {
	record := l.Report.GetRecord()
	name := store.Key{Namespace: record.GetNamespace(), Name: record.GetName()}
	item, seen := s.store.Get(name)
	overdue := now.Sub(sighting.since) >= s.config.OrphanTimeout
	log := logr.FromContextOrDiscard(ctx).WithValues("sandbox", name.String(), "uid", key.SandboxUID, "agentUID", key.AgentUID)
	switch {
	case s.store.Deleting(key.SandboxUID):
		s.reaper.Drive(reap.Order{Fence: record.GetFence()})
	case seen && item.Resource != nil && item.Sandbox.GetUid() == key.SandboxUID:
		if identity.FenceOf(item.Fence) == key {
			s.config.Tasks.Go(func(ctx context.Context) { s.markPersisted(ctx, record.GetFence()) })
		} else if overdue && s.unassigned(ctx, name, key) {
			log.Info("deleting a leftover container of a sandbox that runs elsewhere")
			s.reaper.Drive(reap.Order{Fence: record.GetFence()})
		}
	case !acknowledged(l.Report):
		if overdue && s.unassigned(ctx, name, key) {
			log.Info("deleting a leftover container that never started")
			s.reaper.Drive(reap.Order{Fence: record.GetFence()})
		}
	case sighting.absent == 0:
		s.confront(ctx, l, name, sighting)
	case l.Messages >= sighting.absent+2:
		s.adopt(ctx, l, name)
	}
}

// acknowledged tells whether a sandbox came so far that its creator may have been told of it.
func acknowledged(r *agentv1.SandboxReport) bool {
	return r.GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED
}

// unassigned asks the API server itself whether no custom resource assigns a container: the informer may be behind, and
// what it misses is no evidence. Without an answer it says false.
func (s *Server) unassigned(ctx context.Context, name store.Key, key identity.Fence) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	there := &v1alpha1.Sandbox{}
	err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: name.Namespace, Name: name.Name}, there)
	if err != nil {
		return apierrors.IsNotFound(err)
	}
	s.store.SetResource(there)
	if there.EffectiveUID() != key.SandboxUID {
		return true
	}
	a, err := there.Assignment()
	switch {
	case err != nil: // somebody may run there
		return false
	case a == nil: // nobody is assigned (yet): an attempt that is over leaves one that is later, or none
		return there.Status.Attempt >= key.Attempt
	}
	return identity.Fence{SandboxUID: a.SandboxUID, Attempt: a.Attempt, AgentUID: a.AgentUID} != key
}

// confront asks the API server itself about a container that seems to have no custom resource.
func (s *Server) confront(ctx context.Context, l fleet.Unpersisted, name store.Key, sighting *looseSighting) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	there := &v1alpha1.Sandbox{}
	err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: name.Namespace, Name: name.Name}, there)
	fence := l.Report.GetRecord().GetFence()
	switch {
	case apierrors.IsNotFound(err):
		sighting.absent = l.Messages
	case err != nil: // no evidence, no action
	case there.EffectiveUID() == fence.GetSandboxUid():
		s.store.SetResource(there)
	default:
		logr.FromContextOrDiscard(ctx).Info("deleting a container whose name is another sandbox's",
			"sandbox", name.String(), "uid", fence.GetSandboxUid())
		s.store.MarkGone(name, fence.GetSandboxUid())
		s.reaper.Drive(reap.Order{Fence: fence})
	}
}

// repeated tells whether the create call of a sandbox that a former leader made is being repeated here, or was answered with
// the uid of another one: then nobody was told of this one.
func (s *Server) repeated(record *agentv1.SandboxRecord) (running bool, other string) {
	if record.GetRequestId() == "" {
		return false, ""
	}
	key := requestKey{record.GetNamespace(), record.GetRequestId()}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, running = s.flights[key]
	if a, ok := s.answers.get(s.config.Clock.Now(), key); ok && a.response.GetSandbox().GetUid() != record.GetFence().GetSandboxUid() {
		other = a.response.GetSandbox().GetUid()
	}
	return running, other
}

// adopt writes the custom resource of a sandbox from its agent's record. It waits for nothing: a name that somebody works
// on is left for the next sweep.
func (s *Server) adopt(ctx context.Context, l fleet.Unpersisted, name store.Key) {
	record := l.Report.GetRecord()
	key := identity.FenceOf(record.GetFence())
	agent, ok := s.config.Fleet.Agent(key.AgentUID)
	if !ok {
		return
	}
	lockCtx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	unlock, err := s.locks.Lock(lockCtx, name)
	if err != nil {
		return
	}
	defer unlock()
	item, seen := s.store.Get(name)
	if s.owned(key) || s.store.ContainerRemoved(key) || s.store.Deleting(key.SandboxUID) || !seen || item.Resource != nil || identity.FenceOf(item.Fence) != key {
		return
	}
	if running, other := s.repeated(record); running {
		return
	} else if other != "" {
		log := logr.FromContextOrDiscard(ctx)
		log.Info("deleting a sandbox whose create was repeated before it was known", "sandbox", name.String(), "uid", key.SandboxUID, "answeredWith", other)
		s.reaper.Drive(reap.Order{Fence: record.GetFence()})
		return
	}
	logr.FromContextOrDiscard(ctx).Info("adopting a sandbox", "sandbox", name.String(), "uid", key.SandboxUID, "agent", agent.GetInfo().GetPodName())
	s.writer.AdmitAlways()
	adopted := &store.Record{
		Record: record, Report: l.Report, AgentPod: agent.GetInfo().GetPodName(),
		NodeName: agent.GetInfo().GetNodeName(), AgentAddress: agent.GetAddress(),
	}
	s.store.SetRecord(adopted)
	s.persist(adopted, false)
	s.config.Metrics.adopted.Inc()
}
