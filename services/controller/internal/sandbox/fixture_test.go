package sandbox

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	start  = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	name   = types.NamespacedName{Namespace: "ns", Name: "s"}
	timing = Timing{Requeue: 5 * time.Second, DeletionPoll: 2 * time.Second, ExpirationThreshold: 30 * time.Second}
	// assigned is the assignment of sandboxes of the tests.
	assigned = v1alpha1.Assignment{AgentPod: "agent-1", AgentUID: "agent-uid", NodeName: "node-1", AgentAddress: "10.0.0.1:5758", SandboxUID: "uid", Attempt: 1}
	fence    = identity.Fence{SandboxUID: "uid", Attempt: 1, AgentUID: "agent-uid"}
)

type change = func(*v1alpha1.Sandbox)

// newSandbox returns a Sandbox with a finalizer that is not assigned.
func newSandbox(changes ...change) *v1alpha1.Sandbox {
	s := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: "uid", Generation: 1, Finalizers: []string{v1alpha1.Finalizer},
			CreationTimestamp: metav1.NewTime(start)},
		Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "pool"},
	}
	for _, c := range changes {
		c(s)
	}
	return s
}

func inPhase(p v1alpha1.Phase) change { return func(s *v1alpha1.Sandbox) { s.Status.Phase = p } }

// onAgent assigns a Sandbox, and gives it the status of its attempt.
func onAgent(s *v1alpha1.Sandbox) {
	a := assigned
	s.SetAssignment(&a)
	s.Status.Attempt = 1
}

func deleted(s *v1alpha1.Sandbox) { at := metav1.NewTime(start); s.DeletionTimestamp = &at }

// onFastPath makes a Sandbox one that was created on the fast path.
func onFastPath(s *v1alpha1.Sandbox) {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[v1alpha1.AnnotationSandboxUID] = "uid"
}

// targetOf returns the target of a Sandbox.
func targetOf(t *testing.T, s *v1alpha1.Sandbox) *target {
	t.Helper()
	out := newTarget(s, start)
	var err error
	out.assignment, err = s.Assignment()
	require.NoError(t, err)
	return out
}

// fixture has the dependencies of the steps.
type fixture struct {
	t         *testing.T
	clock     *clocktesting.FakeClock
	client    client.Client
	allocator *fakeAllocator
	agents    *fakeAgents
	registry  *fakeRegistry
	recorder  *recorder
	metrics   metrics
	memory    *memory
	// background runs calls until the test ends; notified receives the sandboxes whose calls have ended.
	background *background
	notified   chan types.NamespacedName
}

func newFixture(t *testing.T, objects ...client.Object) *fixture {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	clock := clocktesting.NewFakeClock(start)
	m, err := newMetrics(prometheus.NewRegistry())
	require.NoError(t, err)
	f := &fixture{
		t: t, clock: clock, allocator: &fakeAllocator{}, registry: newFakeRegistry(), recorder: &recorder{}, metrics: m, memory: newMemory(clock),
		agents:     &fakeAgents{service: &fakeAgent{}},
		client:     fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithStatusSubresource(&v1alpha1.Sandbox{}).Build(),
		background: newBackground(), notified: make(chan types.NamespacedName, 100),
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.background.Start(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return f
}

func (f *fixture) calls() *calls {
	return newCalls(f.clock, f.background, func(n types.NamespacedName) { f.notified <- n })
}

func (f *fixture) access() *agentAccess {
	return &agentAccess{client: f.client, live: f.client, index: f.registry, calls: f.agents}
}

func (f *fixture) pools() *pools { return &pools{client: f.client, agents: f.access()} }

func (f *fixture) writer() *writer { return &writer{client: f.client, memory: f.memory} }

// get reads the Sandbox of the tests.
func (f *fixture) get() *v1alpha1.Sandbox {
	f.t.Helper()
	var s v1alpha1.Sandbox
	require.NoError(f.t, f.client.Get(f.t.Context(), name, &s))
	return &s
}

// target returns the target of the Sandbox in the fake API server.
func (f *fixture) target() *target { return targetOf(f.t, f.get()) }

// recorder records Events as "Warning Reason note".
type recorder struct {
	mu     sync.Mutex
	events []string
}

// Eventf implements events.EventRecorder.
func (r *recorder) Eventf(_, _ runtime.Object, kind, reason, _, _ string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	note, _ := args[0].(string)
	r.events = append(r.events, kind+" "+reason+" "+note)
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.events...)
}

// fakeRegistry implements registry and poolAgents.
type fakeRegistry struct {
	synced   bool
	statuses map[string]agents.Status
	agents   map[string]agents.Agent
	reports  map[identity.Fence]*agentv1.SandboxReport
}

func newFakeRegistry() *fakeRegistry {
	return &fakeRegistry{synced: true, statuses: map[string]agents.Status{"agent-uid": agents.Ready}, agents: map[string]agents.Agent{},
		reports: map[identity.Fence]*agentv1.SandboxReport{}}
}

func (r *fakeRegistry) Synced() bool { return r.synced }

func (r *fakeRegistry) Status(uid string) agents.Status {
	if s, ok := r.statuses[uid]; ok {
		return s
	}
	return agents.Absent
}

func (r *fakeRegistry) Agent(uid string) (agents.Agent, bool) { a, ok := r.agents[uid]; return a, ok }

func (r *fakeRegistry) Report(f identity.Fence) *agentv1.SandboxReport { return r.reports[f] }

func (r *fakeRegistry) Reports(uid string) []*agentv1.SandboxReport {
	var out []*agentv1.SandboxReport
	for f, report := range r.reports {
		if f.SandboxUID == uid {
			out = append(out, report)
		}
	}
	return out
}

func (r *fakeRegistry) Pool(types.NamespacedName) []agents.Agent {
	var out []agents.Agent
	for _, a := range r.agents {
		out = append(out, a)
	}
	return out
}

// fakeAllocator implements the calls of allocatorv1.AllocatorServiceClient that the controller makes.
type fakeAllocator struct {
	allocatorv1.AllocatorServiceClient

	mu        sync.Mutex
	allocates []*allocatorv1.AllocateRequest
	releases  []identity.Fence
	response  *allocatorv1.AllocateResponse
	err       error
}

func (a *fakeAllocator) Allocate(_ context.Context, req *allocatorv1.AllocateRequest, _ ...grpc.CallOption) (*allocatorv1.AllocateResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.allocates = append(a.allocates, req)
	return a.response, rpc.ToStatus(a.err)
}

func (a *fakeAllocator) Release(_ context.Context, req *allocatorv1.ReleaseRequest, _ ...grpc.CallOption) (*allocatorv1.ReleaseResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.releases = append(a.releases, identity.FenceOf(req.GetFence()))
	return &allocatorv1.ReleaseResponse{}, rpc.ToStatus(a.err)
}

func (a *fakeAllocator) released() []identity.Fence {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]identity.Fence(nil), a.releases...)
}

// fakeAgents implements Agents with one agent.
type fakeAgents struct {
	service *fakeAgent
	// dialErr is the result of Client; snapshots and snapshotErr are the results of Snapshot, fresh of FreshSnapshot.
	dialErr, snapshotErr error
	snapshot, fresh      *agentv1.AgentSnapshot
	addresses            []string
}

func (a *fakeAgents) Client(address, _ string) (agentv1.AgentServiceClient, error) {
	a.addresses = append(a.addresses, address)
	return a.service, a.dialErr
}

func (a *fakeAgents) Snapshot(context.Context, string, string) (*agentv1.AgentSnapshot, error) {
	return a.snapshot, a.snapshotErr
}

func (a *fakeAgents) FreshSnapshot(context.Context, string, string) (*agentv1.AgentSnapshot, error) {
	return a.fresh, a.snapshotErr
}

// fakeAgent implements the calls of agentv1.AgentServiceClient that the controller makes. Each call receives the messages, and
// then the error; io.EOF if it is nil.
type fakeAgent struct {
	agentv1.AgentServiceClient

	mu        sync.Mutex
	creates   []*agentv1.CreateSandboxRequest
	deletes   []*agentv1.DeleteSandboxRequest
	created   []*agentv1.CreateSandboxResponse
	deleted   []*agentv1.DeleteSandboxResponse
	callErr   error         // of the call
	streamErr error         // of the stream
	gate      chan struct{} // blocks streams until it is closed
}

func (a *fakeAgent) CreateSandbox(ctx context.Context, req *agentv1.CreateSandboxRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.CreateSandboxResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.creates = append(a.creates, req)
	return &stream[agentv1.CreateSandboxResponse]{ctx: ctx, messages: a.created, err: a.streamErr, gate: a.gate}, rpc.ToStatus(a.callErr)
}

func (a *fakeAgent) DeleteSandbox(ctx context.Context, req *agentv1.DeleteSandboxRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.DeleteSandboxResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.deletes = append(a.deletes, req)
	return &stream[agentv1.DeleteSandboxResponse]{ctx: ctx, messages: a.deleted, err: a.streamErr, gate: a.gate}, rpc.ToStatus(a.callErr)
}

func (a *fakeAgent) deleteRequests() []*agentv1.DeleteSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*agentv1.DeleteSandboxRequest(nil), a.deletes...)
}

// stream implements grpc.ServerStreamingClient.
type stream[T any] struct {
	grpc.ClientStream

	ctx      context.Context //nolint:containedctx // of the call
	messages []*T
	err      error
	gate     chan struct{}
}

func (s *stream[T]) Recv() (*T, error) {
	if len(s.messages) > 0 {
		m := s.messages[0]
		s.messages = s.messages[1:]
		return m, nil
	}
	if s.gate != nil {
		select {
		case <-s.gate:
		case <-s.ctx.Done():
			return nil, rpc.ToStatus(s.ctx.Err())
		}
	}
	if s.err != nil {
		return nil, rpc.ToStatus(s.err)
	}
	return nil, io.EOF
}

// agentPod returns the Pod of the agent.
func agentPod() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: "agent-1", UID: "agent-uid"}, Status: corev1.PodStatus{PodIP: "10.0.0.1"}}
}

// newPool returns the pool of the sandboxes.
func newPool(changes ...func(*v1alpha1.SandboxPool)) *v1alpha1.SandboxPool {
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: "pool"}}
	p.Spec.Capacity.PoolMax = 3
	for _, c := range changes {
		c(p)
	}
	return p
}

func failure(class error, reason fault.Reason) *fault.Error {
	return fault.New(class, reason, "failed by the test")
}

var errUnreachable = failure(errdefs.ErrUnavailable, fault.AgentUnavailable)
