package fastpath

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// createStrong writes the custom resource first and waits until the controller has had the sandbox created. After an error
// the custom resource is deleted, in the background.
func (s *Server) createStrong(ctx context.Context, p *plan, key store.Key, record *agentv1.SandboxRecord) (*sandboxv1.CreateSandboxResponse, error) {
	took := newLaps(s.config.Clock)
	resource, own, err := s.createFirst(ctx, key, resourceOf(record))
	if err != nil {
		return nil, err
	}
	took.lap("record")
	return s.seeThrough(ctx, p, key, attempt{resource, own}, took)
}

// attempt is a strong create whose custom resource is written. own tells that this call wrote it; if not, a former leader
// did, which can have answered only once the custom resource told of the start.
type attempt struct {
	resource *v1alpha1.Sandbox
	own      bool
}

// resume takes a strong create up that a former leader began, and whose caller asks again.
func (s *Server) resume(ctx context.Context, p *plan, resource *v1alpha1.Sandbox) (*sandboxv1.CreateSandboxResponse, error) {
	key := store.Key{Namespace: resource.Namespace, Name: resource.Name}
	resp, err := s.seeThrough(ctx, p, key, attempt{resource: resource}, newLaps(s.config.Clock))
	if err != nil {
		return nil, err
	}
	return replay(resp), nil
}

// takeUp marks a strong create that a former leader began as taken up. That leader may still be about to undo it: of the two
// marks, this one and that of an undoing, the first counts, for each is written over what was read.
func (s *Server) takeUp(ctx context.Context, key store.Key, resource *v1alpha1.Sandbox) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	for {
		there := &v1alpha1.Sandbox{}
		err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, there)
		switch {
		case apierrors.IsNotFound(err):
			return nil, errUndoing()
		case err != nil:
			return nil, errAPI(err)
		case !sameMoment(there, resource), there.DeletionTimestamp != nil, s.givenUp(there):
			return nil, errUndoing()
		case takenUp(there):
			return there, nil
		}
		there.Annotations[v1alpha1.AnnotationResumed] = "true"
		if err = s.config.Resources.Update(ctx, there); err == nil {
			s.store.SetResource(there.DeepCopy())
			return there, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return nil, errAPI(err)
		}
	}
}

// seeThrough waits for a strong create's start, and undoes the create if that does not come.
func (s *Server) seeThrough(ctx context.Context, p *plan, key store.Key, a attempt, took *laps) (*sandboxv1.CreateSandboxResponse, error) {
	if !a.own && !takenUp(a.resource) {
		taken, err := s.takeUp(ctx, key, a.resource)
		if err != nil {
			return nil, fault.Unsettled(err)
		}
		a.resource = taken
	}
	sb, err := s.awaitRunning(ctx, key, a.resource, took)
	if err != nil {
		return nil, s.abandon(key, a, err)
	}
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: sb, Endpoints: sb.GetStatus().GetEndpoints(), ConsistencyMode: p.mode, Timings: took.stages,
		StartPath: sb.GetStatus().GetStartPath(),
	}, nil
}

// createFirst creates a custom resource under its key's lock and repeats that while the API server does not answer. own is
// false for one that a former leader created for the same request.
func (s *Server) createFirst(ctx context.Context, key store.Key, want *v1alpha1.Sandbox) (there *v1alpha1.Sandbox, own bool, err error) {
	unlock, err := s.lockName(ctx, key)
	if err != nil {
		return nil, false, err
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
			return created, true, nil
		case apierrors.IsAlreadyExists(err):
			there, own, getErr := s.meet(callCtx, key, want, sent)
			if there != nil || getErr == nil || fault.ReasonOf(getErr) != "" {
				return there, own, getErr
			}
			err = getErr
		case apierrors.IsInvalid(err):
			return nil, false, invalid(err, "spec")
		case apierrors.IsForbidden(err):
			return nil, false, fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the API server forbids sandbox %s: %v", key, err)
		}
		timer := s.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-callCtx.Done():
			timer.Stop()
			if ctx.Err() != nil {
				err = errContext(ctx, "writing the sandbox", err)
			} else {
				err = errAPI(err)
			}
			err = s.abandon(key, attempt{want, true}, err)
			return nil, false, fault.Unsettled(err) // a write that was sent may still land
		case <-timer.C():
		}
	}
}

// meet looks at who has the name that a custom resource was to be created under: an earlier attempt of this call whose
// answer was lost, if one was sent; the same request's, by a former leader of whom this process has not heard; or another.
func (s *Server) meet(ctx context.Context, key store.Key, want *v1alpha1.Sandbox, sent bool) (there *v1alpha1.Sandbox, own bool, err error) {
	there = &v1alpha1.Sandbox{}
	if err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, there); err != nil {
		return nil, false, err
	}
	switch {
	case sent && sameMoment(there, want):
		return there, true, nil
	case !sameRequest(there, want):
		return nil, false, errTaken(key, "exists")
	case there.DeletionTimestamp != nil || s.givenUp(there):
		return nil, false, errUndoing()
	}
	s.store.SetResource(there)
	return there, false, nil
}

// sameRequest tells whether two custom resources are of one request_id.
func sameRequest(a, b *v1alpha1.Sandbox) bool {
	id := a.Annotations[v1alpha1.AnnotationRequestID]
	return id != "" && id == b.Annotations[v1alpha1.AnnotationRequestID] &&
		a.Annotations[v1alpha1.AnnotationRequestDigest] == b.Annotations[v1alpha1.AnnotationRequestDigest]
}

// sameMoment tells whether two custom resources are of one call.
func sameMoment(a, b *v1alpha1.Sandbox) bool {
	return a.Annotations[v1alpha1.AnnotationCreateTime] == b.Annotations[v1alpha1.AnnotationCreateTime] &&
		a.Annotations[v1alpha1.AnnotationRequestID] == b.Annotations[v1alpha1.AnnotationRequestID] &&
		a.Annotations[v1alpha1.AnnotationRequestDigest] == b.Annotations[v1alpha1.AnnotationRequestDigest]
}

// awaitRunning waits until the custom resource tells that the process of a sandbox has started: whoever leads next then
// knows that the caller may have been told.
func (s *Server) awaitRunning(ctx context.Context, key store.Key, resource *v1alpha1.Sandbox, took *laps) (*sandboxv1.Sandbox, error) {
	uid := resource.EffectiveUID()
	started := func(sb *sandboxv1.Sandbox) (bool, error) {
		done, err := s.started(key, uid, sb)
		took.see(sb, uid, done)
		return done, err
	}
	initial, watch := s.store.Watch(store.Filter{Namespace: key.Namespace, Name: key.Name})
	defer watch.Close()
	for _, sb := range initial {
		if done, err := started(sb); done || err != nil {
			return sb, err
		}
	}
	// A change of the custom resource alone may change nothing of the view, and then nothing is told.
	ticker := s.config.Clock.NewTicker(recheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, errContext(ctx, "waiting for the controller to have the sandbox created", nil)
		case <-ticker.C():
			if item, ok := s.store.Get(key); ok {
				if done, err := started(item.Sandbox); done || err != nil {
					return item.Sandbox, err
				}
			}
		case event, ok := <-watch.Events():
			if !ok {
				return nil, fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too many changes at once")
			}
			sb := event.GetSandbox()
			if event.GetType() == sandboxv1.WatchSandboxesResponse_TYPE_DELETED && sb.GetUid() == uid {
				return nil, errTerminating(key)
			}
			if done, err := started(sb); done || err != nil {
				return sb, err
			}
		}
	}
}

// recheck is how often a strong create looks whether the custom resource has caught up with the agent's word.
const recheck = 100 * time.Millisecond

// started tells whether the process of the sandbox has started, and the custom resource says so, or why it never will.
func (s *Server) started(key store.Key, uid string, sb *sandboxv1.Sandbox) (bool, error) {
	st := sb.GetStatus()
	switch {
	case sb.GetUid() != uid:
		return false, nil
	case sb.GetDeleteTime() != nil:
		return false, errTerminating(store.Key{Namespace: sb.GetNamespace(), Name: sb.GetName()})
	case st.GetStartTime() != nil, st.GetPhase() == sandboxv1.Phase_PHASE_RUNNING:
		item, ok := s.store.Get(key)
		if ok && s.givenUp(item.Resource) { // it started in the moment in which it was given up
			return false, errUndoing()
		}
		return ok && item.Resource != nil && item.Resource.EffectiveUID() == uid && hasStarted(item.Resource), nil
	case st.GetPhase() == sandboxv1.Phase_PHASE_FAILED:
		return false, failed(st)
	case st.GetPhase() == sandboxv1.Phase_PHASE_EXPIRED:
		return false, fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %s expired before it started", key)
	}
	return false, nil
}

// toldOf tells whether a create's caller may have been told of its sandbox. A fast one's custom resource is written after
// that.
func toldOf(sb *v1alpha1.Sandbox) bool {
	return sb.Spec.ConsistencyMode != v1alpha1.ConsistencyModeStrong || hasStarted(sb)
}

// takenUp tells whether nobody undoes a strong create any more but who has taken it up. Nobody undoes a fast one by its custom
// resource.
func takenUp(sb *v1alpha1.Sandbox) bool {
	return sb.Spec.ConsistencyMode != v1alpha1.ConsistencyModeStrong || sb.Annotations[v1alpha1.AnnotationResumed] != ""
}

// hasStarted tells whether the custom resource says that the process has started, be it in an earlier attempt.
func hasStarted(sb *v1alpha1.Sandbox) bool {
	return sb.Status.StartTime != nil || sb.Status.Phase == v1alpha1.PhaseRunning || sb.Status.Attempt > 1
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
	case fault.CommandNotFound, fault.CommandNotExecutable, fault.UserNotFound, fault.WorkingDirInvalid, fault.ImageInvalid:
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
