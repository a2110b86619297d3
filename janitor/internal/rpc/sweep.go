package rpc

import (
	"slices"

	"google.golang.org/grpc"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Sweep implements the service.
func (s *Service) Sweep(req *janitorv1.SweepRequest, stream grpc.ServerStreamingServer[janitorv1.SweepResponse]) error {
	found := map[string]bool{}
	err := s.config.Core.Sweep(stream.Context(), order(req), func(r Result) error {
		m := &janitorv1.SweepResponse{Outcome: outcome(r.Outcome), Verdict: s.message(&r.Finding), FreedBytes: r.FreedBytes}
		if r.Err != nil {
			m.Message = r.Err.Error()
		}
		found[m.GetVerdict().GetContainerId()] = true
		return stream.Send(m)
	})
	if err != nil {
		return err
	}
	for _, id := range req.GetContainerIds() {
		if found[id] {
			continue
		}
		if err := stream.Send(&janitorv1.SweepResponse{
			Outcome: janitorv1.SweepResponse_OUTCOME_NOT_FOUND, Verdict: &janitorv1.Verdict{NodeName: s.config.NodeName, ContainerId: id},
		}); err != nil {
			return err
		}
	}
	return nil
}

func order(req *janitorv1.SweepRequest) Order {
	o := Order{DryRun: req.GetDryRun(), IDs: map[string]bool{}, Reasons: map[verdict.Reason]bool{}}
	for _, id := range req.GetContainerIds() {
		o.IDs[id] = true
	}
	for _, r := range verdict.Reasons() {
		if slices.Contains(req.GetReasons(), reason(r)) {
			o.Reasons[r] = true
		}
	}
	return o
}
