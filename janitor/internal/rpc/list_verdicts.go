package rpc

import (
	"context"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
)

// ListVerdicts implements the service.
func (s *Service) ListVerdicts(ctx context.Context, req *janitorv1.ListVerdictsRequest) (*janitorv1.ListVerdictsResponse, error) {
	found, err := s.findings(ctx, selection{req.GetActions(), req.GetReasons()})
	if err != nil {
		return nil, err
	}
	out := &janitorv1.ListVerdictsResponse{Verdicts: make([]*janitorv1.Verdict, 0, len(found))}
	for i := range found {
		out.Verdicts = append(out.Verdicts, s.message(&found[i]))
	}
	return out, nil
}
