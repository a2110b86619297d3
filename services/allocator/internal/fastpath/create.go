package fastpath

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// CreateSandbox implements sandboxv1.SandboxServiceServer.
func (s *Server) CreateSandbox(ctx context.Context, req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	start := s.config.Clock.Now()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.config.CreateTimeout)
		defer cancel()
	}
	resp, mode, err := s.create(ctx, req)
	s.config.Metrics.created(mode, err, s.config.Clock.Since(start))
	return resp, err
}

func (s *Server) create(ctx context.Context, req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, sandboxv1.ConsistencyMode, error) {
	p, err := s.validate(req)
	if err != nil {
		return nil, 0, err
	}
	if req.GetRequestId() == "" {
		resp, err := s.execute(ctx, p)
		return resp, p.mode, err
	}
	resp, err := s.once(ctx, p)
	return resp, p.mode, err
}

// execute carries out a create that was found good and new. What the passing of time changes is looked at here and not
// before: a repetition is answered with its sandbox also when that has expired, or its pool is gone.
func (s *Server) execute(ctx context.Context, p *plan) (*sandboxv1.CreateSandboxResponse, error) {
	if err := s.validateExpiry(p.request.GetSpec()); err != nil {
		return nil, err
	}
	pool, err := s.findPool(ctx, p.request.GetNamespace(), p.request.GetSpec().GetPool())
	if err != nil {
		return nil, err
	}
	uid := uuid.NewString()
	key := store.Key{Namespace: p.request.GetNamespace(), Name: p.request.GetName()}
	if key.Name == "" {
		key.Name = "sbx-" + uid[:8] + uid[9:13]
	}
	record := &agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: uid, Attempt: 1},
		Namespace: key.Namespace, Name: key.Name, Labels: p.request.GetLabels(), Spec: p.request.GetSpec(),
		Limits:    convert.Effective(p.request.GetSpec().GetResources(), convert.LimitsToProto(pool.Spec.SandboxResources)),
		RequestId: p.request.GetRequestId(), Traceparent: obs.Traceparent(ctx),
		CreateTime: timestamppb.New(s.config.Clock.Now()), ConsistencyMode: p.mode,
	}
	resp, err := s.carryOut(ctx, p, key, record)
	var f *fault.Error
	if fault.IsUnsettled(err) && errors.As(err, &f) {
		err = f.With("sandbox", key.String()) // the server may have chosen the name
	}
	return resp, err
}

func (s *Server) carryOut(ctx context.Context, p *plan, key store.Key, record *agentv1.SandboxRecord) (*sandboxv1.CreateSandboxResponse, error) {
	if p.mode == sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG {
		return s.createStrong(ctx, p, key, record)
	}
	return s.createFast(ctx, p, key, record)
}

func (s *Server) createFast(ctx context.Context, p *plan, key store.Key, record *agentv1.SandboxRecord) (*sandboxv1.CreateSandboxResponse, error) {
	if err := s.writer.Admit(); err != nil {
		return nil, err
	}
	acknowledged := false
	defer func() {
		if !acknowledged {
			s.writer.Abandon()
		}
	}()
	unlock, err := s.lockName(ctx, key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	uid := record.GetFence().GetSandboxUid()
	s.setCreating(uid, true)
	defer s.setCreating(uid, false)
	placed, timings, err := s.place(ctx, p, record)
	if err != nil {
		return nil, err
	}
	acknowledged = true
	resp := responseOf(s.store.SetRecord(placed))
	s.persist(placed, true)
	resp.ConsistencyMode, resp.Timings = p.mode, timings
	return resp, nil
}

func (s *Server) setCreating(uid string, creating bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if creating {
		s.creating[uid] = struct{}{}
	} else {
		delete(s.creating, uid)
	}
}

// busy tells whether fast creates run.
func (s *Server) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.creating) > 0
}
