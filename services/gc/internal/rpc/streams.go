package rpc

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// PreviewDelete implements the service.
func (s *Server) PreviewDelete(req *gcv1.PreviewDeleteRequest, stream grpc.ServerStreamingServer[gcv1.PreviewDeleteResponse]) error {
	policy := graph.Background
	for p, value := range policies {
		if value == req.GetPolicy() {
			policy = p
		}
	}
	var consequences []graph.Consequence
	if err := s.about(req.GetObject(), func(g *graph.Graph, uid string) (ok bool) {
		consequences, ok = g.Preview(uid, policy)
		return ok
	}); err != nil {
		return err
	}
	type key struct {
		outcome gcv1.Outcome
		kind    graph.Kind
	}
	counts := map[key]int32{}
	for _, c := range consequences {
		counts[key{outcomes[c.Outcome], c.Object.Kind}]++
		part := &gcv1.Consequence{Object: object(c.Object), Outcome: outcomes[c.Outcome], Depth: int32(c.Depth), Via: c.Via}
		if err := stream.Send(&gcv1.PreviewDeleteResponse{Part: &gcv1.PreviewDeleteResponse_Consequence{Consequence: part}}); err != nil {
			return err
		}
	}
	summary := &gcv1.PreviewSummary{}
	for k, n := range counts {
		summary.Counts = append(summary.Counts, &gcv1.PreviewCount{Kind: kind(k.kind), Outcome: k.outcome, Count: n})
	}
	slices.SortFunc(summary.Counts, func(a, b *gcv1.PreviewCount) int {
		return cmp.Or(cmp.Compare(a.GetOutcome(), b.GetOutcome()), cmp.Compare(a.GetKind().GetGroup(), b.GetKind().GetGroup()), cmp.Compare(a.GetKind().GetKind(), b.GetKind().GetKind()))
	})
	return stream.Send(&gcv1.PreviewDeleteResponse{Part: &gcv1.PreviewDeleteResponse_Summary{Summary: summary}})
}

// WatchDeletions implements the service.
func (s *Server) WatchDeletions(req *gcv1.WatchDeletionsRequest, stream grpc.ServerStreamingServer[gcv1.WatchDeletionsResponse]) error {
	items, stop := s.Feed.Listen()
	defer stop()
	// The header is sent once the feed is attached: from here on no deletion is missed.
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	missed := 0
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.Closing:
			return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the collector is shutting down")
		case i := <-items:
			missed += i.Missed
			if req.GetNamespace() != "" && i.Object.Namespace != req.GetNamespace() {
				continue
			}
			if err := stream.Send(&gcv1.WatchDeletionsResponse{Object: object(i.Object), Cause: causes[i.Cause], Policy: policies[i.Policy],
				Time: timestamppb.New(i.Time), Missed: int32(missed)}); err != nil {
				return err
			}
			missed = 0
		}
	}
}

// StreamGraph implements the service. The graph is locked for one message at a time, not for the whole stream.
func (s *Server) StreamGraph(req *gcv1.StreamGraphRequest, stream grpc.ServerStreamingServer[gcv1.StreamGraphResponse]) error {
	var uids []string
	s.Collector.Query(func(g *graph.Graph) { uids = g.UIDs(req.GetNamespace()) })
	for chunk := range slices.Chunk(uids, partSize) {
		var part graph.Part
		s.Collector.Query(func(g *graph.Graph) { part = g.Part(chunk) })
		if len(part.Vertices) == 0 {
			continue // all of these objects were deleted meanwhile
		}
		if err := stream.Send(&gcv1.StreamGraphResponse{Vertices: vertices(part.Vertices), References: references(part.References)}); err != nil {
			return err
		}
	}
	return nil
}

func errNotObserved(format string, args ...any) error {
	return fmt.Errorf("%s was not observed: %w", fmt.Sprintf(format, args...), errdefs.ErrNotFound)
}
