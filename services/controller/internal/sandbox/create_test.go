package sandbox

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

func started(r *agentv1.SandboxReport) *agentv1.CreateSandboxResponse {
	return &agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Report: r}
}

func TestCreateAsksTheAgent(t *testing.T) {
	limits := func(cpu string) *v1alpha1.SandboxResources {
		return &v1alpha1.SandboxResources{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}}
	}
	f := newFixture(t, agentPod(), newPool(func(p *v1alpha1.SandboxPool) {
		p.Spec.SandboxResources = limits("2")
		p.Spec.SandboxResources.Limits[corev1.ResourceMemory] = resource.MustParse("1Gi")
	}))
	f.agents.service.created = []*agentv1.CreateSandboxResponse{{Stage: agentv1.CreateStage_CREATE_STAGE_ADMITTED}, started(report(runningState))}
	c := f.calls()
	creator := &creator{agents: f.access(), pools: f.pools(), calls: c, memory: f.memory, timing: timing, metrics: f.metrics}
	accepted := start.Add(-time.Minute)
	x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseBound), withAnnotation(v1alpha1.AnnotationTraceparent, createTrace),
		withAnnotation(v1alpha1.AnnotationRequestID, "request"), withAnnotation(v1alpha1.AnnotationCreateTime, accepted.Format(time.RFC3339Nano)),
		func(s *v1alpha1.Sandbox) {
			s.Spec.PoolRef, s.Status.Pool = "", "pool"
			s.Spec.Resources = limits("1")
			s.Labels = map[string]string{"team": "red"}
		}))
	p := creator.create(t.Context(), x)
	require.False(t, p.done)
	require.Equal(t, "Creating", p.cause.reason)
	require.Equal(t, timing.Requeue, p.requeue)
	call := waitIdle(t, c)
	require.NoError(t, call.err)
	require.Equal(t, agentv1.CreateStage_CREATE_STAGE_ADMITTED.String(), call.stage)
	require.Equal(t, "uid-1", call.report.GetContainerId())
	require.Equal(t, []string{"10.0.0.1:5758"}, f.agents.addresses)

	req := f.agents.service.creates[0]
	require.True(t, req.GetPersisted())
	record := req.GetRecord()
	require.Equal(t, fence, identity.FenceOf(record.GetFence()))
	require.Equal(t, "pool", record.GetSpec().GetPool(), "the record has the resolved pool")
	require.Equal(t, int64(1000), record.GetLimits().GetCpuMillis(), "the spec overrides the pool")
	require.Equal(t, int64(1<<30), record.GetLimits().GetMemoryBytes())
	require.Equal(t, int64(1024), record.GetLimits().GetPids(), "neither sets it")
	require.Equal(t, "request", record.GetRequestId())
	require.Equal(t, createTrace, record.GetTraceparent())
	require.True(t, record.GetCreateTime().AsTime().Equal(accepted))
	require.Equal(t, map[string]string{"team": "red"}, record.GetLabels())
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG, record.GetConsistencyMode())

	creator.create(t.Context(), x)
	require.Len(t, f.agents.service.creates, 1, "one call at a time")
}

func TestCreateErrors(t *testing.T) {
	refused := failure(errdefs.ErrResourceExhausted, fault.NoCapacity)
	for _, tt := range []struct {
		name   string
		agents *fakeAgents
		check  func(error) bool
	}{
		{"no connection", &fakeAgents{service: &fakeAgent{}, dialErr: errUnreachable}, errdefs.IsUnavailable},
		{"refused", &fakeAgents{service: &fakeAgent{callErr: refused}}, errdefs.IsResourceExhausted},
		{"broken stream", &fakeAgents{service: &fakeAgent{streamErr: refused}}, errdefs.IsResourceExhausted},
		{"early end", &fakeAgents{service: &fakeAgent{}}, func(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			record := recordOf(targetOf(t, newSandbox(onAgent)), nil)
			_, err := createOn(t.Context(), tt.agents, "address", record, func(string) {})
			require.True(t, tt.check(err), "%v", err)
		})
	}
}

func TestCreateCauseShowsTheLastError(t *testing.T) {
	x := targetOf(t, newSandbox(onAgent))
	last := &cause{"ImagePullFailed", "no route"}
	require.Equal(t, last, createCause(x, outcome{}, timing, last))
	require.Equal(t, last, createCause(x, outcome{running: true, started: start}, timing, last))
	late := createCause(x, outcome{running: true, started: start.Add(-timing.Requeue)}, timing, last)
	require.Equal(t, "AgentNotAnswering", late.reason)
	require.Contains(t, late.message, "agent agent-1 on node node-1 was asked at 2026-01-02T03:04:00Z")
}
