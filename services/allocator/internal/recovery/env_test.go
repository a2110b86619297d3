package recovery_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/recovery"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

const (
	ns            = "ns"
	orphanTimeout = 10 * time.Second
)

var (
	one       = store.Key{Namespace: ns, Name: "one"}                                       //nolint:gochecknoglobals // a constant
	fence     = identity.Fence{SandboxUID: "u", Attempt: 2, AgentUID: "a"}                  //nolint:gochecknoglobals // a constant
	wireFence = &agentv1.Fence{SandboxUid: "u", Attempt: 2, AgentUid: "a"}                  //nolint:gochecknoglobals // a constant
	info      = &agentv1.AgentInfo{PodUid: "a", PodName: "pod-a", Namespace: ns, Pool: "p"} //nolint:gochecknoglobals // a constant
)

// connection is that to the one agent.
type connection struct{ client agentv1.AgentServiceClient }

func (c connection) Client(string) (agentv1.AgentServiceClient, bool) { return c.client, true }
func (c connection) Gone(string) bool                                 { return false }

// env is a Recoverer of a process that leads, with one agent, a, that knows that, an API server in memory, and a clock that the
// test moves.
type env struct {
	t         *testing.T
	api       *fakeapi.Server
	clock     *clocktesting.FakeClock
	store     *store.Store
	fleet     *fleet.Fleet
	agent     *fakeagent.Agent
	names     *keylock.Map[store.Key]
	creates   *idempotency.Calls[*sandboxv1.CreateSandboxResponse]
	persist   *persistence.Tracker
	deletions *deletion.Manager
	recovery  *recovery.Recoverer

	unsynced, follows, unannounced, creating atomic.Bool
	checks, adopted, marks                   atomic.Int64
}

func newEnv(t *testing.T) *env {
	t.Helper()
	c := clocktesting.NewFakeClock(time.Unix(1_700_000_000, 0))
	e := &env{
		t: t, api: fakeapi.New(t), clock: c, store: store.New(c), names: keylock.New[store.Key](),
		creates: idempotency.New[*sandboxv1.CreateSandboxResponse](c), agent: fakeagent.New(info),
	}
	e.agent.OnMark = func(context.Context, *agentv1.Fence) error { e.marks.Add(1); return nil }
	e.fleet = fleet.New(registry.New(0, 0), c, e.store, nil)
	e.fleet.Joined(info, "a:5758")
	agents := connection{fakeagent.Connect(t, e.agent)}
	api, set := apiserver.New(e.api, c), tasks.New()
	leads := func() bool { return !e.follows.Load() }
	announced := func(string) bool { return !e.unannounced.Load() }
	e.persist = persistence.New(persistence.Config{
		API: api, Agents: agents, Store: e.store, Tasks: set, Clock: c, Limit: 5, Leads: leads, Confirm: func(context.Context) (bool, error) { return leads(), nil },
		Creating: func() bool { return false }, Rejected: func(f *agentv1.Fence) { e.deletions.Container(f) },
	})
	e.deletions = deletion.New(deletion.Config{
		Agents: agents, Fleet: e.fleet, Store: e.store, API: api, Persist: e.persist, Tasks: set, Clock: c, Leads: leads, Announced: announced,
	})
	e.recovery = recovery.New(recovery.Config{
		Store: e.store, Fleet: e.fleet, API: api, Deletions: e.deletions, Persist: e.persist, Creates: e.creates, Names: e.names,
		Tasks: set, Clock: c, Leads: leads, Announced: announced, OrphanTimeout: orphanTimeout,
		Synced:   func() bool { e.checks.Add(1); return !e.unsynced.Load() },
		Creating: func(string) bool { return e.creating.Load() }, Adopted: func() { e.adopted.Add(1) },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return e
}

// report returns the report of a container that is not marked as persisted, and change changes it.
func report(change func(*agentv1.SandboxReport)) *agentv1.SandboxReport {
	r := &agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: "u-2", Record: &agentv1.SandboxRecord{
		Fence: wireFence, Namespace: ns, Name: "one", RequestId: "r1", Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: "p"},
	}}
	if change != nil {
		change(r)
	}
	return r
}

// put adds a container that a former leader left, and has it reported.
func (e *env) put(reports ...*agentv1.SandboxReport) {
	for _, r := range reports {
		e.agent.Put(r)
	}
	e.reportAll()
}

// reportAll has the fleet receive what the agent has.
func (e *env) reportAll() {
	e.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info, Accepting: true, Sandboxes: e.agent.Sandboxes()})
}

// resource returns the custom resource of the container's sandbox, assigned to it, and change changes it.
func resource(change func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "one", Finalizers: []string{v1alpha1.Finalizer}, Annotations: map[string]string{
			v1alpha1.AnnotationSandboxUID: "u", v1alpha1.AnnotationRequestID: "r1", v1alpha1.AnnotationCreateTime: "t1",
		}},
		Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "p", ConsistencyMode: v1alpha1.ConsistencyModeFast},
	}
	assign(sb, fence)
	if change != nil {
		change(sb)
	}
	return sb
}

func assign(sb *v1alpha1.Sandbox, f identity.Fence) {
	sb.SetAssignment(&v1alpha1.Assignment{AgentPod: "pod-" + f.AgentUID, AgentUID: f.AgentUID, SandboxUID: f.SandboxUID, Attempt: f.Attempt})
}

// strong makes the custom resource that of a strong create without an assignment.
func strong(sb *v1alpha1.Sandbox) {
	sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeStrong
	delete(sb.Annotations, v1alpha1.AnnotationAssignment)
	delete(sb.Annotations, v1alpha1.AnnotationSandboxUID)
}

// write has another process write a custom resource, with its status.
func (e *env) write(sb *v1alpha1.Sandbox) *v1alpha1.Sandbox {
	e.t.Helper()
	status := sb.Status
	require.NoError(e.t, e.api.Direct.Create(context.Background(), sb))
	sb.Status = status
	require.NoError(e.t, e.api.Direct.Status().Update(context.Background(), sb))
	return e.there()
}

// there returns the custom resource that is there, or nil.
func (e *env) there() *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{}
	if err := e.api.Direct.Get(context.Background(), client.ObjectKey{Namespace: ns, Name: "one"}, sb); err != nil {
		return nil
	}
	return sb
}

// sweep sweeps at the end of the next second, in which the agent has sent a heartbeat.
func (e *env) sweep() {
	e.clock.Step(time.Second)
	e.fleet.Heartbeat("a")
	e.recovery.Sweep(e.t.Context())
}

func (e *env) await(what string, f func() bool) {
	e.t.Helper()
	require.Eventually(e.t, f, testkit.Timeout, testkit.Tick, what)
}

// until moves the clock until a condition holds.
func (e *env) until(what string, f func() bool) {
	e.t.Helper()
	e.await(what, func() bool {
		if f() {
			return true
		}
		e.clock.Step(20 * time.Millisecond)
		return false
	})
}

// hang is an agent's part of a call, and lasts as long as that.
func hang(ctx context.Context, _ *agentv1.Fence) error {
	<-ctx.Done()
	return ctx.Err()
}
