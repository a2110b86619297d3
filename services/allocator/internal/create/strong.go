package create

import (
	"context"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/recovery"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// recheckPeriod is how often a strong create checks whether the custom resource has caught up with the agent's report.
const recheckPeriod = 100 * time.Millisecond

// exceededQuota distinguishes a refusal by a ResourceQuota from others of the API server.
const exceededQuota = "exceeded quota: "

// resume sees a strong create through that a former leader began, and whose caller asks again.
func (c *Creator) resume(ctx context.Context, plan *admission.Plan, resource *v1alpha1.Sandbox) (*sandboxv1.CreateSandboxResponse, error) {
	name := store.Key{Namespace: resource.Namespace, Name: resource.Name}
	k := &call{plan: plan, name: name, timer: newStageTimer(c.config.Clock), attempt: recovery.Attempt{Resource: resource}}
	if err := c.awaitStart(ctx, k); err != nil {
		return nil, err
	}
	return replay(k.response), nil
}

// checkQuotas refuses a sandbox that exceeds a quota now, so that its caller need not wait for the deadline. What counts is checked
// again when the resource is written, by the API server, and when the controller has capacity reserved.
func (c *Creator) checkQuotas(_ context.Context, k *call) error {
	return c.config.Fleet.Admit(k.name.Namespace, k.record.GetLimits())
}

// writeResource creates the custom resource, and repeats that while the API server does not answer. The name is locked. A
// former leader may have created one for the same request: then that is the attempt.
func (c *Creator) writeResource(ctx context.Context, k *call) error {
	want := persistence.StrongResource(k.record)
	callCtx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	sent := false
	var last error
	err := backoff.Retry(callCtx, c.config.Clock, backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second}, func(callCtx context.Context) error {
		created := want.DeepCopy()
		last = c.config.API.Create(callCtx, created)
		switch {
		case last == nil:
			c.config.Store.SetResource(created)
			k.attempt = recovery.Attempt{Resource: created, Own: true}
			return nil
		case apierrors.IsAlreadyExists(last):
			last = c.adoptExisting(callCtx, k, want, sent)
			if fault.ReasonOf(last) != "" {
				return backoff.Permanent(last)
			}
		case apierrors.IsInvalid(last):
			return backoff.Permanent(apiserver.Invalid(last, "spec"))
		case apierrors.IsForbidden(last) && strings.Contains(last.Error(), exceededQuota):
			return backoff.Permanent(fault.Wrap(last, errdefs.ErrResourceExhausted, fault.QuotaExceeded, "the API server refuses sandbox %s: %v", k.name, last))
		case apierrors.IsForbidden(last):
			return backoff.Permanent(forbidden(k, last))
		}
		sent = true
		return last
	})
	switch {
	case err == nil:
		k.timer.end("record")
		return nil
	case fault.ReasonOf(err) != "":
		return err
	case ctx.Err() != nil:
		err = fault.FromContext(ctx, "writing the sandbox", last)
	default:
		err = apiserver.Unavailable(last)
	}
	// A write that was sent may still land.
	return fault.Unsettled(c.config.Recovery.Rollback(k.name, recovery.Attempt{Resource: want, Own: true}, err))
}

// adoptExisting takes the custom resource that has the name as the attempt, if it is this call's or this request's.
func (c *Creator) adoptExisting(ctx context.Context, k *call, want *v1alpha1.Sandbox, sent bool) error {
	there := &v1alpha1.Sandbox{}
	if err := c.config.API.Get(ctx, client.ObjectKey{Namespace: k.name.Namespace, Name: k.name.Name}, there); err != nil {
		return err
	}
	switch c.config.Recovery.OwnerOf(there, want, sent) {
	case recovery.ThisCall:
		k.attempt = recovery.Attempt{Resource: there, Own: true}
	case recovery.ThisRequest:
		c.config.Store.SetResource(there)
		k.attempt = recovery.Attempt{Resource: there}
	case recovery.RolledBack:
		return recovery.RollingBack()
	case recovery.Another:
		return nameTaken(k.name, "exists")
	}
	return nil
}

// awaitStart waits for a strong create's start, and rolls the create back if that does not come.
func (c *Creator) awaitStart(ctx context.Context, k *call) error {
	if !k.attempt.Own {
		resource, err := c.config.Recovery.Resume(ctx, k.name, k.attempt.Resource)
		if err != nil {
			return fault.Unsettled(err)
		}
		k.attempt.Resource = resource
	}
	sb, err := c.awaitRunning(ctx, k)
	if err != nil {
		return c.config.Recovery.Rollback(k.name, k.attempt, err)
	}
	k.response = &sandboxv1.CreateSandboxResponse{
		Sandbox: sb, Endpoints: sb.GetStatus().GetEndpoints(), ConsistencyMode: k.plan.Mode, Timings: k.timer.stages,
		StartPath: sb.GetStatus().GetStartPath(),
	}
	return nil
}

// awaitRunning waits until the custom resource says that the process of a sandbox has started: the next leader then knows
// that the caller may have been answered.
func (c *Creator) awaitRunning(ctx context.Context, k *call) (*sandboxv1.Sandbox, error) {
	uid := k.attempt.Resource.EffectiveUID()
	check := func(sb *sandboxv1.Sandbox) (bool, error) {
		done, err := c.hasStarted(k.name, uid, sb)
		k.timer.observe(sb, uid, done)
		return done, err
	}
	initial, watch := c.config.Store.Watch(store.Filter{Namespace: k.name.Namespace, Name: k.name.Name})
	defer watch.Close()
	for _, sb := range initial {
		if done, err := check(sb); done || err != nil {
			return sb, err
		}
	}
	// A change of the custom resource alone may change nothing of the view, and then no event is sent.
	ticker := c.config.Clock.NewTicker(recheckPeriod)
	defer ticker.Stop()
	for {
		var sb *sandboxv1.Sandbox
		select {
		case <-ctx.Done():
			return nil, fault.FromContext(ctx, "waiting for the controller to have the sandbox created", nil)
		case <-ticker.C():
			item, ok := c.config.Store.Get(k.name)
			switch {
			case c.config.Store.Gone(k.name, uid): // perhaps before the watch began, which then reports nothing
				return nil, Terminating(k.name)
			case !ok:
				continue
			}
			sb = item.Sandbox
		case event, ok := <-watch.Events():
			if !ok {
				return nil, fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too many changes at once")
			}
			sb = event.GetSandbox()
			if event.GetType() == sandboxv1.WatchSandboxesResponse_TYPE_DELETED && sb.GetUid() == uid {
				return nil, Terminating(k.name)
			}
		}
		if done, err := check(sb); done || err != nil {
			return sb, err
		}
	}
}

// hasStarted reports whether the process of the sandbox has started, and the custom resource says so; the error says why it
// never will.
func (c *Creator) hasStarted(name store.Key, uid string, sb *sandboxv1.Sandbox) (bool, error) {
	st := sb.GetStatus()
	switch {
	case sb.GetUid() != uid:
		return false, nil
	case sb.GetDeleteTime() != nil:
		return false, Terminating(name)
	case st.GetStartTime() != nil, st.GetPhase() == sandboxv1.Phase_PHASE_RUNNING:
		item, ok := c.config.Store.Get(name)
		if ok && c.config.Recovery.Abandoned(item.Resource) { // it started in the moment in which it was rolled back
			return false, recovery.RollingBack()
		}
		return ok && item.Resource != nil && item.Resource.EffectiveUID() == uid && recovery.HasStarted(item.Resource), nil
	case st.GetPhase() == sandboxv1.Phase_PHASE_FAILED:
		return false, failed(st)
	case st.GetPhase() == sandboxv1.Phase_PHASE_EXPIRED:
		return false, fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %s expired before it started", name)
	}
	return false, nil
}

// failed returns the error of a sandbox that could not be created: the controller keeps the agent's reason in the status.
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

// Terminating returns the error of a sandbox that is being deleted.
func Terminating(name store.Key) error {
	return fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "sandbox %s is being deleted", name).With("sandbox", name.String())
}
