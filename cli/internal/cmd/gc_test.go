package cmd_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func objectAt(group, kind, namespace, name string) *gcv1.Selector {
	return &gcv1.Selector{By: &gcv1.Selector_Place{Place: &gcv1.Place{Kind: &gcv1.Kind{Group: group, Kind: kind}, Namespace: namespace, Name: name}}}
}

func TestGCExplain(t *testing.T) {
	c := &collector{explained: &gcv1.ExplainObjectResponse{
		Object: thing("Pod", "web-5d8f-x"), State: gcv1.State_STATE_OWNED,
		Owners: []*gcv1.Owner{ownerOf("ReplicaSet.apps", "web-5d8f", gcv1.Standing_STANDING_SOLID, true), ownerOf("Thing.example.com", "lost", gcv1.Standing_STANDING_UNRESOLVABLE, false)},
		Path:   []*gcv1.Object{thing("ReplicaSet.apps", "web-5d8f"), thing("Deployment.apps", "web")}, Unblock: []string{"delete its owner"},
	}}
	b, n := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	r := b.run(t, "gc", "explain", "pod/web-5d8f-x", "--kubeconfig", "k", "--context", "c")
	require.Zero(t, r.code, r.err)
	require.Empty(t, r.err)
	require.Equal(t, strings.TrimPrefix(`
Pod default/web-5d8f-x: Owned, an owner keeps it

  Deployment.apps/web
  └─ ReplicaSet.apps/web-5d8f
     └─ Pod/web-5d8f-x

OWNER                      STANDING       BLOCKS   CONTROLLER   UID
ReplicaSet.apps/web-5d8f   Solid          yes      yes          u-web-5d8f
Thing.example.com/lost     Unresolvable   no       no           u-lost

What would unblock its deletion:
  - delete its owner
`, "\n"), r.out)
	require.Equal(t, tunnel.Options{Kubeconfig: "k", Context: "c"}, tunnel.Options{Kubeconfig: n.options.Kubeconfig, Context: n.options.Context})
	require.Equal(t, []tunnel.Selector{{Namespace: "fast-sandbox-system", Labels: "app.kubernetes.io/name=gc"}}, n.selectors)
	require.Contains(t, b.run(t, "gc", "explain", "po", "web", "-o", "json").out, `"state": "STATE_OWNED"`)
	require.Equal(t, "pod/web-5d8f-x\nreplicaset.apps/web-5d8f\ndeployment.apps/web\n", b.run(t, "gc", "explain", "po", "web", "-o", "name").out)
}

func TestGCExplainsDeletion(t *testing.T) {
	going := thing("Deployment.apps", "web")
	going.Deleting = true
	c := &collector{explained: &gcv1.ExplainObjectResponse{
		Object: going, State: gcv1.State_STATE_AWAITS_DEPENDENTS, Blockers: []*gcv1.Object{thing("ReplicaSet.apps", "web-1"), thing("ReplicaSet.apps", "web-2")},
		BlockerCount: 5, Finalizers: []string{"example.com/mine"},
		Next: &gcv1.Step{Verb: gcv1.Verb_VERB_FINALIZE, Cause: gcv1.Cause_CAUSE_DEPENDENTS_GONE, Finalizer: "foregroundDeletion"},
	}}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	require.Equal(t, strings.TrimPrefix(`
Deployment.apps default/web: AwaitsDependents, it is being deleted and waits for the dependents that block it

Dependents that it waits for:
  - ReplicaSet.apps default/web-1
  - ReplicaSet.apps default/web-2
  - and 3 more

Finalizers of other components that block it:
  - example.com/mine

Next action of the collector: remove the finalizer foregroundDeletion from it: no dependent blocks its deletion
`, "\n"), b.run(t, "gc", "explain", "deploy/web").out)
}

// TestGCObjects checks that objects are named as for kubectl.
func TestGCObjects(t *testing.T) {
	c := &collector{explained: &gcv1.ExplainObjectResponse{}}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	for args, want := range map[string]*gcv1.Selector{
		"deploy/web":                  objectAt("apps", "Deployment", "default", "web"),
		"deployment.apps/web -n shop": objectAt("apps", "Deployment", "shop", "web"),
		"pods web":                    objectAt("", "Pod", "default", "web"),
		"no/node-1 -n shop":           objectAt("", "Node", "", "node-1"),
		"--uid 5f0c":                  {By: &gcv1.Selector_Uid{Uid: "5f0c"}},
	} {
		c.explains = nil
		r := b.run(t, strings.Fields("gc explain "+args)...)
		require.Zero(t, r.code, r.err)
		require.Empty(t, gocmp.Diff([]*gcv1.ExplainObjectRequest{{Object: want, MaxBlockers: 20}}, c.explains, protocmp.Transform()), args)
	}
	for args, want := range map[string]string{
		"explain":                         "KIND/NAME is missing",
		"explain pod":                     "a name is missing: pod/NAME",
		"explain pod a b":                 `unexpected argument "b"`,
		"explain pod/a --uid 5f0c":        "mutually exclusive",
		"preview pod/a --cascade all":     `--cascade is "all", want background, foreground or orphan`,
		"preview pod/a -o dot":            `output is "dot", which is for graphs only`,
		"watch pods":                      "unexpected argument",
		"tidy":                            `unknown command "tidy", want explain,`,
		"graph pod/a --max-objects=a-lot": "invalid argument",
	} {
		r := b.run(t, strings.Fields("gc "+args)...)
		require.Equal(t, 2, r.code, args)
		require.Contains(t, r.err, want)
	}
	r := b.run(t, "gc", "explain", "webs/a")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, `error: the cluster has no kind "webs" (KIND_NOT_FOUND)`+"\nhint: kubectl api-resources")
	c.err = fault.New(errdefs.ErrNotFound, fault.Internal, "not observed")
	for _, verb := range []string{"explain", "preview", "graph"} {
		r = b.run(t, "gc", verb, "deploy/web")
		require.Equal(t, 3, r.code)
		require.Contains(t, r.err, "error: the garbage collector has not observed Deployment.apps default/web (OBJECT_NOT_FOUND)\nhint: ")
	}
}

func consequence(o *gcv1.Object, outcome gcv1.Outcome, depth int32, via string) *gcv1.PreviewDeleteResponse {
	return &gcv1.PreviewDeleteResponse{Part: &gcv1.PreviewDeleteResponse_Consequence{Consequence: &gcv1.Consequence{Object: o, Outcome: outcome, Depth: depth, Via: via}}}
}

func TestGCPreview(t *testing.T) {
	goes, stays := gcv1.Outcome_OUTCOME_GOES, gcv1.Outcome_OUTCOME_STAYS
	count := func(o *gcv1.Object, outcome gcv1.Outcome, n int32) *gcv1.PreviewCount {
		return &gcv1.PreviewCount{Kind: o.GetPlace().GetKind(), Outcome: outcome, Count: n}
	}
	deploy, set, pod := thing("Deployment.apps", "web"), thing("ReplicaSet.apps", "web-1"), thing("Pod", "web-1-a")
	c := &collector{previewed: []*gcv1.PreviewDeleteResponse{
		consequence(deploy, goes, 0, ""), consequence(set, goes, 1, "u-web"), consequence(thing("Secret", "s"), stays, 1, "u-web"),
		consequence(pod, goes, 2, "u-web-1"), consequence(thing("Pod", "web-1-b"), goes, 2, "u-web-1"),
		{Part: &gcv1.PreviewDeleteResponse_Summary{Summary: &gcv1.PreviewSummary{Counts: []*gcv1.PreviewCount{
			count(pod, goes, 2), count(deploy, goes, 1), count(set, goes, 1), count(thing("Secret", ""), stays, 1)}}}},
	}}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	r := b.run(t, "gc", "preview", "deploy/web", "--cascade", "foreground")
	require.Zero(t, r.code, r.err)
	require.Equal(t, strings.TrimPrefix(`
OUTCOME   OBJECT                     NAMESPACE
Goes      Deployment.apps/web        default
Goes      ├─ ReplicaSet.apps/web-1   default
Goes      │  ├─ Pod/web-1-a          default
Goes      │  └─ Pod/web-1-b          default
Stays     └─ Secret/s                default

4 would be deleted (2 Pod, 1 Deployment.apps, 1 ReplicaSet.apps)
1 would lose an owner and be kept (1 Secret)
`, "\n"), r.out)
	require.Equal(t, gcv1.PropagationPolicy_PROPAGATION_POLICY_FOREGROUND, c.previews[0].GetPolicy())
	require.Equal(t, "deployment.apps/web\nreplicaset.apps/web-1\npod/web-1-a\npod/web-1-b\n", b.run(t, "gc", "preview", "deploy/web", "-o", "name").out)
	r = b.run(t, "gc", "preview", "deploy/web", "-o", "json")
	for _, part := range []string{`"consequences": [`, `"summary": {`, `"count": 2`, `"via": "u-web-1"`} {
		require.Contains(t, r.out, part)
	}
	require.Contains(t, b.run(t, "gc", "preview", "deploy/web", "-o", "wide").out, "u-web-1-a   <none>")

	c.previewed = c.previewed[:3]
	r = b.run(t, "gc", "preview", "deploy/web")
	require.Equal(t, 7, r.code, "what ends without a summary is not all")
	require.Empty(t, r.out)

	c.hangs = make(chan struct{})
	defer close(c.hangs)
	r = b.run(t, "gc", "preview", "deploy/web", "--timeout", "50ms")
	require.Equal(t, 8, r.code, r.err)
	require.Contains(t, r.err, "did not end within 50ms")
}

func TestGCGraph(t *testing.T) {
	lost := thing("Thing.example.com", "lost")
	c := &collector{graph: &gcv1.GetGraphResponse{
		Vertices: []*gcv1.Vertex{{Object: thing("Pod", "a"), State: gcv1.State_STATE_OWNED}, {Object: thing("ReplicaSet.apps", "s"), State: gcv1.State_STATE_FREE, Distance: 1},
			{Object: lost, Virtual: true, Distance: 1}},
		References: []*gcv1.Reference{{Dependent: "u-a", Owner: "u-s", Standing: gcv1.Standing_STANDING_SOLID, Block: true}, {Dependent: "u-a", Owner: "u-lost", Standing: gcv1.Standing_STANDING_UNVERIFIED}},
		Truncated:  true, Dot: "digraph {}\n",
	}}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	r := b.run(t, "gc", "graph", "pod/a", "--depth", "3", "--max-objects", "7")
	require.Zero(t, r.code, r.err)
	require.Equal(t, strings.TrimPrefix(`
DISTANCE   OBJECT                   NAMESPACE   STATE     OWNERS
0          Pod/a                    default     Owned     ReplicaSet.apps/s (Solid, blocks); Thing.example.com/lost (Unverified)
1          ReplicaSet.apps/s        default     Free      <none>
1          Thing.example.com/lost   default     NotSeen   <none>
`, "\n"), r.out)
	require.Equal(t, "note: there is more within that depth: --max-objects\n", r.err)
	require.Empty(t, gocmp.Diff(&gcv1.GetGraphRequest{Object: objectAt("", "Pod", "default", "a"), Depth: 3, MaxObjects: 7}, c.graphs[0], protocmp.Transform()))
	require.Equal(t, "digraph {}\n", b.run(t, "gc", "graph", "pod/a", "-o", "dot").out)
	require.True(t, c.graphs[1].GetDot())
	require.Contains(t, b.run(t, "gc", "graph", "pod/a", "-o", "wide").out, "u-lost")
}

func TestGCWholeGraph(t *testing.T) {
	c := &collector{parts: []*gcv1.StreamGraphResponse{
		{Vertices: []*gcv1.Vertex{{Object: thing("Pod", "b"), State: gcv1.State_STATE_OWNED}, {Object: thing("Thing.example.com", "lost"), Virtual: true}},
			References: []*gcv1.Reference{{Dependent: "u-b", Owner: "u-s", Standing: gcv1.Standing_STANDING_SOLID, Block: true}}},
		{Vertices: []*gcv1.Vertex{{Object: thing("ReplicaSet.apps", "s"), State: gcv1.State_STATE_FREE}, {Object: thing("Pod", "a"), State: gcv1.State_STATE_DOOMED}},
			References: []*gcv1.Reference{{Dependent: "u-a", Owner: "u-lost", Standing: gcv1.Standing_STANDING_DANGLING}}},
	}}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	r := b.run(t, "gc", "graph", "-n", "default")
	require.Zero(t, r.code, r.err)
	require.Equal(t, strings.TrimPrefix(`
OBJECT                   NAMESPACE   STATE     OWNERS
Pod/a                    default     Doomed    Thing.example.com/lost (Dangling)
Pod/b                    default     Owned     ReplicaSet.apps/s (Solid, blocks)
ReplicaSet.apps/s        default     Free      <none>
Thing.example.com/lost   default     NotSeen   <none>
`, "\n"), r.out, "owners and dependents may come in different messages")
	require.Empty(t, r.err)
	require.Empty(t, gocmp.Diff(&gcv1.StreamGraphRequest{Namespace: "default"}, c.streams[0], protocmp.Transform()))
	require.Contains(t, b.run(t, "gc", "graph", "-A", "-o", "wide").out, "u-lost")
	require.Empty(t, c.streams[1].GetNamespace())
	require.Equal(t, `digraph owners {
  node [shape=box];
  "u-b" [label="Pod\ndefault/b\nOwned", style=solid];
  "u-lost" [label="Thing.example.com\ndefault/lost", style=dashed];
  "u-s" [label="ReplicaSet.apps\ndefault/s\nFree", style=solid];
  "u-a" [label="Pod\ndefault/a\nDoomed", style=dotted];
  "u-s" -> "u-b" [label="Solid", penwidth=2];
  "u-lost" -> "u-a" [label="Dangling", penwidth=1];
}
`, b.run(t, "gc", "graph", "-A", "-o", "dot").out)
	require.Equal(t, 4, strings.Count(b.run(t, "gc", "graph", "-A", "-o", "json").out, `"uid":`))
	require.Equal(t, "pod/b\nthing.example.com/lost\nreplicaset.apps/s\npod/a\n", b.run(t, "gc", "graph", "-o", "name").out)
	c.parts = nil
	require.Equal(t, "OBJECT   NAMESPACE   STATE   OWNERS\n", b.run(t, "gc", "graph").out, "an empty graph")
	for _, args := range [][]string{{"--depth", "3"}, {"--max-objects", "3"}, {"pod/a", "-A"}, {"--uid", "u", "-A"}, {"pod"}} {
		require.Equal(t, 2, b.run(t, append([]string{"gc", "graph"}, args...)...).code, "%v", args)
	}
	c.err = fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "not you")
	require.Equal(t, 9, b.run(t, "gc", "graph").code)
}

func TestGCStatus(t *testing.T) {
	one := &collector{status: &gcv1.GetStatusResponse{Enforcing: true, Objects: 12, VirtualOwners: 1, References: 7,
		Failing: []*gcv1.FailingResource{{Resource: "secrets", Error: "forbidden"}}}}
	two := &collector{status: &gcv1.GetStatusResponse{Objects: 12, Stopped: "too many"}}
	b, n := withCollectors(t, map[string]*collector{"gc-1": one, "gc-2": two}, "gc-1", "gc-2")
	r := b.run(t, "gc", "status")
	require.Zero(t, r.code, r.err)
	require.Equal(t, strings.TrimPrefix(`
POD    ENFORCING   OBJECTS   UNSEEN-OWNERS   REFERENCES   FAILING               STOPPED
gc-1   yes         12        1               7            secrets (forbidden)   <none>
gc-2   no          12        0               0            <none>                too many
`, "\n"), r.out)
	n.refuse["gc-1"] = fault.New(errdefs.ErrPermissionDenied, tunnel.ReasonCluster, "forbidden")
	r = b.run(t, "gc", "status", "-o", "json")
	require.Equal(t, 9, r.code)
	require.Contains(t, r.out, `"pod": "gc-2"`)
	require.Contains(t, r.err, "error: pod gc-1: forbidden (CLUSTER_REFUSED)\nhint: the user of the kubeconfig must be allowed")
}

func deletion(name string, missed int32) *gcv1.WatchDeletionsResponse {
	return &gcv1.WatchDeletionsResponse{Object: thing("Pod", name), Cause: gcv1.Cause_CAUSE_OWNERS_GONE, Policy: gcv1.PropagationPolicy_PROPAGATION_POLICY_BACKGROUND,
		Time: timestamppb.New(now), Missed: missed}
}

// TestGCWatch watches two replicas, of which one ends: all are found again.
func TestGCWatch(t *testing.T) {
	one := &collector{status: &gcv1.GetStatusResponse{Enforcing: true}, deletions: make(chan *gcv1.WatchDeletionsResponse)}
	two := &collector{status: &gcv1.GetStatusResponse{}, deletions: make(chan *gcv1.WatchDeletionsResponse)}
	b, n := withCollectors(t, map[string]*collector{"gc-1": one, "gc-2": two}, "gc-1", "gc-2")
	b.clock = clock.RealClock{}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var out buffer
	done := make(chan result, 1)
	go func() { done <- b.runTo(ctx, &out, "gc", "watch", "-n", "shop") }()
	two.deletions <- deletion("b", 0)
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "Pod/b") }, time.Minute, time.Millisecond)
	one.deletions <- deletion("a", 3)
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "Pod/a") }, time.Minute, time.Millisecond)
	n.mu.Lock()
	n.names = []string{"gc-2"}
	n.mu.Unlock()
	close(one.deletions)
	watches := func() int { two.mu.Lock(); defer two.mu.Unlock(); return len(two.watches) }
	require.Eventually(t, func() bool { return watches() == 2 }, time.Minute, time.Millisecond)
	require.Eventually(t, func() bool {
		select {
		case two.deletions <- deletion("c", 0): // the watch that ends may take it
		default:
		}
		return strings.Contains(out.String(), "Pod/c")
	}, time.Minute, time.Millisecond)
	interrupt()
	r := <-done
	require.Zero(t, r.code, r.err)
	require.Contains(t, out.String(), strings.TrimPrefix(`
TIME                   OBJECT   NAMESPACE   CAUSE        POLICY
2030-01-02T03:04:05Z   Pod/b    default     OwnersGone   Background
2030-01-02T03:04:05Z   Pod/a    default     OwnersGone   Background
`, "\n"))
	require.Contains(t, r.err, "watching deletions in namespace shop\n")
	require.Contains(t, r.err, "note: 3 deletions are missing")
	require.Contains(t, r.err, "finding garbage collectors again: ")
	require.Equal(t, "shop", one.watches[0].GetNamespace())
}

func TestGCWatchOfObservers(t *testing.T) {
	c := &collector{status: &gcv1.GetStatusResponse{}, deletions: make(chan *gcv1.WatchDeletionsResponse), err: fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "not you")}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	r := b.run(t, "gc", "watch", "-A")
	require.Equal(t, 9, r.code)
	require.Empty(t, c.watches)
	c.err = nil
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var out buffer
	done := make(chan result, 1)
	go func() { done <- b.runTo(ctx, &out, "gc", "watch", "-A", "-o", "json") }()
	c.deletions <- deletion("a", 0)
	require.Eventually(t, func() bool { return strings.Contains(out.String(), `"cause":"CAUSE_OWNERS_GONE"`) }, time.Minute, time.Millisecond)
	interrupt()
	r = <-done
	require.Zero(t, r.code)
	require.Equal(t, "watching deletions in all namespaces\nnote: no garbage collector of Fast Sandbox deletes now; see fsb-ctl gc status\n", r.err)
	require.Empty(t, c.watches[0].GetNamespace())
}

// TestGCReplicas checks that the ready replica is called, and the next one if it is unreachable.
func TestGCReplicas(t *testing.T) {
	c := &collector{explained: &gcv1.ExplainObjectResponse{Object: thing("Pod", "a"), State: gcv1.State_STATE_FREE}}
	b, n := withCollectors(t, map[string]*collector{"gc-1": c, "gc-2": c, "gc-3": c}, "gc-1", "gc-2", "gc-3")
	b.clock = clock.RealClock{}
	n.unready["gc-1"] = true
	n.refuse["gc-2"] = away(tunnel.ReasonPod)
	r := b.run(t, "gc", "explain", "pod/a", "--timeout", "2s")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "gc-3", n.dials[len(n.dials)-1])
	require.NotContains(t, n.dials, "gc-1")
	n.unready["gc-2"], n.unready["gc-3"] = true, true
	r = b.run(t, "gc", "explain", "pod/a", "--timeout", "2s")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "note: no garbage collector is ready: the result may be incomplete\n", r.err)
	n.names = nil
	r = b.run(t, "gc", "explain", "pod/a", "--gc-namespace", "other")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "error: no garbage collector of Fast Sandbox runs in namespace other (COLLECTOR_NOT_FOUND)\nhint: kubectl get pods -A -o wide -l app.kubernetes.io/name=gc")
	n.err = fault.New(errdefs.ErrPermissionDenied, tunnel.ReasonCluster, "forbidden")
	require.Equal(t, 9, b.run(t, "gc", "explain", "pod/a").code)
}

// TestGCIsChecked connects to a server whose certificate is not that of a garbage collector.
func TestGCIsChecked(t *testing.T) {
	b, n := withCollectors(t, map[string]*collector{}, "gc-1")
	n.addresses["gc-1"] = b.addr // that of the allocator
	r := b.run(t, "gc", "explain", "pod/a")
	require.Equal(t, 9, r.code)
	require.Contains(t, r.err, "error: connecting to the garbage collector in Pod gc-1: ")
}

func TestGCCompletion(t *testing.T) {
	b, n := withCollectors(t, nil)
	require.Contains(t, b.run(t, "__complete", "gc", "explain", "").out, "bindings\ndeployments\nnodes\npods\n")
	require.Contains(t, b.run(t, "__complete", "gc", "preview", "deploy/").out, "deploy/a\ndeploy/b\n")
	require.Contains(t, b.run(t, "__complete", "gc", "graph", "-n", "shop", "po", "").out, "a\nb\n")
	require.Equal(t, []string{"default deployments", "shop pods"}, n.listed)
	require.NotContains(t, b.run(t, "__complete", "gc", "graph", "bindings/").out, "a\n")
	require.Contains(t, b.run(t, "__complete", "gc", "preview", "po/a", "--cascade", "").out, "background\nforeground\norphan\n")
}
