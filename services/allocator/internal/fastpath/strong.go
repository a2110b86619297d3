package fastpath

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// createStrong writes the custom resource first and waits until the controller has had the sandbox created. After an error
// the custom resource is deleted, if need be in the background.
func (s *Server) createStrong(ctx context.Context, p *plan, key store.Key, record *agentv1.SandboxRecord) (*sandboxv1.CreateSandboxResponse, error) {
	began := s.config.Clock.Now()
	resource, err := s.createFirst(ctx, key, resourceOf(record))
	if err != nil {
		return nil, err
	}
	sb, err := s.awaitRunning(ctx, key, resource)
	if err != nil {
		s.abandon(key, resource)
		return nil, err
	}
	var timings stages
	timings.add("agent", s.config.Clock.Since(began))
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: sb, Endpoints: sb.GetStatus().GetEndpoints(), ConsistencyMode: p.mode, Timings: timings,
		StartPath: sb.GetStatus().GetStartPath(),
	}, nil
}

// createFirst creates a custom resource under its key's lock and repeats that while the API server does not answer.
func (s *Server) createFirst(ctx context.Context, key store.Key, want *v1alpha1.Sandbox) (*v1alpha1.Sandbox, error) {
	unlock, err := s.lockName(ctx, key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	callCtx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 50*time.Millisecond, 2*time.Second
	for sent := false; ; sent = true {
		created := want.DeepCopy()
		err := s.config.Resources.Create(callCtx, created)
		switch {
		case err == nil:
			s.store.SetResource(created)
			return created, nil
		case apierrors.IsAlreadyExists(err):
			there, getErr := s.ours(callCtx, key, want)
			if there != nil && sent { // an earlier attempt whose answer was lost
				return there, nil
			}
			if getErr == nil {
				return nil, fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "sandbox %s exists", key).With("sandbox", key.String())
			}
			err = getErr
		case apierrors.IsInvalid(err):
			return nil, invalid(err, "spec")
		case apierrors.IsForbidden(err):
			return nil, fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the API server forbids sandbox %s: %v", key, err)
		}
		timer := s.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-callCtx.Done():
			timer.Stop()
			s.abandon(key, want)
			if ctx.Err() != nil {
				return nil, errContext(ctx, "writing the sandbox", err)
			}
			return nil, errAPI(err)
		case <-timer.C():
		}
	}
}

// awaitRunning waits until the process of a sandbox has started.
func (s *Server) awaitRunning(ctx context.Context, key store.Key, resource *v1alpha1.Sandbox) (*sandboxv1.Sandbox, error) {
	uid := resource.EffectiveUID()
	initial, watch := s.store.Watch(store.Filter{Namespace: key.Namespace, Name: key.Name})
	defer watch.Close()
	for _, sb := range initial {
		if done, err := started(uid, sb); done || err != nil {
			return sb, err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil, errContext(ctx, "waiting for the controller to have the sandbox created", nil)
		case event, ok := <-watch.Events():
			if !ok {
				return nil, fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too many changes at once")
			}
			sb := event.GetSandbox()
			if event.GetType() == sandboxv1.WatchSandboxesResponse_TYPE_DELETED && sb.GetUid() == uid {
				return nil, errTerminating(key)
			}
			if done, err := started(uid, sb); done || err != nil {
				return sb, err
			}
		}
	}
}

// started tells whether the process of the sandbox has started, or why it never will.
func started(uid string, sb *sandboxv1.Sandbox) (bool, error) {
	st := sb.GetStatus()
	switch {
	case sb.GetUid() != uid:
		return false, nil
	case sb.GetDeleteTime() != nil:
		return false, errTerminating(store.Key{Namespace: sb.GetNamespace(), Name: sb.GetName()})
	case st.GetStartTime() != nil, st.GetPhase() == sandboxv1.Phase_PHASE_RUNNING:
		return true, nil
	case st.GetPhase() == sandboxv1.Phase_PHASE_FAILED:
		return false, failed(st)
	}
	return false, nil
}

// failed is the error of a sandbox that could not be created: the controller keeps the agent's reason in the status.
func failed(st *sandboxv1.SandboxStatus) error {
	reason, class := fault.Reason(st.GetReason()), error(nil)
	switch reason {
	case fault.ImageNotFound:
		class = errdefs.ErrNotFound
	case fault.ImagePullFailed, fault.AgentUnavailable, fault.RuntimeUnavailable:
		class = errdefs.ErrUnavailable
	case fault.NoCapacity, fault.PortConflict:
		class = errdefs.ErrResourceExhausted
	case fault.CommandNotFound, fault.CommandNotExecutable, fault.UserNotFound, fault.WorkingDirInvalid:
		class = errdefs.ErrFailedPrecondition
	case fault.InvalidField:
		class = errdefs.ErrInvalidArgument
	default:
		reason, class = fault.PhaseConflict, errdefs.ErrFailedPrecondition
	}
	return fault.New(class, reason, "the sandbox could not be created: %s: %s", st.GetReason(), st.GetMessage())
}

func errTerminating(key store.Key) error {
	return fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "sandbox %s is being deleted", key).With("sandbox", key.String())
}
