package fastpath_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
)

func TestFastCreate(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.api.down.Store(true)
	req := request("one")
	req.Spec.Ports = []int32{8080}
	req.Labels = map[string]string{"app": "demo"}
	req.RequestId = "r1"
	resp, err := m.create(req)
	require.NoError(t, err)
	require.Equal(t, []string{"10.0.0.1:8080"}, resp.GetEndpoints())
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST, resp.GetConsistencyMode())
	var names []string
	for _, s := range resp.GetTimings() {
		names = append(names, s.GetStage())
	}
	require.Equal(t, []string{"reserve", "agent", "admitted", "task", "started"}, names)
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, resp.GetStartPath())

	sb, err := m.get("one")
	require.NoError(t, err, "it is seen before its custom resource exists")
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, sb.GetStatus().GetPhase())
	require.False(t, sb.GetStatus().GetPersisted())
	require.Equal(t, "pod-a", sb.GetStatus().GetAssignedPod())

	m.api.down.Store(false)
	m.eventually("the custom resource lands", func() bool { return m.resource("one") != nil })
	cr := m.resource("one")
	require.Equal(t, resp.GetSandbox().GetUid(), cr.EffectiveUID())
	require.Contains(t, cr.Finalizers, v1alpha1.Finalizer)
	require.Equal(t, map[string]string{"app": "demo", v1alpha1.LabelPool: pool, v1alpha1.LabelNode: "node"}, cr.Labels)
	require.Equal(t, "r1", cr.Annotations[v1alpha1.AnnotationRequestID])
	require.NotEmpty(t, cr.Annotations[v1alpha1.AnnotationCreateTime])
	require.Empty(t, cr.Status.Phase, "the status is the controller's")
	assignment, err := cr.Assignment()
	require.NoError(t, err)
	require.NotNil(t, assignment.Started, "it is Running for every reader from its first write")
	require.Equal(t, cr.EffectiveUID()+"-1", assignment.Started.SandboxID)
	require.WithinDuration(t, resp.GetSandbox().GetStatus().GetStartTime().AsTime(), assignment.Started.StartTime.Time, time.Microsecond)
	require.Equal(t, v1alpha1.StartPathCold, assignment.Started.StartPath)
	require.Equal(t, []string{"10.0.0.1:8080"}, assignment.Started.Endpoints)
	assignment.Started = nil
	require.Equal(t, &v1alpha1.Assignment{AgentPod: "pod-a", AgentUID: "a", NodeName: "node", AgentAddress: "a", SandboxUID: cr.EffectiveUID(), Attempt: 1}, assignment)
	m.eventually("the agent has marked it", func() bool { return len(a.Sandboxes()) == 1 && a.Sandboxes()[0].GetPersisted() })
	m.eventually("it is seen as persisted, and still running", func() bool {
		sb, err := m.get("one")
		return err == nil && sb.GetStatus().GetPersisted() && sb.GetStatus().GetPhase() == sandboxv1.Phase_PHASE_RUNNING
	})
}

// TestStartPath: the answer says which way the agent started it, and so does a later Get.
func TestStartPath(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	a.SetSlots(&agentv1.SlotStatus{Free: 1, Wanted: 1})
	req := request("one")
	req.RequestId = "r1"
	resp, err := m.create(req)
	require.NoError(t, err)
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, resp.GetStartPath())
	var names []string
	for _, s := range resp.GetTimings() {
		names = append(names, s.GetStage())
	}
	require.Equal(t, []string{"reserve", "agent", "admitted", "claim", "started"}, names)
	require.Equal(t, 2*time.Millisecond, resp.GetTimings()[3].GetDuration().AsDuration())
	again, err := m.create(req)
	require.NoError(t, err)
	require.True(t, again.GetReplayed())
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, again.GetStartPath())
	cold, err := m.create(request("two"))
	require.NoError(t, err)
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, cold.GetStartPath(), "there was one slot")
	m.eventually("both custom resources land", func() bool { return m.resource("one") != nil && m.resource("two") != nil })
	for name, want := range map[string]sandboxv1.StartPath{"one": sandboxv1.StartPath_START_PATH_SLOT, "two": sandboxv1.StartPath_START_PATH_COLD} {
		sb, err := m.get(name)
		require.NoError(t, err)
		require.Equal(t, want, sb.GetStatus().GetStartPath(), "the status is the controller's to write, the agent's word is known before")
	}
}

func TestBadRequestsReachNoAgent(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	tests := map[string]struct {
		change func(*sandboxv1.CreateSandboxRequest)
		class  func(error) bool
		reason fault.Reason
		text   string
	}{
		"name": {func(r *sandboxv1.CreateSandboxRequest) { r.Name = "Not_A_Label" }, errdefs.IsInvalidArgument, fault.InvalidField, "name"},
		"port": {func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Ports = []int32{70000} }, errdefs.IsInvalidArgument, fault.InvalidField, "spec.ports"},
		"pool": {func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Pool = "nowhere" }, errdefs.IsNotFound, fault.PoolNotFound, "nowhere"},
		"size": {func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Args = slicesOf(10, strings.Repeat("a", 131072)) }, errdefs.IsInvalidArgument, fault.RequestTooLarge, "bytes"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			req := request("bad")
			test.change(req)
			_, err := m.create(req)
			require.True(t, test.class(err), "%v", err)
			require.Equal(t, test.reason, fault.ReasonOf(err))
			require.ErrorContains(t, err, test.text)
		})
	}
	require.Zero(t, a.Creates())
	m.nothing()
}

func slicesOf(n int, s string) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = s
	}
	return out
}

func TestRequestID(t *testing.T) {
	m := newMesh(t)
	gate := make(chan struct{})
	a := m.agent("a", 50, func(a *fakeagent.Agent) {
		a.OnCreate = func(ctx context.Context, r *agentv1.SandboxRecord) error {
			if r.GetRequestId() == "concurrent" {
				<-gate
			}
			return nil
		}
	})
	t.Run("concurrent duplicates share one execution", func(t *testing.T) {
		before := a.Creates()
		var wg sync.WaitGroup
		var replayed atomic.Int64
		uids := make(chan string, 8)
		for range 8 {
			wg.Go(func() {
				req := request("")
				req.RequestId = "concurrent"
				resp, err := m.create(req)
				if err == nil {
					uids <- resp.GetSandbox().GetUid()
				}
				if resp.GetReplayed() {
					replayed.Add(1)
				}
			})
		}
		m.eventually("it runs", func() bool { return a.Creates() == before+1 })
		close(gate)
		wg.Wait()
		close(uids)
		seen := map[string]int{}
		for uid := range uids {
			seen[uid]++
		}
		require.Len(t, seen, 1)
		for _, n := range seen {
			require.Equal(t, 8, n)
		}
		require.EqualValues(t, 7, replayed.Load())
		require.Equal(t, before+1, a.Creates())
	})
	first := request("once")
	first.RequestId = "r1"
	resp, err := m.create(first)
	require.NoError(t, err)
	again, err := m.create(first)
	require.NoError(t, err)
	require.True(t, again.GetReplayed())
	again.Replayed = false
	require.True(t, proto.Equal(resp, again), "the same answer")

	other := request("once")
	other.RequestId, other.Spec.Args = "r1", []string{"x"}
	_, err = m.create(other)
	require.True(t, errdefs.IsAlreadyExists(err))
	require.Equal(t, fault.RequestIDReused, fault.ReasonOf(err))

	t.Run("also after a restart, from the custom resource", func(t *testing.T) {
		m.eventually("it landed", func() bool { return m.resource("once") != nil })
		m.stop()
		m.start()
		m.eventually("the agents have reported", func() bool { sb, err := m.get("once"); return err == nil && sb.GetStatus().GetSandboxId() != "" })
		again, err := m.create(first)
		require.NoError(t, err)
		require.True(t, again.GetReplayed())
		require.Equal(t, resp.GetSandbox().GetUid(), again.GetSandbox().GetUid())
		_, err = m.create(other)
		require.Equal(t, fault.RequestIDReused, fault.ReasonOf(err))
	})
	t.Run("a late retry does not bring a deleted sandbox back", func(t *testing.T) {
		require.NoError(t, m.remove("once"))
		_, err := m.create(first)
		require.Equal(t, fault.SandboxTerminating, fault.ReasonOf(err))
	})
}

func TestRequestFaultMarksNoAgent(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnCreate = func(_ context.Context, r *agentv1.SandboxRecord) error {
			if r.GetName() == "bad" {
				return fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no such image")
			}
			return nil
		}
	})
	b := m.agent("b", 5, nil)
	_, err := m.create(request("bad"))
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
	require.True(t, errdefs.IsNotFound(err))
	require.Zero(t, b.Creates(), "another agent could not do better")
	m.nothing()
	resp, err := m.create(request("good"))
	require.NoError(t, err)
	require.Equal(t, "pod-a", resp.GetSandbox().GetStatus().GetAssignedPod())
	require.Equal(t, 2, a.Creates())
}

func TestNoCapacity(t *testing.T) {
	m := newMesh(t)
	_, err := m.create(request("one"))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
	m.agent("a", 1, nil)
	_, err = m.create(request("one"))
	require.NoError(t, err)
	_, err = m.create(request("two"))
	require.True(t, errdefs.IsResourceExhausted(err))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
	after, ok := fault.RetryAfter(err)
	require.True(t, ok)
	require.Positive(t, after)
}

func TestServerDeadline(t *testing.T) {
	m := newMesh(t, func(c *fastpath.Config) { c.CreateTimeout = 100 * time.Millisecond })
	m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnCreate = func(ctx context.Context, _ *agentv1.SandboxRecord) error { <-ctx.Done(); return ctx.Err() }
	})
	_, err := m.sandbox.CreateSandbox(context.Background(), request("one"))
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	m.nothing()
}

// A create without a pool runs in the default pool of its Namespace, and its custom resource names that pool.
func TestCreateInDefaultPool(t *testing.T) {
	defaults := pools.New()
	defaults.Set(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: pool}})
	m := newMesh(t, func(c *fastpath.Config) { c.Pools = defaults })
	m.agent("a", 5, nil)
	req := request("one")
	req.Spec.Pool = ""
	_, err := m.create(req)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "the default is not known yet")
	defaults.SetNamespace(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: ns, Annotations: map[string]string{v1alpha1.AnnotationDefaultPool: pool},
	}})
	defaults.SetSynced()
	resp, err := m.create(req)
	require.NoError(t, err)
	require.Equal(t, pool, resp.GetSandbox().GetSpec().GetPool())
	m.eventually("the custom resource is written", func() bool { return m.resource("one") != nil })
	require.Equal(t, pool, m.resource("one").Spec.PoolRef)
}
