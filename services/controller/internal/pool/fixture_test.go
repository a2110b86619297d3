package pool

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/fields"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	start  = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	poolID = types.NamespacedName{Namespace: "ns", Name: "py"}
	inj    = Injection{AgentPort: 5758, ContainerdSocket: "/run/containerd/containerd.sock", ContainerdRoot: "/var/lib/containerd",
		LogRoot: "/var/log/fast-sandbox", SlotRoot: "/var/lib/fast-sandbox/slots", Insecure: true}
	errRefused = fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "failed by the test")
)

const (
	requeue     = 5 * time.Second
	shrinkDelay = time.Minute
)

// testPool returns a pool that has its finalizer and needs no agents.
func testPool(changes ...func(*v1alpha1.SandboxPool)) *v1alpha1.SandboxPool {
	p := &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: poolID.Namespace, Name: poolID.Name, UID: "pool-uid", Generation: 3, Finalizers: []string{v1alpha1.Finalizer}},
		Spec: v1alpha1.SandboxPoolSpec{MaxSandboxesPerPod: 5, Slots: &v1alpha1.PoolSlots{}, Capacity: v1alpha1.PoolCapacity{PoolMax: 4, BufferMax: 100},
			AgentTemplate: v1alpha1.AgentTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: agentContainer, Image: "agent:1"}}}}},
	}
	for _, c := range changes {
		c(p)
	}
	return p
}

func poolMin(n int32) func(*v1alpha1.SandboxPool) {
	return func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = n }
}

func withImages(images ...string) func(*v1alpha1.SandboxPool) {
	return func(p *v1alpha1.SandboxPool) { p.Spec.Images = images }
}

func beingDeleted(p *v1alpha1.SandboxPool) { at := metav1.NewTime(start); p.DeletionTimestamp = &at }

// agentPod returns a ready agent Pod of the pool, with the name as its uid.
func agentPod(name string, changes ...func(*corev1.Pod)) *corev1.Pod {
	p, err := inj.Pod(testPool(), name)
	if err != nil {
		panic(err)
	}
	p.GenerateName, p.UID, p.Annotations = "", types.UID(name), map[string]string{}
	p.CreationTimestamp = metav1.NewTime(start)
	p.Spec.NodeName = "node-" + name
	at := metav1.NewTime(start)
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", StartTime: &at,
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(start.Add(time.Minute))}}}
	for _, c := range changes {
		c(p)
	}
	return p
}

func drainedFor(reason string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationDraining] = reason }
}

// notReady makes a Pod one whose agent has not been ready since the Pod started.
func notReady(p *corev1.Pod) {
	p.Status.Conditions[0].Status, p.Status.Conditions[0].LastTransitionTime = corev1.ConditionFalse, *p.Status.StartTime
}

// notStarted makes a Pod one whose containers have not started.
func notStarted(p *corev1.Pod) { notReady(p); p.Status.Phase = corev1.PodPending }

func outdatedPod(p *corev1.Pod) { p.Labels[v1alpha1.LabelTemplateHash] = "other" }

func inPhase(phase corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = phase }
}

// fixture is a reconciler on a fake API server, index and agents.
type fixture struct {
	t        *testing.T
	clock    *clocktesting.FakeClock
	api      *fakeAPI
	client   client.Client
	index    *fakeIndex
	agents   *fakeAgents
	recorder *recorder
	*Reconciler
}

func newFixture(t *testing.T, objects ...client.Object) *fixture {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	f := &fixture{t: t, clock: clocktesting.NewFakeClock(start), api: &fakeAPI{fail: map[string]error{}}, agents: newFakeAgents(), recorder: &recorder{},
		index: &fakeIndex{synced: true, agents: map[string]agents.Agent{}}}
	f.client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&v1alpha1.SandboxPool{}).WithIndex(&v1alpha1.Sandbox{}, fields.Pool, fields.PoolOf).
		WithInterceptorFuncs(f.api.funcs()).Build()
	r, err := New(Config{Client: f.client, Live: f.client, Index: f.index, Agents: f.agents, Recorder: f.recorder, Clock: f.clock, Injection: inj,
		Issuer: &fakeIssuer{clock: f.clock}, Requeue: requeue, ShrinkDelay: shrinkDelay, Metrics: prometheus.NewRegistry()})
	require.NoError(t, err)
	f.Reconciler = r
	return f
}

// serve adds an agent that is ready in the Registry for each Pod.
func (f *fixture) serve(pods ...string) {
	for _, uid := range pods {
		f.index.agents[uid] = registered(uid)
	}
}

func registered(uid string, changes ...func(*allocatorv1.Agent)) agents.Agent {
	a := &allocatorv1.Agent{Info: &agentv1.AgentInfo{PodUid: uid}, Address: uid + ":5758", Ready: true, LastHeartbeatTime: timestamppb.New(start)}
	for _, c := range changes {
		c(a)
	}
	return agents.Agent{Agent: a}
}

// reconcile reconciles the pool without an error.
func (f *fixture) reconcile() reconcile.Result {
	f.t.Helper()
	result, err := f.Reconcile(f.t.Context(), reconcile.Request{NamespacedName: poolID})
	require.NoError(f.t, err)
	return result
}

func (f *fixture) pool() *v1alpha1.SandboxPool {
	f.t.Helper()
	var p v1alpha1.SandboxPool
	require.NoError(f.t, f.client.Get(f.t.Context(), poolID, &p))
	return &p
}

// podNames returns the sorted names of all Pods.
func (f *fixture) podNames() []string {
	f.t.Helper()
	var list corev1.PodList
	require.NoError(f.t, f.client.List(f.t.Context(), &list))
	out := make([]string, len(list.Items))
	for i := range list.Items {
		out[i] = list.Items[i].Name
	}
	slices.Sort(out)
	return out
}

func (f *fixture) drainReason(pod string) string {
	f.t.Helper()
	var p corev1.Pod
	require.NoError(f.t, f.client.Get(f.t.Context(), types.NamespacedName{Namespace: poolID.Namespace, Name: pod}, &p))
	return p.Annotations[v1alpha1.AnnotationDraining]
}

// fakeAPI gives created Pods a uid, records deletions, and fails calls: the keys of fail are "verb Kind".
type fakeAPI struct {
	mu      sync.Mutex
	fail    map[string]error
	calls   []string // the writes
	deletes map[string]*metav1.Preconditions
	created int
	// hidden: lists have no Pods that were created, as in a cache that lags behind.
	hidden bool
}

// failing records a call and returns its error.
func (a *fakeAPI) failing(verb string, o runtime.Object) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	call := fmt.Sprintf("%s %s", verb, kindOf(o))
	if verb != "get" && verb != "list" {
		a.calls = append(a.calls, call)
	}
	return a.fail[call]
}

func kindOf(o runtime.Object) string {
	switch o.(type) {
	case *corev1.Pod, *corev1.PodList:
		return "Pod"
	case *corev1.Secret:
		return "Secret"
	case *v1alpha1.Sandbox, *v1alpha1.SandboxList:
		return "Sandbox"
	case *v1alpha1.SandboxPool, *v1alpha1.SandboxPoolList:
		return "SandboxPool"
	}
	return fmt.Sprintf("%T", o)
}

func (a *fakeAPI) funcs() interceptor.Funcs {
	return interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if err := a.failing("get", o); err != nil {
				return err
			}
			return c.Get(ctx, key, o, opts...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if err := a.failing("list", list); err != nil {
				return err
			}
			err := c.List(ctx, list, opts...)
			if pods, ok := list.(*corev1.PodList); ok && a.hidden {
				pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.GenerateName != "" })
			}
			return err
		},
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if err := a.failing("create", o); err != nil {
				return err
			}
			a.mu.Lock()
			a.created++
			o.SetUID(types.UID(fmt.Sprint("created-", a.created)))
			a.mu.Unlock()
			return c.Create(ctx, o, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if err := a.failing("patch", o); err != nil {
				return err
			}
			return c.Patch(ctx, o, p, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
			if err := a.failing("patch "+sub, o); err != nil {
				return err
			}
			return c.SubResource(sub).Patch(ctx, o, p, opts...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			if err := a.failing("delete", o); err != nil {
				return err
			}
			var options client.DeleteOptions
			options.ApplyOptions(opts)
			a.mu.Lock()
			if a.deletes == nil {
				a.deletes = map[string]*metav1.Preconditions{}
			}
			a.deletes[o.GetName()] = options.Preconditions
			a.mu.Unlock()
			return c.Delete(ctx, o, opts...)
		},
	}
}

// writes returns how often a call was made.
func (a *fakeAPI) writes(call string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, c := range a.calls {
		if c == call {
			n++
		}
	}
	return n
}

// fakeIndex implements Index.
type fakeIndex struct {
	synced bool
	agents map[string]agents.Agent // by the uid of the Pod
}

func (x *fakeIndex) Subscribe(agents.Subscriber)           {}
func (x *fakeIndex) Synced() bool                          { return x.synced }
func (x *fakeIndex) Agent(uid string) (agents.Agent, bool) { a, ok := x.agents[uid]; return a, ok }
func (x *fakeIndex) Pool(types.NamespacedName) []agents.Agent {
	var out []agents.Agent
	for _, a := range x.agents {
		out = append(out, a)
	}
	return out
}

// fakeAgents implements Agents: each call is recorded and answered as scripted, by the uid of the agent.
type fakeAgents struct {
	mu        sync.Mutex
	addresses []string
	drains    []*agentv1.DrainRequest
	pins      []*agentv1.SetPinnedImagesRequest
	// dialErr is the result of Client, errs those of calls to agents.
	dialErr error
	errs    map[string]error
	// sandboxes is the number of sandboxes that an agent answers to Drain.
	sandboxes map[string]int32
	// snapshots are the agents' own; without one, the agent is drained and empty.
	snapshots   map[string]*agentv1.AgentSnapshot
	snapshotErr error
}

func newFakeAgents() *fakeAgents {
	return &fakeAgents{errs: map[string]error{}, sandboxes: map[string]int32{}, snapshots: map[string]*agentv1.AgentSnapshot{}}
}

func (a *fakeAgents) Client(address, _ string) (agentv1.AgentServiceClient, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addresses = append(a.addresses, address)
	return agentClient{agents: a}, a.dialErr
}

func (a *fakeAgents) FreshSnapshot(_ context.Context, _, uid string) (*agentv1.AgentSnapshot, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.snapshots[uid]; s != nil {
		return s, a.snapshotErr
	}
	return &agentv1.AgentSnapshot{}, a.snapshotErr
}

// asked returns the uids of the agents that were asked to drain, or to resume, in their order.
func (a *fakeAgents) asked(resume bool) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []string
	for _, d := range a.drains {
		if d.GetResume() == resume {
			out = append(out, d.GetAgentUid())
		}
	}
	slices.Sort(out)
	return out
}

// agentClient implements the calls that the reconciler makes.
type agentClient struct {
	agentv1.AgentServiceClient
	agents *fakeAgents
}

func (c agentClient) Drain(_ context.Context, req *agentv1.DrainRequest, _ ...grpc.CallOption) (*agentv1.DrainResponse, error) {
	c.agents.mu.Lock()
	defer c.agents.mu.Unlock()
	c.agents.drains = append(c.agents.drains, req)
	return &agentv1.DrainResponse{Sandboxes: c.agents.sandboxes[req.GetAgentUid()]}, rpc.ToStatus(c.agents.errs[req.GetAgentUid()])
}

func (c agentClient) SetPinnedImages(_ context.Context, req *agentv1.SetPinnedImagesRequest, _ ...grpc.CallOption) (*agentv1.SetPinnedImagesResponse, error) {
	c.agents.mu.Lock()
	defer c.agents.mu.Unlock()
	c.agents.pins = append(c.agents.pins, req)
	return &agentv1.SetPinnedImagesResponse{}, rpc.ToStatus(c.agents.errs[req.GetAgentUid()])
}

// recorder records Events as "Type Reason note".
type recorder struct {
	mu     sync.Mutex
	events []string
}

// Eventf implements events.EventRecorder.
func (r *recorder) Eventf(_, _ runtime.Object, kind, reason, _, note string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, kind+" "+reason+" "+fmt.Sprintf(note, args...))
}

// take returns the Events so far and forgets them.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.events
	r.events = nil
	return out
}
