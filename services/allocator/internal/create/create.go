// Package create makes sandboxes. A create goes through a pipeline of steps, which the two consistency modes share or order
// differently:
//
//	fast:   admit -> lock the name -> dry run, if the pool wants one -> schedule (reserve, start; on the next agent if one fails)
//	        -> acknowledge -> persist
//	strong: lock the name -> check quotas -> write the resource -> unlock -> await the start (the controller reserves and starts)
//
// The name stays locked until a fast create is answered, so that work on one sandbox is ordered. After an error nothing of
// the sandbox is left, unless the error says that the outcome is unknown: what an agent may have started is deleted by its
// fence until that is certain. The package owns which creates run, and which attempts are unsettled. All methods may be
// called concurrently.
package create

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/recovery"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Fleet is the part of fleet.Fleet that is used.
type Fleet interface {
	Reserve(req registry.Request) (*allocatorv1.Assignment, error)
	Release(fence *agentv1.Fence)
	// Admit returns the error of a new sandbox that exceeds a quota of its namespace, and reserves nothing.
	Admit(namespace string, limits *sandboxv1.ResourceLimits) error
	// EndCreate ends that a sandbox counts against quotas because it is being created.
	EndCreate(sandboxUID string)
	Agent(uid string) (*allocatorv1.Agent, bool)
}

// Agents finds agents.
type Agents interface {
	// Client returns the connection to an agent; false if there is none now.
	Client(uid string) (agentv1.AgentServiceClient, bool)
}

// Pools finds pools.
type Pools interface {
	// Resolve returns name, or the namespace's default pool if name is empty.
	Resolve(namespace, name string) (string, error)
	// Pool returns a pool from memory; false if there is none.
	Pool(namespace, name string) (*v1alpha1.SandboxPool, bool)
	// Synced reports whether pools and sandboxes of the API server have been seen once.
	Synced() bool
}

// Config is what a Creator needs.
type Config struct {
	Store     *store.Store
	Fleet     Fleet
	Agents    Agents
	Pools     Pools
	API       *apiserver.Client
	Deletions *deletion.Manager
	Persist   *persistence.Tracker
	Recovery  *recovery.Recoverer
	Calls     *idempotency.Calls[*sandboxv1.CreateSandboxResponse]
	Names     *keylock.Map[store.Key]
	Clock     clock.WithTickerAndDelayedExecution
	// AdmissionTimeout and SilenceTimeout bound attempts at agents that do not answer. Zero: the defaults.
	AdmissionTimeout, SilenceTimeout time.Duration
}

// Creator creates sandboxes.
type Creator struct {
	config   Config
	inFlight *InFlight

	mu        sync.Mutex
	unsettled map[store.Key][]*agentv1.SupersededAttempt // attempts of which it is not known what became
}

// New returns a creator; inFlight is what tells others which creates run.
func New(cfg Config, inFlight *InFlight) *Creator {
	if cfg.AdmissionTimeout == 0 {
		cfg.AdmissionTimeout = DefaultAdmissionTimeout
	}
	if cfg.SilenceTimeout == 0 {
		cfg.SilenceTimeout = DefaultSilenceTimeout
	}
	return &Creator{config: cfg, inFlight: inFlight, unsettled: map[store.Key][]*agentv1.SupersededAttempt{}}
}

// InFlight is the set of fast creates that run. It may be used concurrently.
type InFlight struct {
	mu   sync.Mutex
	uids map[string]struct{}
}

// NewInFlight returns an empty set.
func NewInFlight() *InFlight { return &InFlight{uids: map[string]struct{}{}} }

// Has reports whether a create makes the sandbox of a uid.
func (f *InFlight) Has(uid string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.uids[uid]
	return ok
}

// Any reports whether any create runs.
func (f *InFlight) Any() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.uids) > 0
}

func (f *InFlight) set(uid string, running bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if running {
		f.uids[uid] = struct{}{}
	} else {
		delete(f.uids, uid)
	}
}

// Create carries out an admitted create, once for each request_id: a repetition is answered with the first one's sandbox,
// whether that call still runs, was answered by this process, or by a former one.
func (c *Creator) Create(ctx context.Context, plan *admission.Plan) (*sandboxv1.CreateSandboxResponse, error) {
	key := idempotency.Key{Namespace: plan.Request.GetNamespace(), RequestID: plan.Request.GetRequestId()}
	digest := ""
	if key.RequestID != "" {
		digest = persistence.CreateDigest(plan.Request.GetLabels(), plan.Request.GetSpec())
	}
	response, shared, err := c.config.Calls.Do(ctx, key, digest, func(prior **sandboxv1.CreateSandboxResponse) (*sandboxv1.CreateSandboxResponse, error) {
		return c.createOnce(ctx, plan, key, digest, prior)
	})
	if err != nil {
		return nil, err
	}
	if shared {
		return replay(response), nil
	}
	return response, nil
}

// createOnce answers a create that an earlier call began, and carries out one that is new. The sandbox of an earlier call may
// become visible only while this one runs: then the lock of the name finds it, and the call is answered from it.
func (c *Creator) createOnce(ctx context.Context, plan *admission.Plan, key idempotency.Key, digest string, prior **sandboxv1.CreateSandboxResponse) (*sandboxv1.CreateSandboxResponse, error) {
	for range 2 {
		if key.RequestID != "" {
			if response, done, err := c.repeat(ctx, plan, key, digest, prior); done || err != nil {
				return response, err
			}
		}
		response, err := c.execute(ctx, plan)
		if !errors.Is(err, errSameRequest) {
			return response, err
		}
	}
	return nil, nameTaken(store.Key{Namespace: key.Namespace, Name: plan.Request.GetName()}, "exists")
}

// repeat answers a create that an earlier call began, if one did: from the answer that is remembered, or from what is known
// of its sandbox.
func (c *Creator) repeat(ctx context.Context, plan *admission.Plan, key idempotency.Key, digest string, prior **sandboxv1.CreateSandboxResponse) (*sandboxv1.CreateSandboxResponse, bool, error) {
	item, live := c.config.Store.ByRequest(key.Namespace, key.RequestID)
	if prior == nil && live {
		var err error
		switch item, live, err = c.config.Recovery.Load(ctx, item); {
		case err != nil:
			return nil, true, fault.Unsettled(err)
		case !live:
			return nil, true, requestGone()
		}
	}
	if prior == nil && !live {
		if c.config.Store.RequestGone(key.Namespace, key.RequestID) {
			return nil, true, requestGone()
		}
		return nil, false, nil
	}
	var response *sandboxv1.CreateSandboxResponse
	standing := recovery.Started
	if prior != nil {
		response = *prior
	} else {
		response = responseOf(item)
		switch standing = c.config.Recovery.StandingOf(item); standing {
		case recovery.Abandoned:
			return nil, true, recovery.RollingBack()
		case recovery.Unsettled:
			return nil, true, fault.Unsettled(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
				"an earlier attempt of this request_id may still be rolled back").RetryIn(recovery.RetryRollback))
		case recovery.Started, recovery.Unfinished, recovery.Unadopted:
		}
		if digestOf(item) != digest {
			return nil, true, idempotency.Reused(key.RequestID)
		}
	}
	sb := response.GetSandbox()
	switch {
	case plan.Request.GetName() != "" && plan.Request.GetName() != sb.GetName():
		return nil, true, idempotency.Reused(key.RequestID)
	case c.config.Store.Deleting(store.Key{Namespace: sb.GetNamespace(), Name: sb.GetName()}, sb.GetUid()) || sb.GetDeleteTime() != nil:
		return nil, true, fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "the sandbox %s of this request_id has been deleted", sb.GetName())
	case standing == recovery.Unadopted:
		return nil, true, fault.Unsettled(fault.New(errdefs.ErrUnavailable, fault.APIUnavailable,
			"the sandbox %s of this request_id is still being adopted", sb.GetName()).RetryIn(recovery.RetryRollback))
	case standing == recovery.Unfinished:
		response, err := c.resume(ctx, plan, item.Resource)
		return response, true, err
	}
	return replay(response), true, nil
}

func requestGone() error {
	return fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "the sandbox of this request_id has been deleted")
}

// digestOf returns the digest of the request that made a sandbox.
func digestOf(item store.Item) string {
	if item.Resource == nil {
		return persistence.CreateDigest(item.Sandbox.GetLabels(), item.Sandbox.GetSpec())
	}
	return item.Resource.Annotations[v1alpha1.AnnotationRequestDigest]
}

// responseOf rebuilds an answer from what is known; how long the stages took is not.
func responseOf(item store.Item) *sandboxv1.CreateSandboxResponse {
	mode := item.Sandbox.GetSpec().GetConsistencyMode()
	if item.Resource == nil {
		mode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST
	}
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: item.Sandbox, Endpoints: item.Sandbox.GetStatus().GetEndpoints(), ConsistencyMode: mode,
		StartPath: item.Sandbox.GetStatus().GetStartPath(),
	}
}

func replay(r *sandboxv1.CreateSandboxResponse) *sandboxv1.CreateSandboxResponse {
	r = proto.CloneOf(r)
	r.Replayed = true
	return r
}

// call is one create on its way through the pipeline.
type call struct {
	plan   *admission.Plan
	name   store.Key
	record *agentv1.SandboxRecord

	unlock   func()           // releases the name; nil while it is not locked
	room     bool             // a pending write is accounted for and not begun
	checked  bool             // admission is asked before the start
	placed   *store.Record    // where it runs, of a fast create
	timings  stages           // of a fast create
	timer    *stageTimer      // of a strong create
	attempt  recovery.Attempt // of a strong create
	response *sandboxv1.CreateSandboxResponse
}

// step is one step of the pipeline.
type step func(ctx context.Context, c *call) error

// pipeline returns the steps of a mode.
func (c *Creator) pipeline(mode sandboxv1.ConsistencyMode) []step {
	if mode == sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG {
		return []step{c.lockName, c.checkQuotas, c.writeResource, c.unlockName, c.awaitStart}
	}
	return []step{c.admit, c.lockName, c.dryRun, c.schedule, c.acknowledge, c.persist}
}

// execute carries out a create that was admitted and is new. What the passing of time changes is checked here and not
// before: a repetition is answered with its sandbox also when that has expired, or its pool is gone.
func (c *Creator) execute(ctx context.Context, plan *admission.Plan) (*sandboxv1.CreateSandboxResponse, error) {
	if err := admission.Expiry(plan.Request.GetSpec(), c.config.Clock.Now()); err != nil {
		return nil, err
	}
	pool, err := c.findPool(ctx, plan.Request.GetNamespace(), plan.Request.GetSpec().GetPool())
	if err != nil {
		return nil, err
	}
	if err := convert.CheckLimits(plan.Request.GetSpec().GetResources(), pool); err != nil {
		return nil, err
	}
	k := c.begin(ctx, plan, pool)
	uid := k.record.GetFence().GetSandboxUid()
	c.inFlight.set(uid, plan.Mode != sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG)
	defer c.inFlight.set(uid, false)
	defer c.config.Fleet.EndCreate(uid)
	defer k.releaseName()
	defer func() {
		if k.room {
			c.config.Persist.Abandon()
		}
	}()
	for _, step := range c.pipeline(plan.Mode) {
		if err := step(ctx, k); err != nil {
			var f *fault.Error
			if fault.IsUnsettled(err) && errors.As(err, &f) {
				return nil, f.With("sandbox", k.name.String()) // the server may have chosen the name
			}
			return nil, err
		}
	}
	return k.response, nil
}

// begin gives a new sandbox its uid, and its name if the caller left that to the server.
func (c *Creator) begin(ctx context.Context, plan *admission.Plan, pool *v1alpha1.SandboxPool) *call {
	uid := uuid.NewString()
	req := plan.Request
	name := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	if name.Name == "" {
		name.Name = "sbx-" + uid[:8] + uid[9:13]
	}
	return &call{plan: plan, name: name, checked: pool.Spec.Admission == v1alpha1.AdmissionDryRun, timer: newStageTimer(c.config.Clock), record: &agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: uid, Attempt: 1},
		Namespace: name.Namespace, Name: name.Name, Labels: req.GetLabels(), Spec: req.GetSpec(),
		Limits:    convert.Effective(req.GetSpec().GetResources(), pool),
		RequestId: req.GetRequestId(), Traceparent: obs.Traceparent(ctx),
		CreateTime: timestamppb.New(c.config.Clock.Now()), ConsistencyMode: plan.Mode,
	}}
}

// admit takes room for the write that will follow.
func (c *Creator) admit(_ context.Context, k *call) error {
	err := c.config.Persist.Admit()
	k.room = err == nil
	return err
}

// acknowledge shows the sandbox, which runs, to every reader.
func (c *Creator) acknowledge(_ context.Context, k *call) error {
	k.response = responseOf(c.config.Store.SetRecord(k.placed))
	k.response.ConsistencyMode, k.response.Timings = k.plan.Mode, k.timings
	return nil
}

// persist has the custom resource written behind the answer.
func (c *Creator) persist(_ context.Context, k *call) error {
	k.room = false
	c.config.Persist.Persist(k.placed, true)
	return nil
}

// findPool returns a pool, from memory if it is there. The API server is asked before one is said not to exist: informers
// may be behind, by seconds after it was away.
func (c *Creator) findPool(ctx context.Context, namespace, name string) (*v1alpha1.SandboxPool, error) {
	if pool, ok := c.config.Pools.Pool(namespace, name); ok {
		return pool, nil
	}
	if !c.config.Pools.Synced() {
		return nil, apiserver.Unavailable(nil)
	}
	callCtx, cancel := context.WithTimeout(ctx, c.config.API.Timeout())
	defer cancel()
	pool := &v1alpha1.SandboxPool{}
	err := c.config.API.Get(callCtx, client.ObjectKey{Namespace: namespace, Name: name}, pool)
	switch {
	case err == nil:
		return pool, nil
	case ctx.Err() != nil:
		return nil, fault.FromContext(ctx, "looking up the pool", err)
	case apierrors.IsNotFound(err):
		return nil, fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "pool %s/%s does not exist", namespace, name).With("pool", name)
	}
	return nil, apiserver.Unavailable(err)
}
