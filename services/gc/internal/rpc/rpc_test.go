package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/testing/protocmp"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/feed"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc/plan"
	gcrpc "github.com/fast-sandbox/fast-sandbox/services/gc/internal/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var thing = graph.Kind{Group: "g", Kind: "Thing"} //nolint:gochecknoglobals // a constant

// testEnv is a graph that is asked over the wire, and what stands around it.
type testEnv struct {
	graph     *graph.Graph
	failing   map[string]string
	enforcing bool
	tripped   error
	feed      feed.Feed
	closing   chan struct{}
	queries   int
	queried   func(n int) // called before the n-th query, from 0
	as        func(rpc.TLS) gcv1.GarbageCollectorServiceClient
	ca        *pki.Authority
	client    func() gcv1.GarbageCollectorServiceClient
}

func (w *testEnv) Query(ask func(*graph.Graph)) {
	if w.queried != nil {
		w.queried(w.queries)
	}
	w.queries++
	ask(w.graph)
}

func (w *testEnv) Failing() map[string]string { return w.failing }
func (w *testEnv) Enforcing() bool            { return w.enforcing }
func (w *testEnv) Tripped() error             { return w.tripped }

func serve(t *testing.T) *testEnv {
	t.Helper()
	w := &testEnv{graph: graph.New(10), closing: make(chan struct{})}
	w.graph.Kinds(map[graph.Kind]graph.Scope{thing: graph.ScopeNamespaced})
	ca, listener := pki.New(t), bufconn.Listen(1<<20)
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{Listener: listener, TLS: ca.TLS(t, rpc.RoleGC), Users: users.Open(&gcv1.GarbageCollectorService_ServiceDesc), DrainTimeout: 10 * time.Millisecond})
	require.NoError(t, err)
	gcrpc.New(gcrpc.Config{Collector: w, Guard: w, Feed: &w.feed, Closing: w.closing}).Register(server)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	w.ca = ca
	w.client = func() gcv1.GarbageCollectorServiceClient { return w.as(ca.User(t, "alice")) }
	w.as = func(files rpc.TLS) gcv1.GarbageCollectorServiceClient {
		conn, err := rpc.Dial("passthrough:///gc", rpc.ClientConfig{TLS: files, ServerName: rpc.RoleGC.ServerName(),
			Options: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		return gcv1.NewGarbageCollectorServiceClient(conn)
	}
	return w
}

func made(uid string, owners ...string) graph.Object {
	o := graph.Object{Kind: thing, Namespace: "ns", Name: "n-" + uid, UID: uid}
	for _, owner := range owners {
		o.Owners = append(o.Owners, graph.Owner{Kind: thing, Version: "v1", Name: "n-" + owner, UID: owner, Block: graph.True})
	}
	return o
}

func byUID(uid string) *gcv1.Selector { return &gcv1.Selector{By: &gcv1.Selector_Uid{Uid: uid}} }

func byPlace(name string) *gcv1.Selector {
	return &gcv1.Selector{By: &gcv1.Selector_Place{Place: &gcv1.Place{Kind: &gcv1.Kind{Group: "g", Kind: "Thing"}, Namespace: "ns", Name: name}}}
}

func wire(uid string) *gcv1.Object {
	return &gcv1.Object{Place: byPlace("n-" + uid).GetPlace(), Uid: uid}
}

func TestExplainObject(t *testing.T) {
	w := serve(t)
	w.graph.Observe(made("root"))
	w.graph.Observe(made("d", "root"))
	client := w.client()
	got, err := client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: byPlace("n-d")})
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(&gcv1.ExplainObjectResponse{
		Object: wire("d"), State: gcv1.State_STATE_OWNED, Path: []*gcv1.Object{wire("root")}, Next: &gcv1.Step{},
		Owners:  []*gcv1.Owner{{Place: byPlace("n-root").GetPlace(), Uid: "root", Version: "v1", Block: true, Standing: gcv1.Standing_STANDING_SOLID}},
		Unblock: []string{"delete its owner Thing.g n-root (uid root), or remove the reference to it"},
	}, got, protocmp.Transform()))

	root := made("root")
	root.Deleting, root.Finalizers = true, []string{graph.FinalizerForeground, "example.com/hold"}
	w.graph.Observe(root)
	got, err = client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: byUID("root")})
	require.NoError(t, err)
	require.Equal(t, gcv1.State_STATE_AWAITS_DEPENDENTS, got.GetState())
	require.EqualValues(t, 1, got.GetBlockerCount())
	require.Empty(t, cmp.Diff([]*gcv1.Object{wire("d")}, got.GetBlockers(), protocmp.Transform()))
	require.Len(t, got.GetUnblock(), 2)
	require.Contains(t, got.GetUnblock()[1], "example.com/hold")
	got, err = client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: byUID("d")})
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(&gcv1.Step{Verb: gcv1.Verb_VERB_DELETE, Cause: gcv1.Cause_CAUSE_OWNERS_GONE, Policy: gcv1.PropagationPolicy_PROPAGATION_POLICY_BACKGROUND},
		got.GetNext(), protocmp.Transform()))

	w.graph.Observe(made("free"))
	got, err = client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: byUID("free")})
	require.NoError(t, err)
	require.Len(t, got.GetUnblock(), 1)
	unclear := made("unclear", "absent")
	unclear.Owners[0].Kind.Kind = "Ghost"
	for _, i := range w.graph.Observe(unclear).Items {
		w.graph.Unresolved(i.Owner)
	}
	got, err = client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: byUID("unclear")})
	require.NoError(t, err)
	require.Contains(t, got.GetUnblock()[0], "does not serve that kind in version v1")
}

func TestPreviewDelete(t *testing.T) {
	w := serve(t)
	for _, o := range []graph.Object{made("root"), made("other"), made("a", "root"), made("b", "root", "other")} {
		w.graph.Observe(o)
	}
	client := w.client()
	preview := func(policy gcv1.PropagationPolicy) (names []string, summary *gcv1.PreviewSummary) {
		stream, err := client.PreviewDelete(t.Context(), &gcv1.PreviewDeleteRequest{Object: byUID("root"), Policy: policy})
		require.NoError(t, err)
		for {
			part, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return names, summary
			}
			require.NoError(t, err)
			require.Nil(t, summary, "the summary is the last")
			if c := part.GetConsequence(); c != nil {
				names = append(names, c.GetObject().GetUid()+" "+c.GetOutcome().String())
			}
			summary = part.GetSummary()
		}
	}
	names, summary := preview(gcv1.PropagationPolicy_PROPAGATION_POLICY_UNSPECIFIED)
	require.Equal(t, []string{"root OUTCOME_GOES", "a OUTCOME_GOES", "b OUTCOME_STAYS"}, names)
	kind := &gcv1.Kind{Group: "g", Kind: "Thing"}
	require.Empty(t, cmp.Diff(&gcv1.PreviewSummary{Counts: []*gcv1.PreviewCount{
		{Kind: kind, Outcome: gcv1.Outcome_OUTCOME_GOES, Count: 2}, {Kind: kind, Outcome: gcv1.Outcome_OUTCOME_STAYS, Count: 1}}}, summary, protocmp.Transform()))
	names, _ = preview(gcv1.PropagationPolicy_PROPAGATION_POLICY_ORPHAN)
	require.Equal(t, []string{"root OUTCOME_GOES", "a OUTCOME_STAYS", "b OUTCOME_STAYS"}, names)
}

func TestGetGraph(t *testing.T) {
	w := serve(t)
	w.graph.Observe(made("root"))
	w.graph.Observe(made("d", "root"))
	got, err := w.client().GetGraph(t.Context(), &gcv1.GetGraphRequest{Object: byUID("d"), Dot: true})
	require.NoError(t, err)
	require.Contains(t, got.GetDot(), `"root" -> "d"`)
	got.Dot = ""
	require.Empty(t, cmp.Diff(&gcv1.GetGraphResponse{
		Vertices:   []*gcv1.Vertex{{Object: wire("d"), State: gcv1.State_STATE_OWNED}, {Object: wire("root"), State: gcv1.State_STATE_FREE, Distance: 1}},
		References: []*gcv1.Reference{{Dependent: "d", Owner: "root", Standing: gcv1.Standing_STANDING_SOLID, Block: true}},
	}, got, protocmp.Transform()))
}

// receiveGraph returns all vertices and references of a stream, and its number of messages.
func receiveGraph(t *testing.T, client gcv1.GarbageCollectorServiceClient, namespace string) (out *gcv1.GetGraphResponse, messages int) {
	t.Helper()
	stream, err := client.StreamGraph(t.Context(), &gcv1.StreamGraphRequest{Namespace: namespace})
	require.NoError(t, err)
	out = &gcv1.GetGraphResponse{}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out, messages
		}
		require.NoError(t, err)
		require.LessOrEqual(t, len(part.GetVertices()), 500)
		messages++
		out.Vertices = append(out.Vertices, part.GetVertices()...)
		out.References = append(out.References, part.GetReferences()...)
	}
}

func TestStreamGraph(t *testing.T) {
	w := serve(t)
	client := w.client()
	_, messages := receiveGraph(t, client, "")
	require.Zero(t, messages, "an empty graph")
	w.graph.Observe(made("root"))
	for i := range 1200 {
		w.graph.Observe(made(fmt.Sprintf("d%04d", i), "root"))
	}
	var all *gcv1.GetGraphResponse
	all, messages = receiveGraph(t, client, "")
	require.Equal(t, 3, messages)
	require.Len(t, all.GetVertices(), 1201)
	require.Len(t, all.GetReferences(), 1200)
	require.Empty(t, cmp.Diff(&gcv1.Vertex{Object: wire("d0000"), State: gcv1.State_STATE_OWNED}, all.GetVertices()[0], protocmp.Transform()))
	require.Empty(t, cmp.Diff(&gcv1.Reference{Dependent: "d1199", Owner: "root", Standing: gcv1.Standing_STANDING_SOLID, Block: true},
		all.GetReferences()[1199], protocmp.Transform()))
	seen := map[string]bool{}
	for _, v := range all.GetVertices() {
		require.False(t, seen[v.GetObject().GetUid()], "%s was sent twice", v.GetObject().GetUid())
		seen[v.GetObject().GetUid()] = true
	}
	_, messages = receiveGraph(t, client, "elsewhere")
	require.Zero(t, messages)
}

// TestStreamGraphSkipsWhatIsDeletedMeanwhile: the graph changes between two messages.
func TestStreamGraphSkipsWhatIsDeletedMeanwhile(t *testing.T) {
	w := serve(t)
	for i := range 1001 {
		w.graph.Observe(made(fmt.Sprintf("d%04d", i)))
	}
	w.queried = func(n int) {
		if n == 2 { // the list of UIDs and the first message are out
			w.graph.Remove(made("d0700"))
			w.graph.Remove(made("d1000"))
		}
	}
	all, messages := receiveGraph(t, w.client(), "")
	require.Equal(t, 2, messages, "a message without objects is not sent")
	require.Len(t, all.GetVertices(), 999)
}

func TestGetStatus(t *testing.T) {
	w := serve(t)
	w.enforcing, w.failing = true, map[string]string{"secrets": "forbidden", "apples.g": "away"}
	w.graph.Observe(made("d", "root"))
	client := w.client()
	got, err := client.GetStatus(t.Context(), &gcv1.GetStatusRequest{})
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(&gcv1.GetStatusResponse{Enforcing: true, Objects: 1, VirtualOwners: 1, References: 1,
		Failing: []*gcv1.FailingResource{{Resource: "apples.g", Error: "away"}, {Resource: "secrets", Error: "forbidden"}}}, got, protocmp.Transform()))
	w.tripped = errors.New("too many")
	got, err = client.GetStatus(t.Context(), &gcv1.GetStatusRequest{})
	require.NoError(t, err)
	require.Equal(t, "too many", got.GetStopped())
	require.False(t, got.GetEnforcing())
}

func TestWatchDeletions(t *testing.T) {
	w := serve(t)
	stream, err := w.client().WatchDeletions(t.Context(), &gcv1.WatchDeletionsRequest{Namespace: "ns"})
	require.NoError(t, err)
	_, err = stream.Header()
	require.NoError(t, err)
	elsewhere := made("x")
	elsewhere.Namespace = "elsewhere"
	w.feed.Publish(feed.Deletion{Object: elsewhere})
	when := time.Unix(1_700_000_000, 0)
	w.feed.Publish(feed.Deletion{Object: made("d"), Policy: graph.Foreground, Cause: string(graph.OwnersWait), Time: when})
	got, err := stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "d", got.GetObject().GetUid())
	require.Equal(t, gcv1.Cause_CAUSE_OWNERS_WAIT, got.GetCause())
	require.Equal(t, gcv1.PropagationPolicy_PROPAGATION_POLICY_FOREGROUND, got.GetPolicy())
	require.True(t, when.Equal(got.GetTime().AsTime()))
	for _, reason := range plan.Reasons() {
		w.feed.Publish(feed.Deletion{Object: made("p"), Cause: "pod-" + string(reason)})
		got, err := stream.Recv()
		require.NoError(t, err)
		require.NotZero(t, got.GetCause(), reason)
	}
	close(w.closing)
	_, err = stream.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err))
}

func TestErrors(t *testing.T) {
	w := serve(t)
	client := w.client()
	ctx := t.Context()
	for name, test := range map[string]struct {
		call func(gcv1.GarbageCollectorServiceClient) error
		want codes.Code
	}{
		"no object": {func(c gcv1.GarbageCollectorServiceClient) error {
			_, err := c.ExplainObject(ctx, &gcv1.ExplainObjectRequest{Object: byUID("absent")})
			return err
		}, codes.NotFound},
		"no object there": {func(c gcv1.GarbageCollectorServiceClient) error {
			_, err := c.GetGraph(ctx, &gcv1.GetGraphRequest{Object: byPlace("absent")})
			return err
		}, codes.NotFound},
		"nothing to preview": {func(c gcv1.GarbageCollectorServiceClient) error {
			stream, err := c.PreviewDelete(ctx, &gcv1.PreviewDeleteRequest{Object: byUID("absent")})
			require.NoError(t, err)
			_, err = stream.Recv()
			return err
		}, codes.NotFound},
		"no selector": {func(c gcv1.GarbageCollectorServiceClient) error {
			_, err := c.ExplainObject(ctx, &gcv1.ExplainObjectRequest{Object: &gcv1.Selector{}})
			return err
		}, codes.InvalidArgument},
		"too deep": {func(c gcv1.GarbageCollectorServiceClient) error {
			_, err := c.GetGraph(ctx, &gcv1.GetGraphRequest{Object: byUID("x"), Depth: 101})
			return err
		}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, test.want, status.Code(test.call(client))) })
	}
	_, err := w.as(w.ca.TLS(t, rpc.RoleAgent)).GetStatus(ctx, &gcv1.GetStatusRequest{})
	require.Equal(t, codes.PermissionDenied, status.Code(err))
}

func TestRules(t *testing.T) {
	users.CheckRules(t, gcrpc.Rules(), nil, gcv1.File_fastsandbox_gc_v1_gc_proto.Services().ByName("GarbageCollectorService"))
}
