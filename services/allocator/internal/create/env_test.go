package create_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/create"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/recovery"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

const (
	ns   = "ns"
	pool = "p"
)

var one = store.Key{Namespace: ns, Name: "one"} //nolint:gochecknoglobals // a constant

// stepClock is a fake clock that calls functions as a real one does: in goroutines of their own.
type stepClock struct{ *clocktesting.FakeClock }

func (c stepClock) AfterFunc(d time.Duration, f func()) clock.Timer {
	return c.FakeClock.AfterFunc(d, func() { go f() })
}

// clients are the connections to agents.
type clients struct {
	mu sync.Mutex
	m  map[string]agentv1.AgentServiceClient
}

func (c *clients) Client(uid string) (agentv1.AgentServiceClient, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	client, ok := c.m[uid]
	return client, ok
}

func (c *clients) Gone(string) bool { return false }

// set replaces the connection to an agent; nil is none.
func (c *clients) set(uid string, client agentv1.AgentServiceClient) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m[uid] = client; client == nil {
		delete(c.m, uid)
	}
}

// hookedFleet calls a hook after each reservation.
type hookedFleet struct {
	*fleet.Fleet
	reserved func()
}

func (f *hookedFleet) Reserve(req registry.Request) (*allocatorv1.Assignment, error) {
	a, err := f.Fleet.Reserve(req)
	if err == nil && f.reserved != nil {
		f.reserved()
	}
	return a, err
}

// env is a Creator with all that it uses: fake agents, an API server in memory, and a clock that the test moves.
type env struct {
	t         *testing.T
	api       *fakeapi.Server
	clock     stepClock
	store     *store.Store
	registry  *registry.Registry
	fleet     *hookedFleet
	agents    map[string]*fakeagent.Agent
	clients   *clients
	pools     *pools.Pools
	names     *keylock.Map[store.Key]
	persist   *persistence.Tracker
	deletions *deletion.Manager
	recovery  *recovery.Recoverer
	inFlight  *create.InFlight
	announced bool
	creator   *create.Creator
	tasks     *tasks.Set

	seen map[string]*v1alpha1.Sandbox // what sync has shown, by name
}

const writeLimit = 8

// newEnv returns an environment whose informer is synced and knows the pool, with an agent for each capacity: a, b and so on.
func newEnv(t *testing.T, capacities ...int32) *env {
	t.Helper()
	c := stepClock{clocktesting.NewFakeClock(time.Unix(1_700_000_000, 0))}
	e := &env{
		t: t, api: fakeapi.New(t), clock: c, store: store.New(c), registry: registry.New(0, 0), agents: map[string]*fakeagent.Agent{},
		clients: &clients{m: map[string]agentv1.AgentServiceClient{}}, pools: pools.New(), names: keylock.New[store.Key](),
		tasks: tasks.New(), announced: true, seen: map[string]*v1alpha1.Sandbox{},
	}
	e.store.CountIn(e.registry)
	e.fleet = &hookedFleet{Fleet: fleet.New(e.registry, c, e.store, nil)}
	e.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: poolMeta()})
	e.pools.SetSynced()
	for i, capacity := range capacities {
		e.addAgent(string(rune('a'+i)), capacity)
	}
	e.restart()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = e.tasks.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return e
}

// restart makes a Creator that remembers nothing, as of the next leader. The background work of the one before continues.
func (e *env) restart() {
	api := apiserver.New(e.api, e.clock)
	leads := func() bool { return true }
	announced := func(string) bool { return e.announced }
	calls := idempotency.New[*sandboxv1.CreateSandboxResponse](e.clock)
	e.inFlight = create.NewInFlight()
	e.persist = persistence.New(persistence.Config{
		API: api, Agents: e.clients, Store: e.store, Tasks: e.tasks, Clock: e.clock, Limit: writeLimit, Leads: leads, Confirm: func(context.Context) (bool, error) { return leads(), nil },
		Creating: e.inFlight.Any, Rejected: func(fence *agentv1.Fence) { e.deletions.Container(fence) },
	})
	e.deletions = deletion.New(deletion.Config{
		Agents: e.clients, Fleet: e.fleet, Store: e.store, API: api, Persist: e.persist, Tasks: e.tasks, Clock: e.clock,
		Leads: leads, Announced: announced,
	})
	e.recovery = recovery.New(recovery.Config{
		Store: e.store, Fleet: e.fleet, API: api, Deletions: e.deletions, Persist: e.persist, Creates: calls, Names: e.names,
		Tasks: e.tasks, Clock: e.clock, Synced: e.pools.Synced, Leads: leads, Announced: announced,
		Creating: e.inFlight.Has, Adopted: func() {}, OrphanTimeout: time.Second,
	})
	e.creator = create.New(create.Config{
		Store: e.store, Fleet: e.fleet, Agents: e.clients, Pools: e.pools, API: api, Deletions: e.deletions, Persist: e.persist,
		Recovery: e.recovery, Calls: calls, Names: e.names, Clock: e.clock,
	}, e.inFlight)
}

func poolMeta() metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: ns, Name: pool} }

// fillQueue takes all room for writes.
func (e *env) fillQueue() {
	for e.persist.Admit() == nil {
	}
}

func (e *env) addAgent(uid string, capacity int32) {
	e.agents[uid] = fakeagent.New(&agentv1.AgentInfo{
		PodName: "pod-" + uid, PodUid: uid, Namespace: ns, Pool: pool, NodeName: "node", PodIp: "10.0.0.1", Capacity: capacity,
	})
	e.clients.set(uid, fakeagent.Connect(e.t, e.agents[uid]))
	e.fleet.Joined(&agentv1.AgentInfo{PodName: "pod-" + uid, PodUid: uid, Namespace: ns, Pool: pool, NodeName: "node", Capacity: capacity}, uid+":5758")
	e.report(uid)
}

// report has the fleet receive what an agent has.
func (e *env) report(uid string) {
	reports := e.agents[uid].Sandboxes()
	info := &agentv1.AgentInfo{PodName: "pod-" + uid, PodUid: uid, Namespace: ns, Pool: pool, NodeName: "node", Capacity: 5}
	e.fleet.Snapshot(uid, &agentv1.AgentSnapshot{Info: info, Accepting: true, Sandboxes: reports})
}

// script sets what every agent does after it has admitted a sandbox.
func (e *env) script(onCreate func(ctx context.Context, r *agentv1.SandboxRecord) error) {
	for _, a := range e.agents {
		a.OnCreate = onCreate
	}
}

// onFirst fails the first attempt of each create, at whichever agent.
func onFirst(err error) func(context.Context, *agentv1.SandboxRecord) error {
	return func(_ context.Context, r *agentv1.SandboxRecord) error {
		if r.GetFence().GetAttempt() == 1 {
			return err
		}
		return nil
	}
}

func request(change func(*sandboxv1.CreateSandboxRequest)) *sandboxv1.CreateSandboxRequest {
	req := &sandboxv1.CreateSandboxRequest{Namespace: ns, Name: "one", Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: pool}}
	if change != nil {
		change(req)
	}
	return req
}

func strong(req *sandboxv1.CreateSandboxRequest) {
	req.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
}

func withID(req *sandboxv1.CreateSandboxRequest) { req.RequestId = "r1" }

func strongWithID(req *sandboxv1.CreateSandboxRequest) { strong(req); withID(req) }

// create carries out a create that ends without any step of the clock.
func (e *env) create(ctx context.Context, req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	plan, err := admission.Create(req, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
	require.NoError(e.t, err)
	return e.creator.Create(ctx, plan)
}

type result struct {
	response *sandboxv1.CreateSandboxResponse
	err      error
}

// begin carries out a create in the background.
func (e *env) begin(ctx context.Context, req *sandboxv1.CreateSandboxRequest) chan result {
	plan, err := admission.Create(req, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
	require.NoError(e.t, err)
	done := make(chan result, 1)
	creator := e.creator
	go func() {
		response, err := creator.Create(ctx, plan)
		done <- result{response, err}
	}()
	return done
}

// end moves the clock until a create has ended.
func (e *env) end(done chan result) result {
	e.t.Helper()
	e.until("the create ends", func() bool { return len(done) > 0 })
	return <-done
}

// heartbeat has agents send a status.
func (e *env) heartbeat(uids ...string) {
	for _, uid := range uids {
		e.fleet.Heartbeat(uid)
	}
}

// sync shows the custom resources as the informer does, and lets those end that are being deleted, as the controller does.
func (e *env) sync() {
	list := &v1alpha1.SandboxList{}
	require.NoError(e.t, e.api.List(context.Background(), list))
	there := map[string]*v1alpha1.Sandbox{}
	for i := range list.Items {
		sb := &list.Items[i]
		there[sb.Name] = sb
		e.recovery.ResourceSeen(sb)
		if sb.DeletionTimestamp != nil {
			ended := sb.DeepCopy()
			ended.Finalizers = nil
			_ = e.api.Direct.Update(context.Background(), ended) // another version is ended the next time
		}
	}
	for name, sb := range e.seen {
		if now := there[name]; now == nil || now.UID != sb.UID {
			e.recovery.ResourceGone(sb)
		}
	}
	e.seen = there
}

// adopted waits until this leader has taken over a sandbox that a former one made.
func (e *env) adopted(uid string) {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = e.recovery.Run(ctx) })
	e.until("it is adopted", func() bool {
		item, _ := e.store.Get(one) // the former leader may have written it
		return e.persist.Owns(uid) || item.Resource != nil
	})
	cancel()
	running.Wait()
}

// step is how far until moves the clock at a time.
const step = 20 * time.Millisecond

// await waits until a condition holds, which needs no step of the clock.
func (e *env) await(what string, f func() bool) {
	e.t.Helper()
	require.Eventually(e.t, f, testkit.Timeout, testkit.Tick, what)
}

// until moves the clock, with agents that report and an informer that follows, until a condition holds.
func (e *env) until(what string, f func() bool) {
	e.t.Helper()
	e.await(what, func() bool {
		if f() {
			return true
		}
		e.heartbeat(slices.Collect(maps.Keys(e.agents))...)
		e.sync()
		e.clock.Step(step)
		return false
	})
}

// left returns what there is of any sandbox, but for custom resources.
func (e *env) left() string {
	var all []string
	add := func(what string, is bool) {
		if is {
			all = append(all, what)
		}
	}
	for uid, a := range e.agents {
		add("a container on "+uid, len(a.Sandboxes()) > 0)
	}
	for _, v := range e.registry.Agents(e.clock.Now()) {
		add("a reservation on "+v.UID, v.Allocated > 0)
	}
	add("a use of a quota", e.registry.Used(e.clock.Now(), ns) != registry.Amounts{})
	add("a visible sandbox", e.store.Len() > 0)
	add("room of a write", e.persist.Pending() > 0)
	add("a create in flight", e.inFlight.Any())
	add("an unsettled attempt", e.creator.Unsettled(one))
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	unlock, err := e.names.Lock(ctx, one)
	add("the lock of the name", err != nil)
	if err == nil {
		unlock()
	}
	return strings.Join(all, ", ")
}

// requireNothingNow requires that nothing of any sandbox is left, without any background work.
func (e *env) requireNothingNow() {
	e.t.Helper()
	require.Empty(e.t, e.left())
	require.Empty(e.t, e.resources())
}

// requireNothing requires that in the end nothing of any sandbox is left.
func (e *env) requireNothing() {
	e.t.Helper()
	last := ""
	defer func() {
		if e.t.Failed() {
			e.t.Log("left: " + last)
		}
	}()
	e.until("nothing is left", func() bool { last = e.left(); return last == "" && len(e.resources()) == 0 })
}

// creates returns how many creates all agents have received, and deletes the same of deletions.
func (e *env) creates() int {
	n := 0
	for _, a := range e.agents {
		n += a.Creates()
	}
	return n
}

func (e *env) deletes() int {
	n := 0
	for _, a := range e.agents {
		n += len(a.Deletes())
	}
	return n
}

// allocated returns how many capacity units are reserved.
func (e *env) allocated() int {
	n := 0
	for _, v := range e.registry.Agents(e.clock.Now()) {
		n += v.Allocated
	}
	return n
}

// replaceClients replaces the connections to all agents.
func (e *env) replaceClients(by func(agentv1.AgentServiceClient) agentv1.AgentServiceClient) {
	for uid := range e.agents {
		client, _ := e.clients.Client(uid)
		e.clients.set(uid, by(client))
	}
}

func (e *env) resources() []v1alpha1.Sandbox {
	list := &v1alpha1.SandboxList{}
	require.NoError(e.t, e.api.List(context.Background(), list))
	return list.Items
}

// resource returns the custom resource of the name, or nil.
func (e *env) resource(name string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{}
	if err := e.api.Direct.Get(context.Background(), client.ObjectKey{Namespace: ns, Name: name}, sb); err != nil {
		return nil
	}
	return sb
}

// fails returns a hook that fails every call while it is on.
func fails(err error, verbs ...fakeapi.Verb) fakeapi.Hook {
	return func(verb fakeapi.Verb, _ client.Object) error {
		if len(verbs) == 0 || slices.Contains(verbs, verb) {
			return err
		}
		return nil
	}
}

// once returns a hook that is called for the first call of a verb.
func once(verb fakeapi.Verb, do func(client.Object) error) fakeapi.Hook {
	var mu sync.Mutex
	done := false
	return func(v fakeapi.Verb, obj client.Object) error {
		mu.Lock()
		first := v == verb && !done
		done = done || first
		mu.Unlock()
		if !first {
			return nil
		}
		return do(obj)
	}
}

// ending is a context that the test ends, as the caller's cancellation or its deadline does.
type ending struct {
	context.Context //nolint:containedctx // it is one
	done            chan struct{}
	end             func()
	err             error
}

func endingWith(err error) *ending {
	done := make(chan struct{})
	return &ending{Context: context.Background(), done: done, end: sync.OnceFunc(func() { close(done) }), err: err}
}

func (c *ending) Done() <-chan struct{} { return c.done }

func (c *ending) Err() error {
	select {
	case <-c.done:
		return c.err
	default:
		return nil
	}
}

// stages returns the names of the timings of an answer.
func stages(r *sandboxv1.CreateSandboxResponse) []string {
	var names []string
	for _, s := range r.GetTimings() {
		names = append(names, s.GetStage())
	}
	return names
}

// sandboxOf returns the sandbox that an error names.
func sandboxOf(err error) string {
	var f *fault.Error
	if !errors.As(err, &f) {
		return ""
	}
	return f.Metadata()["sandbox"]
}
