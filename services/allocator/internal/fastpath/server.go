// Package fastpath serves sandbox.v1.SandboxService. A fast create reserves a place in memory, has the agent start the
// sandbox, and answers; the custom resource is written behind. All methods may be called concurrently.
//
// All work on one namespace/name is ordered by a lock on that key: a create holds it until it is answered, a delete or
// update until it is durable. The write behind runs without the lock; whoever holds it stops or awaits the write first.
// Locks, in the order in which they may be taken: the key, Server.mu, and below it those of store, fleet and registry. No
// I/O happens under any but the key's.
//
// Whatever fails leaves nothing: an agent whose answer is not known is told to delete, by the fence, until it is certain.
// Whatever was acknowledged stays: from the agent's answer to the written custom resource the agent's durable record is the
// truth, and Adopt adopts what a former leader left in that state.
//
// One replica leads, the others hear all that it hears (custom resources, agents' reports and tombstones) and do nothing.
// What the memory of a leader alone held when it died:
//
//	records that are not written   their agents report them as acknowledged and not persisted: adopted
//	creates that ran               the agent cancels what its caller leaves; what had started already is adopted. The caller
//	                               was told nothing: its request_id is answered with the sandbox, and one whose request_id was
//	                               answered with another before it was reported is deleted
//	attempts given up as unknown   of one sandbox the last attempt is adopted; the others, and what never started, are
//	                               leftovers: deleted after the orphan timeout
//	request_ids answered           stand on the custom resource, the agent's record and the tombstone; refusals were not
//	                               remembered either
//	deletions of custom resources  stand on the custom resource; the controller has the container removed
//	deletions that none tells of   stand on the agent, as tombstones, with the container's removal: see bury.go
//	uids that are gone             every replica has them: from the informer and from tombstones
//	writes under way               may land later: they meet the record they were made from, or a tombstone
//	reservations                   count with the create that made them, if its agent took it in; the agent's own admission
//	                               is final
//	marks of what is written       made again, for the agent still reports it as not persisted
//	waits of strong creates        end with their connection; the custom resource is there, and the controller goes on
//
// A leader concludes nothing from what an agent reports before that agent knows of its lead (announce): until then a former
// leader might act on it.
package fastpath

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/reap"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

// Resources is the part of the API server that is used; client.Client has it.
type Resources interface {
	writer.Resources
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
	Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error
}

// Fleet is the part of fleet.Fleet that is used.
type Fleet interface {
	Reserve(req registry.Request) (*allocatorv1.Assignment, error)
	Release(fence *agentv1.Fence)
	Agent(uid string) (*allocatorv1.Agent, bool)
	// Agents are those of a namespace, and of a pool if one is named.
	Agents(namespace, pool string) []*allocatorv1.Agent
	Unpersisted() []fleet.Unpersisted
}

// Graves is what agents tell of sandboxes that were deleted.
type Graves interface {
	// Tombstones returns all tombstones; Tombstoned tells whether there is one of a container.
	Tombstones() []*agentv1.Tombstone
	HasTombstone(key identity.Fence) bool
	// Reported tells whether a container is still reported.
	Reported(key identity.Fence) bool
}

// Pools finds pools.
type Pools interface {
	// Pool returns a pool from memory; false if there is none.
	Pool(namespace, name string) (*v1alpha1.SandboxPool, bool)
	// Synced tells whether pools and sandboxes of the API server have been seen once.
	Synced() bool
}

// Events takes Kubernetes Events; events.EventRecorder has it.
type Events interface {
	Eventf(regarding runtime.Object, related runtime.Object, eventtype, reason, action, note string, args ...any)
}

// Lead tells whether this process leads.
type Lead interface {
	Leads() bool
	// Confirm tells whether it does for certain, so that nobody else has until now.
	Confirm(ctx context.Context) (bool, error)
}

// Config is what a Server needs.
type Config struct {
	Store     *store.Store
	Fleet     Fleet
	Graves    Graves
	Agents    reap.Agents
	Pools     Pools
	Resources Resources
	Tasks     *tasks.Set
	Clock     clock.WithTickerAndDelayedExecution
	Metrics   *Metrics
	// Events takes what people should hear of; nil for nobody.
	Events Events
	// Lead tells whether this process leads. What is served is the server's to know; here it rules what is done unasked.
	Lead Lead
	// Announced tells whether an agent knows of this process's lead: only then can nobody else act on it any more.
	Announced func(agentUID string) bool
	// Mode of creates that name none: FAST or STRONG.
	Mode sandboxv1.ConsistencyMode
	// OrphanTimeout is how long a container that belongs to nobody may stand before it is deleted.
	OrphanTimeout time.Duration
	// CreateTimeout bounds a create whose caller set no deadline.
	CreateTimeout time.Duration
	// WriteLimit is how many custom resources may wait to be written or deleted.
	WriteLimit int
	// Settle is how long after a custom resource was seen to be absent a write of it, sent by whoever, may still land.
	// Zero: DefaultSettle.
	Settle time.Duration
}

// Server implements sandboxv1.SandboxServiceServer.
type Server struct {
	sandboxv1.UnimplementedSandboxServiceServer
	config Config
	store  *store.Store
	locks  *keylock.Map[store.Key]
	reaper *reap.Reaper
	writer *writer.Writer
	api    *api
	// burying bounds the calls to the API server for burials.
	burying chan struct{}

	mu        sync.Mutex
	flights   map[requestKey]*flight           // creates with a request_id that run now
	abandoned map[string]struct{}              // creates that failed and are being undone, by momentOf
	answers   *answers                         // what creates with a request_id were answered
	open      map[store.Key][]identity.Fence   // tries of creates of which it is not known what became
	creating  map[string]struct{}              // sandbox uids of creates that run now
	jobs      map[string]job                   // writes behind, by sandbox uid
	burials   map[identity.Fence]*burial       // deletions whose custom resource may be there, or come; see bury.go
	late      map[types.UID]*v1alpha1.Sandbox  // custom resources of sandboxes that are gone
	marking   map[string]struct{}              // sandbox uids whose agent is being told that they are written
	loose     map[identity.Fence]looseSighting // see adopt.go
}

// New returns a server. Its background work runs in cfg.Tasks.
func New(cfg Config) *Server {
	s := &Server{
		config: cfg, store: cfg.Store, locks: keylock.New[store.Key](),
		flights: map[requestKey]*flight{}, answers: newAnswers(), abandoned: map[string]struct{}{}, open: map[store.Key][]identity.Fence{}, creating: map[string]struct{}{},
		jobs: map[string]job{}, marking: map[string]struct{}{}, loose: map[identity.Fence]looseSighting{},
		burials: map[identity.Fence]*burial{}, burying: make(chan struct{}, buryParallel), late: map[types.UID]*v1alpha1.Sandbox{},
	}
	if s.config.Settle == 0 {
		s.config.Settle = DefaultSettle
	}
	s.api = &api{Resources: cfg.Resources}
	s.config.Resources = s.api
	s.reaper = reap.New(reap.Config{Agents: cfg.Agents, Leads: cfg.Lead.Leads, Tasks: cfg.Tasks, Clock: cfg.Clock, Removed: s.removed})
	s.writer = writer.New(writer.Config{
		Resources: s.api, Tasks: cfg.Tasks, Clock: cfg.Clock, Limit: cfg.WriteLimit, Leads: cfg.Lead.Leads, Dead: s.store.Deleting, Busy: s.busy,
	})
	return s
}

// removed is told of each container that was driven and is certainly gone: its place is free, and it answers nobody.
func (s *Server) removed(fence *agentv1.Fence) {
	s.config.Fleet.Release(fence)
	s.store.SetContainerRemoved(fence)
}

// Pending is the number of custom resources that wait to be written.
func (s *Server) Pending() int64 { return s.writer.Pending() }

// Drain blocks until nothing waits to be written, or ctx ends.
func (s *Server) Drain(ctx context.Context) {
	ticker := s.config.Clock.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for s.Pending() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

// missing is the error for a sandbox that is not in the store.
func (s *Server) missing(key store.Key) error {
	if !s.config.Pools.Synced() {
		return errAPI(nil)
	}
	return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %s does not exist", key).With("sandbox", key.String())
}

func errAPI(cause error) error {
	message := "the Kubernetes API server cannot be reached"
	if cause != nil && strings.Contains(cause.Error(), unauthorized) { // see api.note
		message = "the Kubernetes API server does not let the allocator do that; unless it has just started, check the allocator's roles"
	}
	return fault.Wrap(cause, errdefs.ErrUnavailable, fault.APIUnavailable, "%s", message).RetryIn(time.Second)
}

// errContext is the error of a call whose context has ended, with the last thing that went wrong before.
func errContext(ctx context.Context, doing string, last error) error {
	after := ""
	if last != nil {
		after = fmt.Sprintf(" (last: %v)", last)
	}
	if context.Cause(ctx) == context.Canceled || ctx.Err() == context.Canceled { //nolint:errorlint // a context's own sentinel
		return fault.Wrap(last, context.Canceled, fault.Cancelled, "the caller left while %s%s", doing, after)
	}
	return fault.Wrap(last, context.DeadlineExceeded, fault.DeadlineExceeded, "the deadline passed while %s%s", doing, after)
}
