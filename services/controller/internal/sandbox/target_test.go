package sandbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/trace"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

func withGrace(seconds int64) change {
	return func(s *v1alpha1.Sandbox) { s.Spec.TerminationGracePeriodSeconds = ptr.To(seconds) }
}

func withAnnotation(key, value string) change {
	return func(s *v1alpha1.Sandbox) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[key] = value
	}
}

func withCondition(kind string, status metav1.ConditionStatus, reason string) change {
	return func(s *v1alpha1.Sandbox) {
		s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, LastTransitionTime: metav1.NewTime(start)})
	}
}

func TestGracePeriod(t *testing.T) {
	annotation := func(v string) change { return withAnnotation(v1alpha1.AnnotationDeleteGracePeriod, v) }
	for _, tt := range []struct {
		name    string
		changes []change
		want    *time.Duration
	}{
		{"unset: that of the record", nil, nil},
		{"spec", []change{withGrace(7)}, ptr.To(7 * time.Second)},
		{"zero", []change{withGrace(0)}, ptr.To(time.Duration(0))},
		{"the delete call overrides the spec", []change{withGrace(7), annotation("60"), deleted}, ptr.To(time.Minute)},
		{"the delete call without a spec", []change{annotation("60"), deleted}, ptr.To(time.Minute)},
		{"not deleted", []change{withGrace(7), annotation("60")}, ptr.To(7 * time.Second)},
		{"malformed", []change{withGrace(7), annotation("1m"), deleted}, ptr.To(7 * time.Second)},
		{"too long", []change{withGrace(7), annotation("999999"), deleted}, ptr.To(7 * time.Second)},
	} {
		t.Run(tt.name, func(t *testing.T) { require.Equal(t, tt.want, targetOf(t, newSandbox(tt.changes...)).gracePeriod()) })
	}
}

const (
	createTrace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	deleteTrace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
)

// TestTraceOfTheWork: spans of a deletion join the trace of the delete call, all others that of the create call.
func TestTraceOfTheWork(t *testing.T) {
	created, deletion := withAnnotation(v1alpha1.AnnotationTraceparent, createTrace), withAnnotation(v1alpha1.AnnotationDeleteTraceparent, deleteTrace)
	for _, tt := range []struct {
		name    string
		changes []change
		want    string // the trace id
	}{
		{"create", []change{created}, "0af7651916cd43dd8448eb211c80319c"},
		{"delete", []change{created, deletion, deleted}, "4bf92f3577b34da6a3ce929d0e0e4736"},
		{"delete without a trace", []change{created, deleted}, "0af7651916cd43dd8448eb211c80319c"},
		{"not deleted yet", []change{created, deletion}, "0af7651916cd43dd8448eb211c80319c"},
		{"malformed", []change{withAnnotation(v1alpha1.AnnotationTraceparent, "trace")}, "00000000000000000000000000000000"},
		{"none", nil, "00000000000000000000000000000000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := withTrace(t.Context(), targetOf(t, newSandbox(tt.changes...)))
			require.Equal(t, tt.want, trace.SpanContextFromContext(ctx).TraceID().String())
			require.Equal(t, ctx, withTrace(ctx, targetOf(t, newSandbox())), "a trace is not replaced")
		})
	}
}

func TestEnter(t *testing.T) {
	for _, tt := range []struct {
		name     string
		from     v1alpha1.Phase
		to       lifecycle.Phase
		moved    bool
		want     v1alpha1.Phase
		keepsEnd bool
	}{
		{"same phase", v1alpha1.PhaseRunning, lifecycle.Running, false, v1alpha1.PhaseRunning, true},
		{"next phase", v1alpha1.PhaseRunning, lifecycle.Failed, true, v1alpha1.PhaseFailed, true},
		{"a new attempt has no end", v1alpha1.PhaseFailed, lifecycle.Pending, true, v1alpha1.PhasePending, false},
		{"Gone is not written", v1alpha1.PhaseTerminating, lifecycle.Gone, true, v1alpha1.PhaseTerminating, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := targetOf(t, newSandbox(inPhase(tt.from), func(s *v1alpha1.Sandbox) { s.Status.ExitCode = ptr.To(int32(3)) }))
			require.Equal(t, tt.moved, x.enter(tt.to))
			require.Equal(t, tt.want, x.sandbox.Status.Phase)
			require.Equal(t, tt.keepsEnd, x.sandbox.Status.ExitCode != nil)
		})
	}
}

func TestFastAndToCreate(t *testing.T) {
	attempt := func(n int64) change { return func(s *v1alpha1.Sandbox) { s.Status.Attempt = n } }
	second := func(s *v1alpha1.Sandbox) {
		a := assigned
		a.Attempt = 2
		s.SetAssignment(&a)
	}
	for _, tt := range []struct {
		name           string
		changes        []change
		fast, toCreate bool
	}{
		{"declared", []change{onAgent}, false, true},
		{"declared and running", []change{onAgent, inPhase(v1alpha1.PhaseRunning)}, false, false},
		{"declared and failed", []change{onAgent, inPhase(v1alpha1.PhaseFailed)}, false, false},
		{"fast, without a status", []change{onAgent, onFastPath, attempt(0)}, true, false},
		{"fast, bound", []change{onAgent, onFastPath, withCondition(v1alpha1.ConditionScheduled, metav1.ConditionTrue, reasonFastPath)}, true, false},
		{"fast, placed again by the controller", []change{onAgent, onFastPath, withCondition(v1alpha1.ConditionScheduled, metav1.ConditionTrue, reasonAssigned)}, false, true},
		{"fast, with a new attempt", []change{onAgent, onFastPath, second, attempt(1)}, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := targetOf(t, newSandbox(tt.changes...))
			require.Equal(t, tt.fast, x.fast())
			require.Equal(t, tt.toCreate, x.toCreate())
		})
	}
}

func TestResetRequested(t *testing.T) {
	at := func(d time.Duration) *metav1.MicroTime { return &metav1.MicroTime{Time: start.Add(d)} }
	for _, tt := range []struct {
		name           string
		want, accepted *metav1.MicroTime
		requested      bool
	}{
		{"none", nil, nil, false},
		{"first", at(0), nil, true},
		{"carried out", at(0), at(0), false},
		{"later", at(time.Microsecond), at(0), true},
		{"earlier", at(0), at(time.Second), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.Equal(t, tt.requested, targetOf(t, newSandbox(func(s *v1alpha1.Sandbox) {
				s.Spec.ResetRevision, s.Status.AcceptedResetRevision = tt.want, tt.accepted
			})).resetRequested())
		})
	}
}
