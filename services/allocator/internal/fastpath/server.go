// Package fastpath serves sandbox.v1.SandboxService: one file for each RPC, which validates and delegates. A fast create
// reserves capacity in memory, has the agent start the sandbox, and is answered; its custom resource is written behind. The
// package owns no state of its own, and wires the packages that do:
//
//	admission     checks what callers ask for
//	idempotency   request_ids: calls that run, and answers that are remembered
//	create        the pipeline of a create
//	persistence   custom resources written behind, and marked at their agents
//	deletion      deletions of sandboxes and of containers
//	recovery      what a former leader or a failed create left behind
//	apiserver     calls to the API server
//
// All methods may be called concurrently. Work on one namespace/name is ordered by a lock on that name: a create holds it
// until it is answered, a delete or update until it is durable. The write behind runs without it; a holder of the name stops
// or awaits the write first. Locks, in the order in which they may be taken:
//
//	the name (keylock) -> one of {idempotency, create, persistence, deletion, recovery} -> store -> fleet -> registry
//
// Of the second group create may take deletion's while it holds its own, recovery store's, and no other pair occurs. No I/O
// happens under any lock but the name's.
//
// What fails leaves nothing: a container whose create was not answered is deleted, by its fence, until that is certain. What
// was acknowledged stays: from the agent's answer to the written custom resource the agent's durable record is the truth, and
// recovery adopts what a former leader left in that state.
//
// One replica leads; the others observe all that it observes (custom resources, agents' reports and tombstones) and do
// nothing. What the memory of a leader alone held when it ended:
//
//	records that are not written   their agents report them as acknowledged and not persisted: adopted
//	creates that ran               the agent cancels what its caller leaves; what had started already is adopted. The caller
//	                               was not answered: its request_id is answered with the sandbox, and one whose request_id
//	                               was answered with another before it was reported is deleted
//	attempts given up as unknown   of one sandbox the last attempt is adopted; the others, and what never started, are
//	                               leftovers: deleted after the orphan timeout
//	request_ids answered           creates: on the custom resource, the agent's record and the tombstone. Deletes: on the
//	                               custom resource and the tombstone, remembered by every replica for an hour. Updates: the
//	                               last one, on the custom resource. Refusals were not remembered either
//	deletions of custom resources  on the custom resource; the controller has the container removed
//	deletions without one          on the agent, as tombstones, with the container's removal: see package deletion
//	uids that are gone             every replica has them: from the informer and from tombstones
//	writes under way               may land later: they meet the record they were made from, or a tombstone
//	reservations                   count with the create that made them, if its agent admitted it; the agent's own admission
//	                               is final
//	marks of what is written       made again, for the agent still reports it as not persisted
//	waits of strong creates        end with their connection; the custom resource is there, and the controller continues
//
// A leader concludes nothing from what an agent reports before that agent knows of its leadership (announce): until then a
// former leader might act on it.
package fastpath

import (
	"context"
	"time"

	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/create"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/recovery"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// Fleet is the part of fleet.Fleet that is used.
type Fleet interface {
	create.Fleet
	deletion.Fleet
	recovery.Fleet
	// Agents returns those of a namespace, and of a pool if one is named.
	Agents(namespace, pool string) []*allocatorv1.Agent
}

// Leadership is this process's view of who leads.
type Leadership interface {
	// Leads reports whether this process leads, as far as it knows.
	Leads() bool
	// Confirm reports whether it certainly leads, so that no other process has until now.
	Confirm(ctx context.Context) (bool, error)
}

// Config is what a Server needs.
type Config struct {
	Store     *store.Store
	Fleet     Fleet
	Agents    deletion.Agents
	Pools     create.Pools
	Resources apiserver.Resources
	Tasks     *tasks.Set
	Clock     clock.WithTickerAndDelayedExecution
	Metrics   *Metrics
	// Events takes Kubernetes Events; nil for none.
	Events persistence.Events
	// Leadership rules what is done unasked; calls reach a Server only while its process leads.
	Leadership Leadership
	// Announced reports whether an agent knows of this process's leadership: only then can no former leader act on it.
	Announced func(agentUID string) bool
	// Mode of creates that name none: FAST or STRONG.
	Mode sandboxv1.ConsistencyMode
	// OrphanTimeout is how long a container that belongs to no sandbox may stay before it is deleted.
	OrphanTimeout time.Duration
	// CreateTimeout bounds a create whose caller set no deadline.
	CreateTimeout time.Duration
	// AdmissionTimeout and SilenceTimeout bound attempts at agents that do not answer. Zero: those of package create.
	AdmissionTimeout, SilenceTimeout time.Duration
	// WriteLimit is how many custom resources may wait to be written or deleted.
	WriteLimit int
	// Settle is how long after a custom resource was seen to be absent a write of it may still land. Zero:
	// deletion.DefaultSettle.
	Settle time.Duration
	// Sign signs a ticket for a user.
	Sign func(t auth.Ticket) (string, error)
	// Traced says that spans are exported, so that a delete call's trace is worth a write to the API server.
	Traced bool
}

// Server implements sandboxv1.SandboxServiceServer.
type Server struct {
	sandboxv1.UnimplementedSandboxServiceServer

	config    Config
	names     *keylock.Map[store.Key]
	api       *apiserver.Client
	creator   *create.Creator
	persist   *persistence.Tracker
	deletions *deletion.Manager
	recovery  *recovery.Recoverer
	deletes   *idempotency.Calls[*sandboxv1.DeleteSandboxResponse]
	updates   *idempotency.Calls[*sandboxv1.Sandbox]
}

// New returns a server. Its background work runs in cfg.Tasks.
func New(cfg Config) *Server {
	s := &Server{
		config: cfg, names: keylock.New[store.Key](), api: apiserver.New(cfg.Resources, cfg.Clock),
		deletes: idempotency.New[*sandboxv1.DeleteSandboxResponse](cfg.Clock), updates: idempotency.New[*sandboxv1.Sandbox](cfg.Clock),
	}
	creates, inFlight := idempotency.New[*sandboxv1.CreateSandboxResponse](cfg.Clock), create.NewInFlight()
	s.persist = persistence.New(persistence.Config{
		API: s.api, Agents: cfg.Agents, Store: cfg.Store, Tasks: cfg.Tasks, Clock: cfg.Clock, Limit: cfg.WriteLimit, Events: cfg.Events,
		Leads: cfg.Leadership.Leads, Confirm: cfg.Leadership.Confirm, Creating: inFlight.Any, Rejected: func(fence *agentv1.Fence) { s.deletions.Container(fence) },
	})
	s.deletions = deletion.New(deletion.Config{
		Agents: cfg.Agents, Fleet: cfg.Fleet, Store: cfg.Store, API: s.api, Persist: s.persist, Tasks: cfg.Tasks, Clock: cfg.Clock,
		Leads: cfg.Leadership.Leads, Announced: cfg.Announced, Settle: cfg.Settle, Traced: cfg.Traced,
	})
	s.recovery = recovery.New(recovery.Config{
		Store: cfg.Store, Fleet: cfg.Fleet, API: s.api, Deletions: s.deletions, Persist: s.persist, Creates: creates, Names: s.names,
		Tasks: cfg.Tasks, Clock: cfg.Clock, Synced: cfg.Pools.Synced, Leads: cfg.Leadership.Leads, Announced: cfg.Announced,
		Creating: inFlight.Has, Adopted: cfg.Metrics.adopted.Inc, OrphanTimeout: cfg.OrphanTimeout,
	})
	s.creator = create.New(create.Config{
		Store: cfg.Store, Fleet: cfg.Fleet, Agents: cfg.Agents, Pools: cfg.Pools, API: s.api, Deletions: s.deletions, Persist: s.persist,
		Recovery: s.recovery, Calls: creates, Names: s.names, Clock: cfg.Clock,
		AdmissionTimeout: cfg.AdmissionTimeout, SilenceTimeout: cfg.SilenceTimeout,
	}, inFlight)
	return s
}

// Recover adopts and deletes what a former leader left behind, until ctx ends. It is called once.
func (s *Server) Recover(ctx context.Context) error { return s.recovery.Run(ctx) }

// ResourceSeen takes a custom resource from the informer; ResourceGone takes its removal.
func (s *Server) ResourceSeen(sb *v1alpha1.Sandbox) { s.recovery.ResourceSeen(sb) }

// ResourceOutlined takes the metadata of a custom resource from the first list.
func (s *Server) ResourceOutlined(sb *v1alpha1.Sandbox) { s.recovery.ResourceOutlined(sb) }

// ResourceGone takes the removal of a custom resource from the informer.
func (s *Server) ResourceGone(sb *v1alpha1.Sandbox) { s.recovery.ResourceGone(sb) }

// Pending returns the number of custom resources that wait to be written.
func (s *Server) Pending() int64 { return s.persist.Pending() }

// drainPeriod is how often Drain looks.
const drainPeriod = 20 * time.Millisecond

// Drain blocks until no custom resource waits to be written, or ctx ends.
func (s *Server) Drain(ctx context.Context) {
	ticker := s.config.Clock.NewTicker(drainPeriod)
	defer ticker.Stop()
	for s.Pending() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}
