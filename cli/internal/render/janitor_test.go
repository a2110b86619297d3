package render_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
)

func container() *janitorv1.Verdict {
	return &janitorv1.Verdict{
		NodeName: "n", ContainerId: "c", Action: janitorv1.Action_ACTION_DELETE, Reason: janitorv1.Reason_REASON_AGENT_POD_GONE, Time: timestamppb.New(now),
		Evidence: &janitorv1.Verdict_Observation{Observation: &janitorv1.Observation{
			State: janitorv1.ContainerState_CONTAINER_STATE_RUNNING, Age: durationpb.New(5 * time.Minute), Missing: durationpb.New(42 * time.Second),
			Identity: &janitorv1.ContainerIdentity{Namespace: "ns", Name: "web", Pool: "p", Persisted: true},
		}},
	}
}

func remnant() *janitorv1.Verdict {
	return &janitorv1.Verdict{
		NodeName: "n", ContainerId: "r", Action: janitorv1.Action_ACTION_WAIT, Time: timestamppb.New(now),
		Evidence: &janitorv1.Verdict_Remnant{Remnant: &janitorv1.Remnant{Kind: janitorv1.RemnantKind_REMNANT_KIND_SNAPSHOT, Since: durationpb.New(2 * time.Hour)}},
	}
}

func TestVerdicts(t *testing.T) {
	columns := render.Columns{Event: true}
	table := render.Verdicts(columns)
	for _, v := range []*janitorv1.Verdict{container(), remnant(), {NodeName: "n", ContainerId: "x", Time: timestamppb.New(now)}} {
		table.Add(render.VerdictRow(columns, "ADDED", v)...)
	}
	require.Equal(t, strings.TrimPrefix(`
EVENT   NODE   KIND        CONTAINER   SANDBOX   ACTION   REASON         AGE
ADDED   n      container   c           ns/web    Delete   AgentPodGone   5m
ADDED   n      snapshot    r           <none>    Wait     <none>         120m
ADDED   n      <none>      x           <none>    <none>   <none>         0s
`, "\n"), written(t, table))

	wide := render.Columns{Wide: true}
	table = render.Verdicts(wide)
	table.Add(render.VerdictRow(wide, "", container())...)
	table.Add(render.VerdictRow(wide, "", remnant())...)
	require.Contains(t, written(t, table), "Running   <none>   <none>     42s       <none>   p        true        <none>\n")
}

func TestSweeps(t *testing.T) {
	table := render.Sweeps()
	table.Add(render.SweepRow(&janitorv1.SweepResponse{Verdict: container(), Outcome: janitorv1.SweepResponse_OUTCOME_WOULD_DELETE, Message: "dry run"})...)
	require.Contains(t, written(t, table), "n      container   c           ns/web    WouldDelete   AgentPodGone   dry run\n")
}

// TestVerdictWords checks that every action and reason has a word that parses back to it, with and without dashes.
func TestVerdictWords(t *testing.T) {
	require.Len(t, render.VerdictActions(), len(janitorv1.Action_name)-1)
	for _, word := range render.VerdictActions() {
		action, ok := render.ParseAction(strings.ToUpper(word))
		require.True(t, ok, word)
		require.Equal(t, word, render.VerdictAction(action))
	}
	require.Len(t, render.VerdictReasons(), len(janitorv1.Reason_name)-1)
	for _, word := range render.VerdictReasons() {
		reason, ok := render.ParseReason(word)
		require.True(t, ok, word)
		require.Equal(t, word, render.VerdictReason(reason))
	}
	dashed, ok := render.ParseReason("agent-pod-gone")
	require.True(t, ok)
	require.Equal(t, janitorv1.Reason_REASON_AGENT_POD_GONE, dashed)
	for _, word := range []string{"", "nonsense", "unspecified"} {
		_, ok := render.ParseReason(word)
		require.False(t, ok, word)
		_, ok = render.ParseAction(word)
		require.False(t, ok, word)
	}
}
