package render_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

func TestKindNames(t *testing.T) {
	for _, tc := range []struct{ kind, group, name, word string }{
		{"Pod", "", "Pod", "pod"}, {"Deployment", "apps", "Deployment.apps", "deployment.apps"},
	} {
		k := &gcv1.Kind{Kind: tc.kind, Group: tc.group}
		require.Equal(t, tc.name, render.KindName(k))
		require.Equal(t, tc.word, render.KindWord(k))
	}
}

// TestFullExplanation explains an object that is being deleted, with everything that an explanation may have.
func TestFullExplanation(t *testing.T) {
	top := object("Deployment.apps", "web")
	top.Deleting = true
	require.Equal(t, strings.TrimPrefix(`
Pod ns/a: AwaitsDependents, it is being deleted and waits for the dependents that block it

  Deployment.apps/web (being deleted)
  └─ ReplicaSet.apps/rs
     └─ Pod/a

OWNER                STANDING   BLOCKS   CONTROLLER   UID
ReplicaSet.apps/rs   Solid      yes      yes          rs
Node/n               Dangling   no       no           n

Dependents that it waits for:
  - Secret ns/s
  - Node free
  - and 3 more

Finalizers of other components that block it:
  - example.com/backup

Next action of the collector: remove the finalizer foregroundDeletion from it: no dependent blocks its deletion

What would unblock its deletion:
  - delete secret s
`, "\n"), explained(t, &gcv1.ExplainObjectResponse{
		Object: object("Pod", "a"), State: gcv1.State_STATE_AWAITS_DEPENDENTS, Path: []*gcv1.Object{object("ReplicaSet.apps", "rs"), top},
		Owners: []*gcv1.Owner{
			{Place: object("ReplicaSet.apps", "rs").GetPlace(), Uid: "rs", Standing: gcv1.Standing_STANDING_SOLID, Block: true, Controller: true},
			{Place: object("Node", "n").GetPlace(), Uid: "n", Standing: gcv1.Standing_STANDING_DANGLING},
		},
		Blockers: []*gcv1.Object{object("Secret", "s"), {Place: &gcv1.Place{Kind: &gcv1.Kind{Kind: "Node"}, Name: "free"}}}, BlockerCount: 5,
		Finalizers: []string{"example.com/backup"}, Unblock: []string{"delete secret s"},
		Next: &gcv1.Step{Verb: gcv1.Verb_VERB_FINALIZE, Finalizer: "foregroundDeletion", Cause: gcv1.Cause_CAUSE_DEPENDENTS_GONE},
	}))
}

func wholeGraph() *gcv1.GetGraphResponse {
	free := &gcv1.Object{Place: &gcv1.Place{Kind: &gcv1.Kind{Kind: "Node"}, Name: "n"}, Uid: "n"}
	deleting := object("Pod", "b")
	deleting.Deleting, deleting.Finalizers = true, []string{"x", "y"}
	return &gcv1.GetGraphResponse{
		Vertices: []*gcv1.Vertex{
			{Object: object("Secret", "s"), State: gcv1.State_STATE_DOOMED}, {Object: deleting, State: gcv1.State_STATE_TERMINATING},
			{Object: object("Pod", "a"), State: gcv1.State_STATE_OWNED}, {Object: free, Virtual: true},
		},
		References: []*gcv1.Reference{
			{Dependent: "a", Owner: "n", Standing: gcv1.Standing_STANDING_SOLID, Block: true},
			{Dependent: "s", Owner: "b", Standing: gcv1.Standing_STANDING_WAITING},
		},
	}
}

// TestWholeGraph: the objects are ordered by namespace, kind and name. The graph itself keeps its order.
func TestWholeGraph(t *testing.T) {
	g := wholeGraph()
	require.Equal(t, strings.TrimPrefix(`
OBJECT     NAMESPACE   STATE         OWNERS                   UID   FINALIZERS
Node/n     <none>      NotSeen       <none>                   n     <none>
Pod/a      ns          Owned         Node/n (Solid, blocks)   a     <none>
Pod/b      ns          Terminating   <none>                   b     x,y
Secret/s   ns          Doomed        Pod/b (Waiting)          s     <none>
`, "\n"), written(t, render.WholeGraph(g, true)))
	require.Equal(t, "s", g.GetVertices()[0].GetObject().GetUid(), "the graph was changed")
	require.True(t, strings.HasPrefix(written(t, render.WholeGraph(g, false)), "OBJECT     NAMESPACE   STATE         OWNERS\n"))
}

// TestDot: objects that were not observed are dashed, those that will be deleted dotted; blocking references are thick.
func TestDot(t *testing.T) {
	var b strings.Builder
	require.NoError(t, render.Dot(&b, wholeGraph()))
	require.Equal(t, strings.TrimPrefix(`
digraph owners {
  node [shape=box];
  "s" [label="Secret\nns/s\nDoomed", style=dotted];
  "b" [label="Pod\nns/b\nTerminating", style=dotted];
  "a" [label="Pod\nns/a\nOwned", style=solid];
  "n" [label="Node\nn", style=dashed];
  "n" -> "a" [label="Solid", penwidth=2];
  "b" -> "s" [label="Waiting", penwidth=1];
}
`, "\n"), b.String())
	require.ErrorContains(t, render.Dot(failing{}, wholeGraph()), "closed")
}

func TestDeletions(t *testing.T) {
	d := &gcv1.WatchDeletionsResponse{Time: timestamppb.New(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)), Object: object("Pod", "a"),
		Cause: gcv1.Cause_CAUSE_OWNERS_GONE, Policy: gcv1.PropagationPolicy_PROPAGATION_POLICY_BACKGROUND}
	narrow, wide := render.Deletions(false), render.Deletions(true)
	narrow.Add(render.DeletionRow(d, false)...)
	wide.Add(render.DeletionRow(d, true)...)
	require.Equal(t, strings.TrimPrefix(`
TIME                   OBJECT   NAMESPACE   CAUSE        POLICY
2030-01-02T03:04:05Z   Pod/a    ns          OwnersGone   Background
`, "\n"), written(t, narrow))
	require.Contains(t, written(t, wide), "Background   a\n")
}

func TestPulls(t *testing.T) {
	require.Equal(t, strings.TrimPrefix(`
NODE   AGENT   RESULT   TIME     MESSAGE
n      a       done     1.3s     <none>
m      b       <none>   <none>   no such image
`, "\n"), written(t, render.Pulls([]*allocatorv1.PullImageResponse{
		{NodeName: "n", AgentPod: "a", Progress: &agentv1.PullProgress{Phase: "done", Elapsed: durationpb.New(1260 * time.Millisecond)}},
		{NodeName: "m", AgentPod: "b", Error: "no such image"},
	})))
}

// TestPreviewErrors: an output that is closed is an error of each part of a preview and an explanation.
func TestPreviewErrors(t *testing.T) {
	require.ErrorContains(t, render.Preview(failing{}, nil, nil, false), "closed")
	require.ErrorContains(t, render.Explanation(failing{}, &gcv1.ExplainObjectResponse{}), "closed")
}
