package render_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// ago returns the time a duration before now.
func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

// full returns a sandbox with every field that Describe shows.
func full() *sandboxv1.Sandbox {
	return &sandboxv1.Sandbox{
		Namespace: "ns", Name: "web", Uid: "u", Labels: map[string]string{"b": "2", "a": "1"},
		CreateTime: ago(2 * time.Hour), DeleteTime: ago(time.Minute),
		Spec: &sandboxv1.SandboxSpec{
			Image: "img", Pool: "p", Command: []string{"sh", "-c", "echo $HOME"}, Args: []string{"", `a"b`, "plain"}, WorkingDir: "/w",
			Env: map[string]string{"A": "b"}, Network: sandboxv1.NetworkMode_NETWORK_MODE_NONE,
			ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG, FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE,
			ExpireTime: timestamppb.New(now.Add(10 * time.Minute)), TerminationGracePeriod: durationpb.New(30 * time.Second),
			TtlAfterFinished: durationpb.New(time.Hour),
			Resources:        &sandboxv1.ResourceLimits{CpuMillis: 500, MemoryBytes: 128 << 20, Pids: 64},
		},
		Status: &sandboxv1.SandboxStatus{
			Phase: sandboxv1.Phase_PHASE_FAILED, Reason: "OOMKilled", Message: "out of memory", ExitCode: proto.Int32(137),
			AssignedPod: "agent-1", NodeName: "node-1", SandboxId: "u-2", Attempt: 2, Endpoints: []string{"10.0.0.1:80", "10.0.0.1:81"},
			Persisted: true, StartPath: sandboxv1.StartPath_START_PATH_COLD, StartTime: ago(time.Hour), FinishTime: ago(time.Minute),
			Conditions: []*sandboxv1.Condition{
				{Type: "Ready", Status: "False", Reason: "Finished", Message: "the process has ended", LastTransitionTime: ago(time.Minute)},
			},
		},
	}
}

func TestDescribe(t *testing.T) {
	var b strings.Builder
	require.NoError(t, render.Describe(&b, full(), now))
	require.Equal(t, strings.TrimPrefix(`
Name:             web
Namespace:        ns
UID:              u
Labels:           a=1, b=2
Created:          2030-01-02T01:04:05Z (120m ago)
Deleted:          2030-01-02T03:03:05Z (60s ago)
Phase:            Failed (OOMKilled)
Message:          out of memory
Exit Code:        137
Image:            img
Command:          sh -c "echo $HOME"
Args:             "" "a\"b" plain
Working Dir:      /w
Environment:      A=b
Limits:           cpu=500m, memory=128Mi, pids=64
Network:          None
Consistency:      Strong
Failure Policy:   AutoRecreate
Expires:          2030-01-02T03:14:05Z (in 10m)
Grace Period:     30s
TTL Finished:     1h0m0s
Pool:             p
Agent:            agent-1
Node:             node-1
Container:        u-2
Attempt:          2
Endpoints:        10.0.0.1:80, 10.0.0.1:81
Persisted:        true
Start Path:       Cold
Started:          2030-01-02T02:04:05Z (60m ago)
Finished:         2030-01-02T03:03:05Z (60s ago)
Conditions:
  TYPE    STATUS   SINCE   REASON     MESSAGE
  Ready   False    60s     Finished   the process has ended
`, "\n"), b.String())

	b.Reset()
	require.NoError(t, render.Describe(&b, &sandboxv1.Sandbox{Name: "bare"}, now))
	require.Contains(t, b.String(), "Labels:      <none>\n")
	require.NotContains(t, b.String(), "Limits")
	require.NotContains(t, b.String(), "Conditions")
}

func TestMemoryUnits(t *testing.T) {
	for bytes, want := range map[int64]string{1 << 30: "memory=1Gi", 3 << 20: "memory=3Mi", 5 << 10: "memory=5Ki", 1000: "memory=1000"} {
		var b strings.Builder
		s := &sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{Resources: &sandboxv1.ResourceLimits{MemoryBytes: bytes}}}
		require.NoError(t, render.Describe(&b, s, now))
		require.Contains(t, b.String(), want+"\n")
	}
}

func TestSandboxes(t *testing.T) {
	for name, tc := range map[string]struct {
		columns render.Columns
		want    string
	}{
		"plain": {render.Columns{}, `
NAME   PHASE                POOL   AGENT     EXIT   AGE
web    Failed (OOMKilled)   p      agent-1   137    120m
`},
		"all columns": {render.Columns{Event: true, Namespace: true, Wide: true}, `
EVENT   NAMESPACE   NAME   PHASE                POOL   AGENT     EXIT   AGE    NODE     IMAGE   ENDPOINTS                 START   UID
ADDED   ns          web    Failed (OOMKilled)   p      agent-1   137    120m   node-1   img     10.0.0.1:80,10.0.0.1:81   Cold    u
`},
	} {
		t.Run(name, func(t *testing.T) {
			table := render.Sandboxes(tc.columns)
			table.Add(render.Row(tc.columns, "ADDED", full(), now)...)
			require.Equal(t, strings.TrimPrefix(tc.want, "\n"), written(t, table))
		})
	}
}

func TestPhaseWord(t *testing.T) {
	lost := []*sandboxv1.Condition{{Type: "AgentLost", Status: "True"}}
	found := []*sandboxv1.Condition{{Type: "AgentLost", Status: "False"}}
	for want, st := range map[string]*sandboxv1.SandboxStatus{
		"":                    {},
		"Running":             {Phase: sandboxv1.Phase_PHASE_RUNNING, Conditions: found, Reason: "Ignored"},
		"Running (AgentLost)": {Phase: sandboxv1.Phase_PHASE_RUNNING, Conditions: lost},
		"Failed":              {Phase: sandboxv1.Phase_PHASE_FAILED},
		"Failed (Error)":      {Phase: sandboxv1.Phase_PHASE_FAILED, Reason: "Error"},
	} {
		require.Equal(t, want, render.PhaseWord(&sandboxv1.Sandbox{Status: st}))
	}
}

// TestPhases checks that every phase has a word that parses back to it.
func TestPhases(t *testing.T) {
	require.Len(t, render.Phases(), len(sandboxv1.Phase_name)-1)
	for _, word := range render.Phases() {
		phase, ok := render.ParsePhase(strings.ToLower(word))
		require.True(t, ok, word)
		require.Equal(t, word, render.Phase(phase))
	}
	for _, word := range []string{"", "Happy", "unspecified"} {
		_, ok := render.ParsePhase(word)
		require.False(t, ok, word)
	}
}
