package fastpath

import (
	"context"

	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
)

// CreateSandbox implements sandboxv1.SandboxServiceServer.
func (s *Server) CreateSandbox(ctx context.Context, req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	start := s.config.Clock.Now()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.config.CreateTimeout)
		defer cancel()
	}
	req, err := s.withPool(req)
	if err != nil {
		return nil, err
	}
	plan, err := admission.Create(req, s.config.Mode)
	if err != nil {
		s.config.Metrics.created(sandboxv1.ConsistencyMode_CONSISTENCY_MODE_UNSPECIFIED, err, 0)
		return nil, err
	}
	resp, err := s.creator.Create(ctx, plan)
	s.config.Metrics.created(plan.Mode, err, s.config.Clock.Since(start))
	return resp, err
}

// withPool returns the request with the namespace's default pool if it names none.
func (s *Server) withPool(req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxRequest, error) {
	pool, err := s.config.Pools.Resolve(req.GetNamespace(), req.GetSpec().GetPool())
	if err != nil || pool == req.GetSpec().GetPool() {
		return req, err
	}
	req = proto.CloneOf(req)
	req.Spec.Pool = pool
	return req, nil
}
