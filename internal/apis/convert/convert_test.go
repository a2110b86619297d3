package convert_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// TestSpecRoundTrips converts random specs, with every field of the API set, to the custom resource and back.
func TestSpecRoundTrips(t *testing.T) {
	text := rapid.StringMatching(`[a-z]{1,8}`)
	rapid.Check(t, func(t *rapid.T) {
		want := &sandboxv1.SandboxSpec{
			Image: text.Draw(t, "image"), Pool: text.Draw(t, "pool"), WorkingDir: "/" + text.Draw(t, "dir"), KeepAlive: true,
			Command:         rapid.SliceOfN(text, 1, 3).Draw(t, "command"),
			Args:            rapid.SliceOfN(text, 1, 3).Draw(t, "args"),
			Env:             rapid.MapOfN(text, text, 1, 3).Draw(t, "env"),
			Ports:           rapid.SliceOfN(rapid.Int32Range(1, 65535), 1, 3).Draw(t, "ports"),
			ConsistencyMode: sandboxv1.ConsistencyMode(rapid.IntRange(0, 2).Draw(t, "mode")),
			FailurePolicy:   sandboxv1.FailurePolicy(rapid.IntRange(0, 2).Draw(t, "policy")),
			Network:         sandboxv1.NetworkMode(rapid.IntRange(0, 2).Draw(t, "network")),
			Resources: &sandboxv1.ResourceLimits{
				CpuMillis:   rapid.Int64Range(1, 64000).Draw(t, "cpu"),
				MemoryBytes: rapid.Int64Range(1, 1<<40).Draw(t, "memory"), Pids: rapid.Int64Range(1, 1<<20).Draw(t, "pids"),
			},
			ExpireTime:             timestamppb.New(time.Unix(rapid.Int64Range(1, 1<<32).Draw(t, "expire"), 0)),
			ResetRevision:          timestamppb.New(time.Unix(rapid.Int64Range(1, 1<<32).Draw(t, "reset"), 0)),
			TerminationGracePeriod: durationpb.New(time.Duration(rapid.IntRange(0, 3600).Draw(t, "grace")) * time.Second),
			TtlAfterFinished:       durationpb.New(time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "ttl"))),
			RecoveryTimeout:        durationpb.New(time.Duration(rapid.IntRange(0, 86400).Draw(t, "recovery")) * time.Second),
		}
		// A new field of the API must be added above.
		for i := range want.ProtoReflect().Descriptor().Fields().Len() {
			f := want.ProtoReflect().Descriptor().Fields().Get(i)
			if !want.ProtoReflect().Has(f) && f.Enum() == nil {
				t.Fatalf("field %s is not set", f.Name())
			}
		}
		spec := convert.SpecFromProto(want)
		if diff := cmp.Diff(want, convert.SpecToProto(&spec), protocmp.Transform()); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestToProto(t *testing.T) {
	exit := int32(3)
	created := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	s := &v1alpha1.Sandbox{Status: v1alpha1.SandboxStatus{
		Phase: v1alpha1.PhaseFailed, StartPath: v1alpha1.StartPathSlot, ExitCode: &exit, Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionFalse, Reason: "Error"}},
	}}
	s.Namespace, s.Name, s.UID = "ns", "n", "metadata-uid"
	s.CreationTimestamp = metav1.NewTime(created.Add(time.Second))
	got := convert.ToProto(s)
	require.Equal(t, "metadata-uid", got.GetUid())
	require.Equal(t, created.Add(time.Second), got.GetCreateTime().AsTime())
	require.True(t, got.GetStatus().GetPersisted())
	require.EqualValues(t, 3, got.GetStatus().GetExitCode())
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, got.GetStatus().GetStartPath())
	require.Equal(t, "Ready", got.GetStatus().GetConditions()[0].GetType())

	s.Annotations = map[string]string{
		v1alpha1.AnnotationSandboxUID: "own-uid", v1alpha1.AnnotationCreateTime: created.Format(time.RFC3339Nano),
	}
	got = convert.ToProto(s)
	require.Equal(t, "own-uid", got.GetUid())
	require.Equal(t, created, got.GetCreateTime().AsTime())
	require.Equal(t, sandboxv1.Phase_PHASE_PENDING, convert.PhaseToProto(""), "the controller has not seen it yet")
}

func TestStartPathRoundTrips(t *testing.T) {
	for n := range sandboxv1.StartPath_name {
		want := sandboxv1.StartPath(n)
		require.Equal(t, want, convert.StartPathToProto(convert.StartPathFromProto(want)))
	}
	require.Equal(t, sandboxv1.StartPath_START_PATH_UNSPECIFIED, convert.StartPathToProto("Warm"))
	require.Empty(t, convert.StartPathFromProto(99))
}

func TestEffectiveFillsInDefaults(t *testing.T) {
	limits := func(cpu, memory string) *v1alpha1.SandboxResources {
		return &v1alpha1.SandboxResources{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}}
	}
	pool := &v1alpha1.SandboxPool{Spec: v1alpha1.SandboxPoolSpec{SandboxResources: limits("500m", "1Mi"), MaxSandboxResources: limits("2", "1Gi")}}
	asked := &sandboxv1.ResourceLimits{MemoryBytes: 7}
	got := convert.Effective(asked, pool)
	require.True(t, proto.Equal(got, &sandboxv1.ResourceLimits{CpuMillis: 500, MemoryBytes: 7, Pids: 1024}), "%v", got)
	got = convert.Effective(nil, nil)
	require.True(t, proto.Equal(got, &sandboxv1.ResourceLimits{CpuMillis: 1000, MemoryBytes: 512 << 20, Pids: 1024}), "%v", got)
	require.NoError(t, convert.CheckLimits(asked, pool))
	require.NoError(t, convert.CheckLimits(&sandboxv1.ResourceLimits{CpuMillis: 1 << 40}, nil))
	err := convert.CheckLimits(&sandboxv1.ResourceLimits{MemoryBytes: 1<<30 + 1, Pids: 1 << 40}, pool)
	require.EqualError(t, err, "spec.resources.memory_bytes: 1073741825 exceeds the pool's maximum of 1073741824")
}
func TestAcknowledgedSandboxIsRunningFromItsFirstWrite(t *testing.T) {
	started := &v1alpha1.Started{
		SandboxID: "u-1", StartTime: metav1.NewMicroTime(time.Unix(1, 2000)), StartPath: v1alpha1.StartPathSlot, Endpoints: []string{"10.0.0.1:80"},
	}
	tests := map[string]struct {
		assignment *v1alpha1.Assignment
		status     v1alpha1.SandboxStatus
		phase      sandboxv1.Phase
	}{
		"acknowledged": {
			&v1alpha1.Assignment{AgentPod: "p", AgentUID: "a", NodeName: "n", SandboxUID: "u", Attempt: 1, Started: started},
			v1alpha1.SandboxStatus{}, sandboxv1.Phase_PHASE_RUNNING,
		},
		"assigned, not acknowledged": {
			&v1alpha1.Assignment{AgentPod: "p", AgentUID: "a", NodeName: "n", SandboxUID: "u", Attempt: 1},
			v1alpha1.SandboxStatus{}, sandboxv1.Phase_PHASE_PENDING,
		},
		"a controller has written a status": {
			&v1alpha1.Assignment{AgentPod: "p", AgentUID: "a", NodeName: "n", SandboxUID: "u", Attempt: 1, Started: started},
			v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseFailed}, sandboxv1.Phase_PHASE_FAILED,
		},
		"not assigned": {nil, v1alpha1.SandboxStatus{}, sandboxv1.Phase_PHASE_PENDING},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := &v1alpha1.Sandbox{Status: test.status}
			s.SetAssignment(test.assignment)
			st := convert.ToProto(s).GetStatus()
			require.Equal(t, test.phase, st.GetPhase())
			if test.phase != sandboxv1.Phase_PHASE_RUNNING {
				require.Empty(t, st.GetSandboxId())
				return
			}
			require.Equal(t, "u-1", st.GetSandboxId())
			require.Equal(t, "p", st.GetAssignedPod())
			require.Equal(t, "n", st.GetNodeName())
			require.Equal(t, int64(1), st.GetAttempt())
			require.Equal(t, started.StartTime.UTC(), st.GetStartTime().AsTime())
			require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, st.GetStartPath())
			require.Equal(t, []string{"10.0.0.1:80"}, st.GetEndpoints())
		})
	}
}
