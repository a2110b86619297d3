package sandbox

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

func (f *fixture) placer() *placer {
	return &placer{allocator: f.allocator, explainer: &explainer{pools: f.pools(), index: f.registry}, writer: f.writer(), memory: f.memory,
		timing: timing, metrics: f.metrics}
}

func placed(f identity.Fence, node string) *allocatorv1.AllocateResponse {
	return &allocatorv1.AllocateResponse{Assignment: &allocatorv1.Assignment{Fence: convert.FenceToProto(f), AgentPod: "agent-1", NodeName: node, AgentAddress: "10.0.0.1:5758"}}
}

func TestAllocateWritesTheAssignment(t *testing.T) {
	f := newFixture(t, newSandbox(inPhase(v1alpha1.PhasePending), func(s *v1alpha1.Sandbox) {
		s.Spec.ExposedPorts, s.Status.Attempt, s.Status.Message = []int32{80}, 1, "the last attempt"
		s.Spec.Resources = &v1alpha1.SandboxResources{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m")}}
	}))
	second := fence
	second.Attempt = 2
	f.allocator.response = placed(second, "node-1")
	f.memory.exclude(name, "full", time.Minute)
	x := f.target()
	p, err := f.placer().allocate(t.Context(), x)
	require.NoError(t, err)
	require.True(t, p.done)
	require.Equal(t, &cause{}, p.cause, "the cause of the waiting is over")

	req := f.allocator.allocates[0]
	require.Equal(t, "uid", req.GetSandboxUid())
	require.Equal(t, int64(2), req.GetAttempt())
	require.Equal(t, "pool", req.GetPool())
	require.Equal(t, []int32{80}, req.GetPorts())
	require.EqualValues(t, 500, req.GetResources().GetCpuMillis())
	require.Equal(t, []string{"full"}, req.GetExcludeAgents())

	got, err := f.get().Assignment()
	require.NoError(t, err)
	require.Equal(t, &v1alpha1.Assignment{AgentPod: "agent-1", AgentUID: "agent-uid", NodeName: "node-1", AgentAddress: "10.0.0.1:5758", SandboxUID: "uid", Attempt: 2}, got)
	require.Equal(t, map[string]string{v1alpha1.LabelNode: "node-1", v1alpha1.LabelPool: "pool"}, f.get().Labels)
	require.Equal(t, int64(2), x.sandbox.Status.Attempt)
	require.Equal(t, "agent-1", x.sandbox.Status.AssignedPod)
	require.Empty(t, x.sandbox.Status.Message)
	require.Equal(t, int64(2), f.memory.holds.get(name).Attempt)
}

func TestNodeNameThatIsNoLabel(t *testing.T) {
	f := newFixture(t, newSandbox())
	f.allocator.response = placed(fence, strings.Repeat("n", 64))
	_, err := f.placer().allocate(t.Context(), f.target())
	require.NoError(t, err)
	require.NotContains(t, f.get().Labels, v1alpha1.LabelNode)
}

func TestAllocateRefusesAnotherFence(t *testing.T) {
	for name, wrong := range map[string]identity.Fence{
		"sandbox": {SandboxUID: "other", Attempt: 1, AgentUID: "a"}, "attempt": {SandboxUID: "uid", Attempt: 3, AgentUID: "a"}, "agent": {SandboxUID: "uid", Attempt: 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, newSandbox())
			f.allocator.response = placed(wrong, "node-1")
			_, err := f.placer().allocate(t.Context(), f.target())
			require.ErrorContains(t, err, "the allocator returned the fence")
			require.Empty(t, f.get().Annotations)
		})
	}
}

func TestAllocateOfAnOutdatedSandbox(t *testing.T) {
	f := newFixture(t, newSandbox())
	x := f.target()
	changed := f.get()
	changed.Labels = map[string]string{"a": "b"}
	require.NoError(t, f.client.Update(t.Context(), changed))
	f.allocator.response = placed(fence, "node-1")
	p, err := f.placer().allocate(t.Context(), x)
	require.True(t, apierrors.IsConflict(err), "%v", err)
	require.False(t, p.done)
	require.Nil(t, x.assignment)
	require.NotContains(t, x.sandbox.Annotations, v1alpha1.AnnotationAssignment)
}

// TestReadyForAttempt: with an outdated status, the new assignment would be taken for that of the attempt before.
func TestReadyForAttempt(t *testing.T) {
	reset := func(s *v1alpha1.Sandbox) { s.Status.AcceptedResetRevision = &metav1.MicroTime{Time: start} }
	for _, tt := range []struct {
		name   string
		base   []change
		change change
		want   bool
	}{
		{"new", nil, nil, true},
		{"pending", []change{inPhase(v1alpha1.PhasePending)}, nil, true},
		{"bound", []change{inPhase(v1alpha1.PhaseBound)}, nil, true},
		{"still running", []change{inPhase(v1alpha1.PhaseRunning)}, inPhase(v1alpha1.PhasePending), false},
		{"still failed", []change{inPhase(v1alpha1.PhaseFailed)}, inPhase(v1alpha1.PhasePending), false},
		{"the reset is not written", []change{inPhase(v1alpha1.PhasePending)}, reset, false},
		{"the reset is written", []change{inPhase(v1alpha1.PhasePending), reset}, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, newSandbox())
			x := targetOf(t, newSandbox(tt.base...))
			if tt.change != nil {
				tt.change(x.sandbox)
			}
			require.Equal(t, tt.want, readyForAttempt(x))
			if !tt.want {
				p, err := f.placer().allocate(t.Context(), x)
				require.NoError(t, err)
				require.False(t, p.done)
				require.Positive(t, p.requeue)
				require.Empty(t, f.allocator.allocates)
			}
		})
	}
}

func TestUnplaced(t *testing.T) {
	agentWith := func(ready bool, reason string) agents.Agent {
		a := registered("", "pool")
		a.Ready, a.Reason = ready, reason
		return a
	}
	deletedPool := newPool(func(p *v1alpha1.SandboxPool) {
		p.Finalizers, p.DeletionTimestamp = []string{v1alpha1.Finalizer}, &metav1.Time{Time: start}
	})
	full := newPool(func(p *v1alpha1.SandboxPool) { p.Status.CurrentAgents = 3 })
	broken := newPool(func(p *v1alpha1.SandboxPool) {
		p.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Message: "image is required"}}
	})
	noCapacity := failure(errdefs.ErrResourceExhausted, fault.NoCapacity)
	for _, tt := range []struct {
		name     string
		pool     *v1alpha1.SandboxPool
		agents   []agents.Agent
		unsynced bool
		err      error
		reason   string
		message  string
		event    lifecycle.Event
	}{
		{"no pool", nil, nil, false, failure(errdefs.ErrNotFound, fault.PoolNotFound), "PoolNotFound", "there is no SandboxPool pool in namespace ns", 0},
		{"deleted pool", deletedPool, nil, false, noCapacity, "PoolDeleting", "is being deleted", 0},
		{"full pool", full, []agents.Agent{agentWith(true, "")}, false, noCapacity, "NoCapacity", "the pool has its poolMax of 3 agents", 0},
		{"growing pool", newPool(), []agents.Agent{agentWith(true, "")}, false, noCapacity, "NoCapacity", "another agent is being created", 0},
		{"no agents", broken, nil, false, noCapacity, "NoAgent", "SandboxPool pool has no agent: image is required; see kubectl", 0},
		{"no ready agents", newPool(), []agents.Agent{agentWith(false, "HeartbeatTimeout")}, false, noCapacity, "NoReadyAgent", "(1 HeartbeatTimeout)", 0},
		{"agents unknown", newPool(), nil, true, noCapacity, "NoCapacity", "failed by the test", 0},
		{"port in use", newPool(), nil, false, failure(errdefs.ErrResourceExhausted, fault.PortConflict), "PortConflict", "one of the ports [80] is in use", 0},
		{"over a quota", newPool(), nil, false, failure(errdefs.ErrResourceExhausted, fault.QuotaExceeded), "QuotaExceeded", "failed by the test", 0},
		{"no allocator", newPool(), nil, false, failure(errdefs.ErrUnavailable, fault.NotLeader), "AllocatorUnavailable", "is asked again", 0},
		{"timeout", newPool(), nil, false, failure(context.DeadlineExceeded, fault.Internal), "AllocatorUnavailable", "is asked again", 0},
		{"invalid request", newPool(), nil, false, failure(errdefs.ErrInvalidArgument, fault.ImageInvalid), "ImageInvalid", "failed by the test", lifecycle.AgentFailed},
		{"other", newPool(), nil, false, failure(errdefs.ErrUnknown, fault.Internal), "Internal", "failed by the test", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, newSandbox(func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = []int32{80} }))
			if tt.pool != nil {
				p := tt.pool.DeepCopy()
				deletion := p.DeletionTimestamp
				require.NoError(t, f.client.Create(t.Context(), p))
				if deletion != nil {
					require.NoError(t, f.client.Delete(t.Context(), p))
				}
			}
			f.registry.synced = !tt.unsynced
			for i, a := range tt.agents {
				f.registry.agents[string(rune('a'+i))] = a
			}
			f.allocator.err = tt.err
			p, err := f.placer().allocate(t.Context(), f.target())
			require.NoError(t, err)
			require.Equal(t, tt.reason, p.cause.reason)
			require.Contains(t, p.cause.message, tt.message)
			require.Equal(t, p.cause, p.unplaced)
			require.Equal(t, tt.event, p.next)
			require.Equal(t, tt.event != 0, p.done)
			if tt.event == 0 {
				require.Positive(t, p.requeue)
				require.LessOrEqual(t, p.requeue, timing.Requeue)
			}
		})
	}
}

// TestMaximumOfThePool: a Sandbox, which anyone may write with kubectl, cannot ask for more than its pool allows. No capacity is
// reserved for it.
func TestMaximumOfThePool(t *testing.T) {
	limits := func(pids string) *v1alpha1.SandboxResources {
		return &v1alpha1.SandboxResources{Limits: corev1.ResourceList{"pids": resource.MustParse(pids)}}
	}
	for pids, refused := range map[string]bool{"101": true, "100": false} {
		f := newFixture(t, newSandbox(func(s *v1alpha1.Sandbox) { s.Spec.Resources = limits(pids) }),
			newPool(func(p *v1alpha1.SandboxPool) { p.Spec.MaxSandboxResources = limits("100") }))
		f.allocator.response = placed(fence, "node-1")
		p, err := f.placer().allocate(t.Context(), f.target())
		require.NoError(t, err)
		require.True(t, p.done)
		if !refused {
			require.Len(t, f.allocator.allocates, 1)
			continue
		}
		require.Equal(t, lifecycle.AgentFailed, p.next)
		require.Equal(t, &cause{"InvalidField", "spec.resources.pids: 101 exceeds the pool's maximum of 100"}, p.cause)
		require.Empty(t, f.allocator.allocates)
	}
}

func TestUnplacedRetriesWhenTheAllocatorSays(t *testing.T) {
	f := newFixture(t, newSandbox())
	f.allocator.err = failure(errdefs.ErrResourceExhausted, fault.NoCapacity).RetryIn(time.Second)
	p, err := f.placer().allocate(t.Context(), f.target())
	require.NoError(t, err)
	require.Equal(t, time.Second, p.requeue)
	f.allocator.err = failure(errdefs.ErrResourceExhausted, fault.NoCapacity).RetryIn(time.Hour)
	p, err = f.placer().allocate(t.Context(), f.target())
	require.NoError(t, err)
	require.Equal(t, timing.Requeue, p.requeue, "but not later than the interval")
}

func TestResolvePool(t *testing.T) {
	noPoolRef := func(s *v1alpha1.Sandbox) { s.Spec.PoolRef = "" }
	had := func(pool string) change { return func(s *v1alpha1.Sandbox) { s.Status.Pool = pool } }
	labeled := func(s *v1alpha1.Sandbox) { s.Labels = map[string]string{v1alpha1.LabelPool: "label"} }
	for _, tt := range []struct {
		name       string
		changes    []change
		annotation string
		agentPool  string
		want       string
	}{
		{"named", nil, "annotated", "", "pool"},
		{"default", []change{noPoolRef}, "", "", "default"},
		{"annotated default", []change{noPoolRef}, "annotated", "", "annotated"},
		{"the default has changed", []change{noPoolRef, had("before")}, "annotated", "", "annotated"},
		{"placed before the default has changed", []change{noPoolRef, had("before"), onAgent}, "annotated", "", "before"},
		{"finished before the default has changed", []change{noPoolRef, had("before"), finishedSandbox}, "annotated", "", "before"},
		{"fast path", []change{noPoolRef, onAgent, labeled}, "annotated", "registry", "registry"},
		{"fast path, before the Registry has the agent", []change{noPoolRef, onAgent, labeled}, "annotated", "", "label"},
		{"fast path, nothing known", []change{noPoolRef, onAgent}, "annotated", "", "annotated"},
		{"deleted before it was resolved", []change{noPoolRef, deleted}, "annotated", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}}
			if tt.annotation != "" {
				ns.Annotations = map[string]string{v1alpha1.AnnotationDefaultPool: tt.annotation}
			}
			f := newFixture(t, ns)
			if tt.agentPool != "" {
				f.registry.agents["agent-uid"] = registered("", tt.agentPool)
			}
			x := targetOf(t, newSandbox(tt.changes...))
			require.NoError(t, f.pools().resolve(t.Context(), x))
			require.Equal(t, tt.want, x.sandbox.Status.Pool)
		})
	}
}
