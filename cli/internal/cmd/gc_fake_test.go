package cmd_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// collector is a scriptable garbage collector.
type collector struct {
	gcv1.UnimplementedGarbageCollectorServiceServer

	explained *gcv1.ExplainObjectResponse
	previewed []*gcv1.PreviewDeleteResponse
	graph     *gcv1.GetGraphResponse
	parts     []*gcv1.StreamGraphResponse
	status    *gcv1.GetStatusResponse
	deletions chan *gcv1.WatchDeletionsResponse // a watch ends when it is closed
	err       error                             // of each call, after its messages
	hangs     chan struct{}                     // a preview waits until it is closed; nil: it does not

	mu       sync.Mutex
	explains []*gcv1.ExplainObjectRequest
	previews []*gcv1.PreviewDeleteRequest
	graphs   []*gcv1.GetGraphRequest
	streams  []*gcv1.StreamGraphRequest
	watches  []*gcv1.WatchDeletionsRequest
}

func (c *collector) ExplainObject(_ context.Context, in *gcv1.ExplainObjectRequest) (*gcv1.ExplainObjectResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.explains = append(c.explains, in)
	return c.explained, c.err
}

func (c *collector) PreviewDelete(in *gcv1.PreviewDeleteRequest, stream gcv1.GarbageCollectorService_PreviewDeleteServer) error {
	c.mu.Lock()
	c.previews = append(c.previews, in)
	c.mu.Unlock()
	if c.hangs != nil {
		<-c.hangs
	}
	for _, part := range c.previewed {
		if err := stream.Send(part); err != nil {
			return err
		}
	}
	return c.err
}

func (c *collector) GetGraph(_ context.Context, in *gcv1.GetGraphRequest) (*gcv1.GetGraphResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.graphs = append(c.graphs, in)
	return c.graph, c.err
}

func (c *collector) StreamGraph(in *gcv1.StreamGraphRequest, stream gcv1.GarbageCollectorService_StreamGraphServer) error {
	c.mu.Lock()
	c.streams = append(c.streams, in)
	c.mu.Unlock()
	for _, part := range c.parts {
		if err := stream.Send(part); err != nil {
			return err
		}
	}
	return c.err
}

func (c *collector) GetStatus(context.Context, *gcv1.GetStatusRequest) (*gcv1.GetStatusResponse, error) {
	return c.status, c.err
}

func (c *collector) WatchDeletions(in *gcv1.WatchDeletionsRequest, stream gcv1.GarbageCollectorService_WatchDeletionsServer) error {
	c.mu.Lock()
	c.watches = append(c.watches, in)
	c.mu.Unlock()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		select {
		case d, ok := <-c.deletions:
			if !ok {
				return c.err
			}
			if err := stream.Send(d); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

// collectorPods is a fake cluster in which garbage collectors run, in the order of their names.
type collectorPods struct {
	names     []string
	addresses map[string]string
	unready   map[string]bool
	refuse    map[string]error // errors of connections
	err       error            // of the calls of the API server
	options   tunnel.Options

	mu        sync.Mutex
	selectors []tunnel.Selector
	dials     []string
	listed    []string
}

func (n *collectorPods) Pods(_ context.Context, s tunnel.Selector) (out []tunnel.Pod, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.selectors = append(n.selectors, s)
	for _, name := range n.names {
		out = append(out, tunnel.Pod{Namespace: s.Namespace, Name: name, Ready: !n.unready[name], Ports: map[string]int32{"grpc": 9090}})
	}
	return out, n.err
}

func (n *collectorPods) Sandbox(context.Context, string, string) (*v1alpha1.Sandbox, error) {
	return nil, errNotAsked
}

func (n *collectorPods) Dial(ctx context.Context, p tunnel.Pod, port int32) (net.Conn, error) {
	n.mu.Lock()
	n.dials = append(n.dials, p.Name)
	n.mu.Unlock()
	if err := n.refuse[p.Name]; err != nil {
		return nil, err
	}
	if port != 9090 {
		return nil, fmt.Errorf("connection refused: port %d", port)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", n.addresses[p.Name])
}

func (n *collectorPods) Kinds(context.Context) (kinds.List, error) {
	return kinds.List{
		{Version: "v1", Resource: "pods", Kind: "Pod", Singular: "pod", Short: []string{"po"}, Namespaced: true, Listed: true},
		{Version: "v1", Resource: "nodes", Kind: "Node", Singular: "node", Short: []string{"no"}, Listed: true},
		{Group: "apps", Version: "v1", Resource: "deployments", Kind: "Deployment", Singular: "deployment", Short: []string{"deploy"}, Namespaced: true, Listed: true},
		{Version: "v1", Resource: "bindings", Kind: "Binding", Namespaced: true},
	}, n.err
}

func (n *collectorPods) Names(_ context.Context, k kinds.Kind, namespace string) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listed = append(n.listed, namespace+" "+k.Resource)
	return []string{"a", "b"}, n.err
}

// withCollectors returns a harness whose cluster has these garbage collectors, by their Pods.
func withCollectors(t *testing.T, byPod map[string]*collector, names ...string) (*harness, *collectorPods) {
	t.Helper()
	b := start(t, &fake{})
	n := &collectorPods{names: names, addresses: map[string]string{}, unready: map[string]bool{}, refuse: map[string]error{}}
	for name, c := range byPod {
		n.addresses[name] = serveCollector(t, b, c)
	}
	b.cluster = func(o tunnel.Options) (cmd.Cluster, error) {
		n.options = o
		return n, nil
	}
	return b, n
}

func serveCollector(t *testing.T, b *harness, c *collector) string {
	t.Helper()
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), logr.Discard()))
	s, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: b.authority.TLS(t, rpc.RoleGC), DrainTimeout: 10 * time.Millisecond,
		Users: users.Open(&gcv1.GarbageCollectorService_ServiceDesc),
	})
	require.NoError(t, err)
	gcv1.RegisterGarbageCollectorServiceServer(s, c)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return s.Addr().String()
}

// thing returns an object with the UID u-NAME. kind may have a group.
func thing(kind, name string) *gcv1.Object {
	k, group, _ := strings.Cut(kind, ".")
	return &gcv1.Object{Place: &gcv1.Place{Kind: &gcv1.Kind{Group: group, Kind: k}, Namespace: "default", Name: name}, Uid: "u-" + name}
}

func ownerOf(kind, name string, standing gcv1.Standing, block bool) *gcv1.Owner {
	o := thing(kind, name)
	return &gcv1.Owner{Place: o.GetPlace(), Uid: o.GetUid(), Version: "v1", Standing: standing, Block: block, Controller: block}
}
