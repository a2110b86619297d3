package persistence_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

func record() *agentv1.SandboxRecord {
	return &agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: "u", Attempt: 2, AgentUid: "a"},
		Namespace: "ns", Name: "one", RequestId: "r1", Traceparent: "00-trace",
		Labels: map[string]string{"app": "demo"}, Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: "p"},
		CreateTime: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)),
	}
}

func TestStrongResource(t *testing.T) {
	sb := persistence.StrongResource(record())
	require.Equal(t, v1alpha1.ConsistencyModeStrong, sb.Spec.ConsistencyMode)
	require.Equal(t, map[string]string{"app": "demo", v1alpha1.LabelPool: "p"}, sb.Labels)
	require.Equal(t, map[string]string{
		v1alpha1.AnnotationCreateTime: "2026-01-02T03:04:05.000000006Z", v1alpha1.AnnotationRequestID: "r1",
		v1alpha1.AnnotationTraceparent:   "00-trace",
		v1alpha1.AnnotationRequestDigest: persistence.CreateDigest(record().GetLabels(), record().GetSpec()),
	}, sb.Annotations)
	require.Equal(t, []string{v1alpha1.Finalizer}, sb.Finalizers)
	require.Empty(t, sb.Status, "the controller alone writes it")
}

func TestFastResource(t *testing.T) {
	tests := map[string]struct {
		node    string
		report  *agentv1.SandboxReport
		started bool
		label   bool
	}{
		"running": {"node", &agentv1.SandboxReport{
			ContainerId: "u-2", StartTime: timestamppb.Now(), StartPath: sandboxv1.StartPath_START_PATH_SLOT, Endpoints: []string{"10.0.0.1:80"},
		}, true, true},
		"a node whose name is no label value": {strings.Repeat("n", 64), &agentv1.SandboxReport{StartTime: timestamppb.Now()}, true, false},
		"an agent that reports no start time": {"node", &agentv1.SandboxReport{}, false, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			sb := persistence.FastResource(&store.Record{
				Record: record(), Report: test.report, AgentPod: "pod-a", NodeName: test.node, AgentAddress: "10.0.0.1:5758",
			})
			require.Equal(t, v1alpha1.ConsistencyModeFast, sb.Spec.ConsistencyMode)
			require.Equal(t, "u", sb.EffectiveUID())
			require.Equal(t, test.label, sb.Labels[v1alpha1.LabelNode] != "")
			a, err := sb.Assignment()
			require.NoError(t, err)
			require.Equal(t, test.started, a.Started != nil)
			if test.started {
				require.Equal(t, test.report.GetContainerId(), a.Started.SandboxID)
				require.Equal(t, test.report.GetEndpoints(), a.Started.Endpoints)
				require.WithinDuration(t, test.report.GetStartTime().AsTime(), a.Started.StartTime.Time, time.Microsecond)
				require.Equal(t, v1alpha1.PhaseRunning, sb.EffectiveStatus().Phase)
			}
			a.Started = nil
			require.Equal(t, &v1alpha1.Assignment{
				AgentPod: "pod-a", AgentUID: "a", NodeName: test.node, AgentAddress: "10.0.0.1:5758", SandboxUID: "u", Attempt: 2,
			}, a)
		})
	}
}

func TestCreateDigest(t *testing.T) {
	spec := func(image string) *sandboxv1.SandboxSpec {
		return &sandboxv1.SandboxSpec{Image: image, Env: map[string]string{"b": "2", "a": "1"}}
	}
	same := persistence.CreateDigest(map[string]string{"x": "1", "y": "2"}, spec("a"))
	require.Equal(t, same, persistence.CreateDigest(map[string]string{"y": "2", "x": "1"}, spec("a")))
	require.NotEqual(t, same, persistence.CreateDigest(map[string]string{"x": "1"}, spec("a")))
	require.NotEqual(t, same, persistence.CreateDigest(map[string]string{"x": "1", "y": "2"}, spec("b")))
}
