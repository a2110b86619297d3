package create_test

import (
	"context"
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
)

// running is what the controller writes once the process has started.
func running(s *v1alpha1.SandboxStatus) {
	s.Phase, s.Endpoints, s.StartPath = v1alpha1.PhaseRunning, []string{"10.0.0.1:80"}, v1alpha1.StartPathSlot
}

// setStatus has the controller write a status, again if the allocator has written meanwhile.
func (e *env) setStatus(change func(*v1alpha1.SandboxStatus)) {
	e.t.Helper()
	e.until("the status is written", func() bool {
		sb := e.resource("one")
		if sb == nil {
			return false
		}
		change(&sb.Status)
		err := e.api.Direct.Status().Update(context.Background(), sb)
		require.True(e.t, err == nil || apierrors.IsConflict(err), "%v", err)
		return err == nil
	})
}

func TestStrongCreate(t *testing.T) {
	e := newEnv(t)
	done := e.begin(t.Context(), request(strong))
	e.until("the custom resource comes first", func() bool { return e.resource("one") != nil })
	sb := e.resource("one")
	require.Empty(t, sb.Annotations[v1alpha1.AnnotationAssignment], "the controller assigns it")
	require.Equal(t, v1alpha1.ConsistencyModeStrong, sb.Spec.ConsistencyMode)
	require.False(t, e.inFlight.Any(), "the sweep owns what the controller has created")
	unlock, err := e.names.Lock(t.Context(), one)
	require.NoError(t, err, "the name is not locked while it waits: it can be deleted")
	unlock()
	e.setStatus(running)
	r := e.end(done)
	require.NoError(t, r.err)
	require.Equal(t, string(sb.UID), r.response.GetSandbox().GetUid())
	require.Equal(t, []string{"10.0.0.1:80"}, r.response.GetEndpoints())
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, r.response.GetStartPath())
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG, r.response.GetConsistencyMode())
	require.Equal(t, []string{"record", "schedule", "agent", "status"}, stages(r.response))
	require.False(t, r.response.GetReplayed())
	require.Zero(t, e.persist.Pending())
}

// TestStrongCreateFails is about what a sandbox may come to instead of its start. Its custom resource is rolled back.
func TestStrongCreateFails(t *testing.T) {
	failed := func(reason fault.Reason) func(*env) {
		return func(e *env) {
			e.setStatus(func(s *v1alpha1.SandboxStatus) {
				s.Phase, s.Reason, s.Message = v1alpha1.PhaseFailed, string(reason), "no"
			})
		}
	}
	tests := map[string]struct {
		then   func(*env)
		reason fault.Reason
		class  func(error) bool
	}{
		"no such image":     {failed(fault.ImageNotFound), fault.ImageNotFound, errdefs.IsNotFound},
		"no capacity":       {failed(fault.NoCapacity), fault.NoCapacity, errdefs.IsResourceExhausted},
		"invalid":           {failed(fault.InvalidField), fault.InvalidField, errdefs.IsInvalidArgument},
		"the process ended": {failed("OOMKilled"), fault.PhaseConflict, errdefs.IsFailedPrecondition},
		"it expires before it starts": {func(e *env) {
			e.setStatus(func(s *v1alpha1.SandboxStatus) { s.Phase = v1alpha1.PhaseExpired })
		}, fault.PhaseConflict, errdefs.IsFailedPrecondition},
		"it is deleted": {func(e *env) {
			e.until("it is written", func() bool { return e.resource("one") != nil })
			require.NoError(e.t, e.api.Delete(context.Background(), e.resource("one")))
		}, fault.SandboxTerminating, errdefs.IsAborted},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			done := e.begin(t.Context(), request(strong))
			test.then(e)
			r := e.end(done)
			require.Equal(t, test.reason, fault.ReasonOf(r.err), "%v", r.err)
			require.True(t, test.class(r.err))
			require.False(t, fault.IsUnsettled(r.err), "it is marked as abandoned, or gone")
			e.requireNothing()
		})
	}
}

// TestStrongDeletedAtOnce: the informer may observe the deletion before the create has received the answer to its write. The store has
// nothing to report then, and the create ends without an event.
func TestStrongDeletedAtOnce(t *testing.T) {
	e := newEnv(t)
	e.api.After(once(fakeapi.Create, func(obj client.Object) error {
		there := e.resource(obj.GetName())
		there.Finalizers = nil
		require.NoError(e.t, e.api.Direct.Update(context.Background(), there))
		require.NoError(e.t, e.api.Direct.Delete(context.Background(), there))
		e.recovery.ResourceSeen(there)
		e.recovery.ResourceGone(there)
		return nil
	}))
	r := e.end(e.begin(t.Context(), request(strong)))
	require.Equal(t, fault.SandboxTerminating, fault.ReasonOf(r.err), "%v", r.err)
	require.False(t, fault.IsUnsettled(r.err))
	e.requireNothing()
}

// TestReportedStartIsNotEnough: until the custom resource says that the process has started, the next leader does not know that
// the caller may have been answered.
func TestReportedStartIsNotEnough(t *testing.T) {
	e := newEnv(t)
	ctx := endingWith(context.Canceled)
	done := e.begin(ctx, request(strong))
	e.setStatus(func(s *v1alpha1.SandboxStatus) { s.Phase, s.AssignedPod = v1alpha1.PhaseBound, "pod-a" })
	for range 20 {
		e.sync()
		e.clock.Step(5 * step)
	}
	require.Empty(t, done)
	e.setStatus(running)
	require.NoError(t, e.end(done).err)
}

// TestStrongWrite is about the answers of the API server to the write.
func TestStrongWrite(t *testing.T) {
	invalid := apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("Sandbox").GroupKind(), "one", field.ErrorList{field.Invalid(field.NewPath("spec", "image"), "x", "no")})
	quota := apierrors.NewForbidden(v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource(), "one", errors.New("exceeded quota"))
	refuse := func(err error) func(*env) { return func(e *env) { e.api.Before(fails(err, fakeapi.Create)) } }
	tests := map[string]struct {
		arrange   func(*env)
		reason    fault.Reason
		unsettled bool
	}{
		"it is invalid":            {refuse(invalid), fault.InvalidField, false},
		"it exceeds a quota":       {refuse(quota), fault.PhaseConflict, false},
		"another sandbox is there": {func(e *env) { require.NoError(e.t, e.api.Direct.Create(context.Background(), theirs())) }, fault.SandboxExists, false},
		"the first answer is lost": {func(e *env) {
			e.api.After(once(fakeapi.Create, func(client.Object) error { return context.DeadlineExceeded }))
		}, "", false},
		"the API server was away": {func(e *env) {
			e.api.Before(once(fakeapi.Create, func(client.Object) error { return fakeapi.Refused() }))
		}, "", false},
		"its roles were not read": {func(e *env) {
			e.api.Before(once(fakeapi.Create, func(client.Object) error { return fakeapi.Unauthorized() }))
		}, "", false},
		"the answer and the look at it are lost": {func(e *env) {
			e.api.After(once(fakeapi.Create, func(client.Object) error { return context.DeadlineExceeded }))
			e.api.Before(once(fakeapi.Get, func(client.Object) error { return fakeapi.Refused() }))
		}, "", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			test.arrange(e)
			done := e.begin(t.Context(), request(strong))
			if test.reason == "" {
				e.setStatus(running)
				r := e.end(done)
				require.NoError(t, r.err)
				require.Equal(t, string(e.resource("one").UID), r.response.GetSandbox().GetUid())
				require.Len(t, e.resources(), 1)
				return
			}
			r := e.end(done)
			require.Equal(t, test.reason, fault.ReasonOf(r.err), "%v", r.err)
			require.Equal(t, test.unsettled, fault.IsUnsettled(r.err))
			if test.reason == fault.SandboxExists {
				require.Equal(t, "theirs", e.resource("one").Spec.Image)
				require.NoError(t, e.api.Delete(t.Context(), e.resource("one")))
			}
			e.requireNothing()
		})
	}
}

// TestFormerLeadersAttempt: a former leader wrote the custom resource for the same request, and the informer has not shown it.
func TestFormerLeadersAttempt(t *testing.T) {
	tests := map[string]struct {
		change func(*v1alpha1.Sandbox)
		again  func(*sandboxv1.CreateSandboxRequest)
		reason fault.Reason
	}{
		"it is resumed":        {nil, strongWithID, ""},
		"it is rolled back":    {func(sb *v1alpha1.Sandbox) { sb.Annotations[v1alpha1.AnnotationAbandoned] = "true" }, strongWithID, fault.AgentUnavailable},
		"another request's":    {nil, func(r *sandboxv1.CreateSandboxRequest) { strongWithID(r); r.Spec.Args = []string{"x"} }, fault.SandboxExists},
		"a request without id": {nil, strong, fault.SandboxExists},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			sb := e.cutOff()
			if test.change != nil {
				test.change(sb)
				require.NoError(t, e.api.Direct.Update(t.Context(), sb))
			}
			done := e.begin(t.Context(), request(test.again))
			if test.reason != "" {
				r := <-done
				require.Equal(t, test.reason, fault.ReasonOf(r.err), "%v", r.err)
				require.Equal(t, test.reason == fault.AgentUnavailable, fault.IsUnsettled(r.err))
				require.Nil(t, e.resource("one").DeletionTimestamp)
				return
			}
			e.setStatus(running)
			r := e.end(done)
			require.NoError(t, r.err)
			require.Equal(t, string(sb.UID), r.response.GetSandbox().GetUid())
			require.NotEmpty(t, e.resource("one").Annotations[v1alpha1.AnnotationResumed], "the former leader must not roll it back now")
		})
	}
}

// cutOff leaves the custom resource of a strong create as its leader's end leaves it, and a Creator that has not seen it.
func (e *env) cutOff() *v1alpha1.Sandbox {
	e.t.Helper()
	former := newEnv(e.t)
	ctx := endingWith(context.Canceled)
	done := former.begin(ctx, request(strongWithID))
	former.until("it is written", func() bool { return former.resource("one") != nil })
	sb := former.resource("one")
	ctx.end()
	former.end(done)
	sb.ResourceVersion = ""
	require.NoError(e.t, e.api.Direct.Create(context.Background(), sb))
	return e.resource("one")
}

// TestRollbackFails: while the API server is away, the error says that the sandbox may stay; repetitions wait until it does not.
func TestRollbackFails(t *testing.T) {
	e := newEnv(t)
	done := e.begin(t.Context(), request(strongWithID))
	e.until("the custom resource is written", func() bool { return e.resource("one") != nil })
	e.api.Before(fails(fakeapi.Refused()))
	e.setStatus(func(s *v1alpha1.SandboxStatus) { s.Phase, s.Reason = v1alpha1.PhaseFailed, string(fault.ImageNotFound) })
	r := e.end(done)
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(r.err))
	require.True(t, fault.IsUnsettled(r.err))
	_, err := e.create(t.Context(), request(strongWithID))
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err), "%v", err)
	require.True(t, fault.IsUnsettled(err))
	first := e.resource("one").UID
	e.api.Before(nil)
	e.requireNothing()

	done = e.begin(t.Context(), request(strongWithID))
	e.setStatus(running)
	r = e.end(done)
	require.NoError(t, r.err)
	require.False(t, r.response.GetReplayed(), "the request begins again")
	require.NotEqual(t, string(first), r.response.GetSandbox().GetUid())
}

// TestResumeFails: a create that a former leader began and that fails now is rolled back, unless its caller may have been answered.
func TestResumeFails(t *testing.T) {
	tests := map[string]struct {
		change   func(*v1alpha1.Sandbox)
		stays    bool
		answered bool
	}{
		"it never started":   {func(*v1alpha1.Sandbox) {}, false, false},
		"it had started":     {func(sb *v1alpha1.Sandbox) { sb.Status.StartTime = &metav1.MicroTime{Time: metav1.Now().Time} }, true, true},
		"it was reset since": {func(sb *v1alpha1.Sandbox) { sb.Status.Attempt = 2 }, true, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			sb := e.cutOff()
			test.change(sb)
			sb.Status.Phase, sb.Status.Reason = v1alpha1.PhaseFailed, string(fault.ImageNotFound)
			require.NoError(t, e.api.Direct.Status().Update(t.Context(), sb))
			r := e.end(e.begin(t.Context(), request(strongWithID)))
			if !test.stays {
				require.Equal(t, fault.ImageNotFound, fault.ReasonOf(r.err))
				e.requireNothing()
				return
			}
			require.Equal(t, test.answered, r.err == nil, "%v", r.err)
			require.Equal(t, !test.answered, fault.IsUnsettled(r.err), "it stays")
			for range 50 {
				e.sync()
				e.clock.Step(step)
			}
			require.NotNil(t, e.resource("one"))
			require.Empty(t, e.resource("one").Annotations[v1alpha1.AnnotationAbandoned])
			require.Nil(t, e.resource("one").DeletionTimestamp)
		})
	}
}
