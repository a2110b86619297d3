package recovery_test

import (
	"errors"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/recovery"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// annotate returns a change that strong creates' tests share: a strong create's custom resource with an annotation.
func annotate(key, value string) func(*v1alpha1.Sandbox) {
	return func(sb *v1alpha1.Sandbox) {
		strong(sb)
		sb.Annotations[key] = value
	}
}

func started(sb *v1alpha1.Sandbox) { strong(sb); sb.Status.Phase = v1alpha1.PhaseRunning }

var conflict = apierrors.NewConflict(v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource(), "one", errors.New("changed")) //nolint:gochecknoglobals // a constant

// firstly returns a hook that answers the first call of a verb with an error.
func firstly(verb fakeapi.Verb, err error) fakeapi.Hook {
	calls := make(chan struct{}, 1)
	return func(v fakeapi.Verb, _ client.Object) error {
		if v != verb {
			return nil
		}
		select {
		case calls <- struct{}{}:
			return err
		default:
			return nil
		}
	}
}

// TestRollback is about what there may be of a strong create that failed, and to whom it belongs by then.
func TestRollback(t *testing.T) {
	failure := fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no such image")
	const (
		goes   = "goes"
		stays  = "stays"
		absent = "is absent"
	)
	tests := map[string]struct {
		there     func(*v1alpha1.Sandbox) // nil: nothing
		former    bool                    // a former leader wrote it
		hook      fakeapi.Hook
		want      string
		unsettled bool
	}{
		"never written":                      {want: absent},
		"written":                            {there: strong, want: goes},
		"started in this moment":             {there: started, want: goes},
		"marked before":                      {there: annotate(v1alpha1.AnnotationAbandoned, "true"), want: goes},
		"resumed by a later leader":          {there: annotate(v1alpha1.AnnotationResumed, "true"), want: stays, unsettled: true},
		"another call has the name":          {there: annotate(v1alpha1.AnnotationCreateTime, "t2"), want: stays},
		"another request has the name":       {there: annotate(v1alpha1.AnnotationRequestID, "r2"), want: stays},
		"a former leader's":                  {there: strong, former: true, want: goes},
		"a former leader's that has started": {there: started, former: true, want: stays, unsettled: true},
		"it changes in between":              {there: strong, hook: firstly(fakeapi.Update, conflict), want: goes},
		"the first look fails":               {there: strong, hook: firstly(fakeapi.Get, fakeapi.Refused()), want: goes},
		"the first deletion fails":           {there: strong, hook: firstly(fakeapi.Delete, fakeapi.Refused()), want: goes},
		"the roles were not read":            {there: strong, hook: firstly(fakeapi.Get, fakeapi.Unauthorized()), want: goes},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			mine := resource(strong)
			if test.there != nil {
				e.write(resource(test.there))
			}
			e.api.Before(test.hook)
			answer := make(chan error, 1)
			go func() {
				answer <- e.recovery.Rollback(one, recovery.Attempt{Resource: mine, Own: !test.former}, failure)
			}()
			e.until("it is answered", func() bool { return len(answer) > 0 })
			err := <-answer
			require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
			require.Equal(t, test.unsettled, fault.IsUnsettled(err))
			e.until("it has ended", func() bool { return !e.recovery.Abandoned(mine) })
			switch test.want {
			case absent:
				require.Nil(t, e.there())
			case stays:
				require.Nil(t, e.there().DeletionTimestamp)
				require.Empty(t, e.there().Annotations[v1alpha1.AnnotationAbandoned])
			case goes:
				require.NotNil(t, e.there().DeletionTimestamp)
				require.NotEmpty(t, e.there().Annotations[v1alpha1.AnnotationAbandoned], "the other replicas know why")
			}
		})
	}
}

// TestRollbackWithoutAPIServer: the answer does not wait for it, and no repetition is answered with the sandbox meanwhile.
func TestRollbackWithoutAPIServer(t *testing.T) {
	e := newEnv(t)
	sb := e.write(resource(strong))
	e.api.Before(func(fakeapi.Verb, client.Object) error { return fakeapi.Refused() })
	answer := make(chan error, 1)
	began := e.clock.Now()
	go func() {
		answer <- e.recovery.Rollback(one, recovery.Attempt{Resource: sb, Own: true}, recovery.RollingBack())
	}()
	e.until("it is answered", func() bool { return len(answer) > 0 })
	require.True(t, fault.IsUnsettled(<-answer))
	require.Less(t, e.clock.Since(began), time.Second)
	require.True(t, e.recovery.Abandoned(sb))
	e.store.SetResource(sb)
	item, ok := e.store.Get(one)
	require.True(t, ok)
	require.Equal(t, recovery.Abandoned, e.recovery.StandingOf(item))
	e.api.Before(nil)
	e.until("it is rolled back", func() bool { return e.there().DeletionTimestamp != nil })
	e.until("it has ended", func() bool { return !e.recovery.Abandoned(sb) })
}

// TestResume is about the moment in which a repetition takes a strong create over: of its mark and that of a rollback, the first
// counts.
func TestResume(t *testing.T) {
	marked := annotate(v1alpha1.AnnotationResumed, "true")
	tests := map[string]struct {
		known  func(*v1alpha1.Sandbox) // as this process knows it
		there  func(*v1alpha1.Sandbox) // as the API server has it; nil: it is gone
		hook   fakeapi.Hook
		reason fault.Reason
		calls  bool // the API server is called
	}{
		"it is marked":                   {known: strong, there: strong, calls: true},
		"it was marked before":           {known: marked, there: marked},
		"it was marked by another":       {known: strong, there: marked, calls: true},
		"a fast one needs no mark":       {known: nil, there: func(*v1alpha1.Sandbox) {}},
		"it is gone":                     {known: strong, calls: true, reason: fault.AgentUnavailable},
		"another call has the name":      {known: strong, there: annotate(v1alpha1.AnnotationCreateTime, "t2"), calls: true, reason: fault.AgentUnavailable},
		"it was marked as abandoned":     {known: strong, there: annotate(v1alpha1.AnnotationAbandoned, "true"), calls: true, reason: fault.AgentUnavailable},
		"it changes in between":          {known: strong, there: strong, hook: firstly(fakeapi.Update, conflict), calls: true},
		"the look fails":                 {known: strong, there: strong, hook: firstly(fakeapi.Get, fakeapi.Refused()), calls: true, reason: fault.APIUnavailable},
		"the mark cannot be written now": {known: strong, there: strong, hook: firstly(fakeapi.Update, fakeapi.Refused()), calls: true, reason: fault.APIUnavailable},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			known := resource(test.known)
			if test.there != nil {
				e.write(resource(test.there))
			}
			called := false
			e.api.Before(func(verb fakeapi.Verb, obj client.Object) error {
				called = true
				if test.hook == nil {
					return nil
				}
				return test.hook(verb, obj)
			})
			got, err := e.recovery.Resume(t.Context(), one, known)
			require.Equal(t, test.calls, called)
			require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
			if test.reason != "" {
				require.Nil(t, got)
				return
			}
			if test.calls {
				require.NotEmpty(t, got.Annotations[v1alpha1.AnnotationResumed])
				require.Equal(t, e.there().ResourceVersion, got.ResourceVersion)
			}
		})
	}
}

// TestTerminatingIsNotResumed: its owner, or a rollback, has deleted it.
func TestTerminatingIsNotResumed(t *testing.T) {
	e := newEnv(t)
	sb := e.write(resource(strong))
	require.NoError(t, e.api.Direct.Delete(t.Context(), sb))
	_, err := e.recovery.Resume(t.Context(), one, sb)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
	require.True(t, fault.IsUnsettled(err))
	require.Empty(t, e.there().Annotations[v1alpha1.AnnotationResumed])
}

func TestStandingOf(t *testing.T) {
	phase := func(p v1alpha1.Phase, also ...func(*v1alpha1.Sandbox)) func(*v1alpha1.Sandbox) {
		return func(sb *v1alpha1.Sandbox) {
			strong(sb)
			for _, f := range also {
				f(sb)
			}
			sb.Status.Phase = p
		}
	}
	resumed := annotate(v1alpha1.AnnotationResumed, "true")
	tests := map[string]struct {
		resource func(*v1alpha1.Sandbox) // nil: only the container is known
		arrange  func(*env)
		want     recovery.Standing
	}{
		"a container":                        {want: recovery.Unadopted},
		"one that was written meanwhile":     {arrange: func(e *env) { e.store.SetResource(resource(nil)) }, want: recovery.Started},
		"one that is being written":          {arrange: func(e *env) { e.persist.Persist(&store.Record{Record: report(nil).GetRecord()}, true) }, want: recovery.Started},
		"one that may obey a former leader":  {arrange: func(e *env) { e.unannounced.Store(true) }, want: recovery.Unsettled},
		"one that was removed":               {arrange: func(e *env) { e.store.SetContainerRemoved(wireFence) }, want: recovery.Unsettled},
		"one that is being deleted":          {arrange: func(e *env) { e.agent.OnDelete = hang; e.deletions.Container(wireFence) }, want: recovery.Unsettled},
		"pending":                            {resource: phase(v1alpha1.PhasePending), want: recovery.Unfinished},
		"bound":                              {resource: phase(v1alpha1.PhaseBound), want: recovery.Unfinished},
		"resumed, and still bound":           {resource: phase(v1alpha1.PhaseBound, resumed), want: recovery.Unfinished},
		"running, and never resumed":         {resource: phase(v1alpha1.PhaseRunning), want: recovery.Unfinished},
		"running, and resumed":               {resource: phase(v1alpha1.PhaseRunning, resumed), want: recovery.Started},
		"failed, resumed, and never started": {resource: phase(v1alpha1.PhaseFailed, resumed), want: recovery.Unfinished},
		"failed after it had started": {resource: phase(v1alpha1.PhaseFailed, resumed, func(sb *v1alpha1.Sandbox) {
			sb.Status.StartTime = &metav1.MicroTime{Time: time.Unix(1, 0)}
		}), want: recovery.Started},
		"fast and running":       {resource: func(sb *v1alpha1.Sandbox) { sb.Status.Phase = v1alpha1.PhaseRunning }, want: recovery.Started},
		"marked as abandoned":    {resource: phase(v1alpha1.PhaseRunning, annotate(v1alpha1.AnnotationAbandoned, "true")), want: recovery.Abandoned},
		"written, not announced": {resource: func(sb *v1alpha1.Sandbox) { sb.Status.Phase = v1alpha1.PhaseRunning }, arrange: func(e *env) { e.unannounced.Store(true) }, want: recovery.Started},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			e.put(report(nil))
			if test.resource != nil {
				e.store.SetResource(resource(test.resource))
			}
			item, ok := e.store.Get(one)
			require.True(t, ok)
			if test.arrange != nil {
				test.arrange(e)
			}
			require.Equal(t, test.want, e.recovery.StandingOf(item))
		})
	}
	require.Equal(t, recovery.Started, newEnv(t).recovery.StandingOf(store.Item{}), "without a container none can be deleted")
}
