// Package rpc implements gc.v1.GarbageCollectorService. It queries the graph of owners and translates the answers. It changes
// nothing. All methods may be called concurrently.
package rpc

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/feed"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// Defaults of requests that do not set a limit.
const (
	defaultBlockers = 20
	defaultDepth    = 2
	defaultObjects  = 200
)

// partSize is the maximum number of objects in a message of StreamGraph: some 200 KiB, far below gRPC's limit of 4 MiB.
const partSize = 500

// Collector provides the graph of owners.
type Collector interface {
	// Query calls ask with the graph. ask must not keep it.
	Query(ask func(*graph.Graph))
	// Failing returns the resources that cannot be listed or watched, with the error.
	Failing() map[string]string
}

// Guard decides whether the collector may delete.
type Guard interface {
	// Enforcing reports whether this process deletes now.
	Enforcing() bool
	// Tripped returns why deletions have stopped, or nil.
	Tripped() error
}

// Config is what a Server needs. All fields are required.
type Config struct {
	Collector Collector
	Guard     Guard
	Feed      *feed.Feed
	// Closing ends watches. It is closed when the process shuts down.
	Closing <-chan struct{}
}

// Server implements the service.
type Server struct {
	gcv1.UnimplementedGarbageCollectorServiceServer
	Config
}

// New returns a server.
func New(cfg Config) *Server { return &Server{Config: cfg} }

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { gcv1.RegisterGarbageCollectorServiceServer(r, s) }

// Rules returns what a user needs for each method: rights on ownergraphs.fast-sandbox.io, which are not objects. Who may read the
// graph of a namespace sees the kind, name and uid of each of its objects and of their owners. An object that a request names by its
// uid may be in any namespace.
func Rules() map[string]rpc.Rule {
	rule := func(verb, field string) rpc.Rule {
		return rpc.Rule{Access: auth.Access{Verb: verb, Group: v1alpha1.Group, Resource: "ownergraphs"}, Namespace: field}
	}
	return map[string]rpc.Rule{
		gcv1.GarbageCollectorService_ExplainObject_FullMethodName:  rule("get", "object.place.namespace"),
		gcv1.GarbageCollectorService_PreviewDelete_FullMethodName:  rule("get", "object.place.namespace"),
		gcv1.GarbageCollectorService_GetGraph_FullMethodName:       rule("get", "object.place.namespace"),
		gcv1.GarbageCollectorService_StreamGraph_FullMethodName:    rule("list", "namespace"),
		gcv1.GarbageCollectorService_WatchDeletions_FullMethodName: rule("watch", "namespace"),
		gcv1.GarbageCollectorService_GetStatus_FullMethodName:      rule("get", ""),
	}
}

// find returns the UID of the selected object.
func find(g *graph.Graph, s *gcv1.Selector) (string, bool) {
	if p := s.GetPlace(); p != nil {
		return g.Find(graph.Kind{Group: p.GetKind().GetGroup(), Kind: p.GetKind().GetKind()}, p.GetNamespace(), p.GetName())
	}
	return s.GetUid(), true
}

// about queries the graph about one object. ask reports whether the object exists.
func (s *Server) about(which *gcv1.Selector, ask func(g *graph.Graph, uid string) bool) error {
	found := false
	s.Collector.Query(func(g *graph.Graph) {
		if uid, ok := find(g, which); ok {
			found = ask(g, uid)
		}
	})
	if found {
		return nil
	}
	return notObserved(which)
}

// ExplainObject implements the service.
func (s *Server) ExplainObject(_ context.Context, req *gcv1.ExplainObjectRequest) (*gcv1.ExplainObjectResponse, error) {
	limit := int(req.GetMaxBlockers())
	if limit == 0 {
		limit = defaultBlockers
	}
	var x graph.Explanation
	if err := s.about(req.GetObject(), func(g *graph.Graph, uid string) (ok bool) {
		x, ok = g.Explain(uid, limit)
		return ok
	}); err != nil {
		return nil, err
	}
	return explained(x), nil
}

// GetGraph implements the service.
func (s *Server) GetGraph(_ context.Context, req *gcv1.GetGraphRequest) (*gcv1.GetGraphResponse, error) {
	depth, limit := int(req.GetDepth()), int(req.GetMaxObjects())
	if depth == 0 {
		depth = defaultDepth
	}
	if limit == 0 {
		limit = defaultObjects
	}
	var near graph.Neighborhood
	if err := s.about(req.GetObject(), func(g *graph.Graph, uid string) (ok bool) {
		near, ok = g.Neighbors(uid, depth, limit)
		return ok
	}); err != nil {
		return nil, err
	}
	out := &gcv1.GetGraphResponse{Truncated: near.Truncated}
	out.Vertices, out.References = vertices(near.Vertices), references(near.References)
	if req.GetDot() {
		out.Dot = near.Dot()
	}
	return out, nil
}

// GetStatus implements the service.
func (s *Server) GetStatus(context.Context, *gcv1.GetStatusRequest) (*gcv1.GetStatusResponse, error) {
	var size graph.Size
	s.Collector.Query(func(g *graph.Graph) { size = g.Size() })
	out := &gcv1.GetStatusResponse{Enforcing: s.Guard.Enforcing(), Objects: int64(size.Objects), VirtualOwners: int64(size.Virtual), References: int64(size.References)}
	if err := s.Guard.Tripped(); err != nil {
		out.Stopped, out.Enforcing = err.Error(), false
	}
	failing := s.Collector.Failing()
	for _, name := range slices.Sorted(maps.Keys(failing)) {
		out.Failing = append(out.Failing, &gcv1.FailingResource{Resource: name, Error: failing[name]})
	}
	return out, nil
}

// notObserved returns the error for an object that is not in the graph.
func notObserved(which *gcv1.Selector) error {
	if p := which.GetPlace(); p != nil {
		return errNotObserved("%s %s/%s", p.GetKind().GetKind(), p.GetNamespace(), p.GetName())
	}
	return errNotObserved("uid %s", which.GetUid())
}
