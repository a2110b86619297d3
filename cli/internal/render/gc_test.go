package render_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

// object returns an object whose UID is its name. kind may have a group.
func object(kind, name string) *gcv1.Object {
	k, group, _ := strings.Cut(kind, ".")
	return &gcv1.Object{Place: &gcv1.Place{Kind: &gcv1.Kind{Group: group, Kind: k}, Namespace: "ns", Name: name}, Uid: name}
}

// explained returns an explanation as text.
func explained(t *testing.T, x *gcv1.ExplainObjectResponse) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, render.Explanation(&b, x))
	return b.String()
}

// TestEveryStateIsExplained checks that each state has a text of its own.
func TestEveryStateIsExplained(t *testing.T) {
	texts := map[string]bool{}
	for _, n := range slices.Sorted(maps.Keys(gcv1.State_name)) {
		text := explained(t, &gcv1.ExplainObjectResponse{Object: object("Pod", "a"), State: gcv1.State(n)})
		require.Regexp(t, `^Pod ns/a: \w*, it[s]? |^Pod ns/a: \w*, an |^Pod ns/a: \w*, whether `, text)
		_, text, _ = strings.Cut(text, ", ")
		require.False(t, texts[text], text)
		texts[text] = true
	}
}

// TestEveryCauseIsExplained checks that each cause has a text of its own.
func TestEveryCauseIsExplained(t *testing.T) {
	texts := map[string]bool{}
	for n, name := range gcv1.Cause_name {
		text := explained(t, &gcv1.ExplainObjectResponse{
			Object: object("Pod", "a"), Next: &gcv1.Step{Verb: gcv1.Verb_VERB_DELETE, Policy: gcv1.PropagationPolicy_PROPAGATION_POLICY_ORPHAN, Cause: gcv1.Cause(n)},
		})
		if n == 0 {
			require.Contains(t, text, "\nNext action of the collector: delete it (orphan)\n")
			continue
		}
		_, cause, ok := strings.Cut(text, "delete it (orphan): ")
		require.True(t, ok, name)
		require.NotEmpty(t, strings.TrimSpace(cause), name)
		require.False(t, texts[cause], name)
		texts[cause] = true
	}
}

func TestEveryActionIsExplained(t *testing.T) {
	for n, name := range gcv1.Verb_name {
		text := explained(t, &gcv1.ExplainObjectResponse{Object: object("Pod", "a"), Next: &gcv1.Step{Verb: gcv1.Verb(n), Finalizer: "f"}})
		require.Equal(t, n != 0, strings.Contains(text, "Next action"), name)
	}
}

func TestPreviewTree(t *testing.T) {
	consequences := []*gcv1.Consequence{
		{Object: object("Deployment.apps", "web"), Outcome: gcv1.Outcome_OUTCOME_GOES},
		{Object: object("ReplicaSet.apps", "rs"), Outcome: gcv1.Outcome_OUTCOME_GOES, Via: "web", Depth: 1},
		{Object: object("Pod", "a"), Outcome: gcv1.Outcome_OUTCOME_GOES, Via: "rs", Depth: 2},
		{Object: object("Secret", "s"), Outcome: gcv1.Outcome_OUTCOME_HELD, Via: "web", Depth: 1},
	}
	consequences[2].Object.Finalizers = []string{"x", "y"}
	summary := &gcv1.PreviewSummary{Counts: []*gcv1.PreviewCount{
		{Outcome: gcv1.Outcome_OUTCOME_GOES, Kind: &gcv1.Kind{Kind: "Pod"}, Count: 1},
		{Outcome: gcv1.Outcome_OUTCOME_GOES, Kind: &gcv1.Kind{Kind: "Deployment", Group: "apps"}, Count: 2},
		{Outcome: gcv1.Outcome_OUTCOME_HELD, Kind: &gcv1.Kind{Kind: "Secret"}, Count: 1},
	}}
	var b strings.Builder
	require.NoError(t, render.Preview(&b, consequences, summary, true))
	require.Equal(t, strings.TrimPrefix(`
OUTCOME   OBJECT                  NAMESPACE   UID   FINALIZERS
Goes      Deployment.apps/web     ns          web   <none>
Goes      ├─ ReplicaSet.apps/rs   ns          rs    <none>
Goes      │  └─ Pod/a             ns          a     x,y
Held      └─ Secret/s             ns          s     <none>

3 would be deleted (1 Pod, 2 Deployment.apps)
1 would be deleted, but whether another owner exists is not known (1 Secret)
`, "\n"), b.String())
}

func TestGraphTable(t *testing.T) {
	g := &gcv1.GetGraphResponse{
		Vertices: []*gcv1.Vertex{
			{Object: object("Pod", "a"), State: gcv1.State_STATE_OWNED},
			{Object: object("Node", "n"), Virtual: true, Distance: 1},
		},
		References: []*gcv1.Reference{
			{Dependent: "a", Owner: "n", Standing: gcv1.Standing_STANDING_UNVERIFIED, Block: true},
			{Dependent: "a", Owner: "outside", Standing: gcv1.Standing_STANDING_SOLID},
		},
	}
	require.Equal(t, strings.TrimPrefix(`
DISTANCE   OBJECT   NAMESPACE   STATE     OWNERS
0          Pod/a    ns          Owned     Node/n (Unverified, blocks); outside (Solid)
1          Node/n   ns          NotSeen   <none>
`, "\n"), written(t, render.Graph(g, false)))
}

func TestPolicies(t *testing.T) {
	for word, want := range map[string]gcv1.PropagationPolicy{
		"background": gcv1.PropagationPolicy_PROPAGATION_POLICY_BACKGROUND, "Orphan": gcv1.PropagationPolicy_PROPAGATION_POLICY_ORPHAN,
		"FOREGROUND": gcv1.PropagationPolicy_PROPAGATION_POLICY_FOREGROUND,
	} {
		got, ok := render.ParsePolicy(word)
		require.True(t, ok)
		require.Equal(t, want, got)
	}
	_, ok := render.ParsePolicy("unspecified")
	require.False(t, ok)
}

func TestCollectorRow(t *testing.T) {
	row := render.CollectorRow("gc-1", &gcv1.GetStatusResponse{
		Enforcing: true, Objects: 7, VirtualOwners: 1, References: 9, Stopped: "too many deletions",
		Failing: []*gcv1.FailingResource{{Resource: "things.example.com", Error: "forbidden"}, {Resource: "pods", Error: "timeout"}},
	})
	require.Equal(t, []string{"gc-1", "yes", "7", "1", "9", "things.example.com (forbidden); pods (timeout)", "too many deletions"}, row)
}
