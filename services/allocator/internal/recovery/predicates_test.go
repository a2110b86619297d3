package recovery

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// resource returns the custom resource of a strong create call.
func resource(change func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "one", Annotations: map[string]string{
			v1alpha1.AnnotationCreateTime: "t1", v1alpha1.AnnotationRequestID: "r1", v1alpha1.AnnotationRequestDigest: "d1",
		}},
		Spec: v1alpha1.SandboxSpec{ConsistencyMode: v1alpha1.ConsistencyModeStrong},
	}
	if change != nil {
		change(sb)
	}
	return sb
}

func annotated(key, value string) *v1alpha1.Sandbox {
	return resource(func(sb *v1alpha1.Sandbox) { sb.Annotations[key] = value })
}

func TestOwnerOf(t *testing.T) {
	r := New(Config{})
	r.abandoned[callOf(annotated(v1alpha1.AnnotationCreateTime, "failed"))] = struct{}{}
	tests := map[string]struct {
		there *v1alpha1.Sandbox
		sent  bool
		want  Owner
	}{
		"this call's, sent before":            {resource(nil), true, ThisCall},
		"this call's, by all that is in it":   {resource(nil), false, ThisRequest},
		"a former leader's":                   {annotated(v1alpha1.AnnotationCreateTime, "t0"), true, ThisRequest},
		"another request's":                   {annotated(v1alpha1.AnnotationRequestID, "r2"), true, Another},
		"the same id for another request":     {annotated(v1alpha1.AnnotationRequestDigest, "d2"), true, Another},
		"a call's without a request_id":       {annotated(v1alpha1.AnnotationRequestID, ""), true, Another},
		"the same request's, and marked":      {resource(func(sb *v1alpha1.Sandbox) { sb.Annotations[v1alpha1.AnnotationAbandoned] = "true" }), false, RolledBack},
		"the same request's, and terminating": {resource(func(sb *v1alpha1.Sandbox) { sb.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }), false, RolledBack},
		"the same request's, rolled back":     {annotated(v1alpha1.AnnotationCreateTime, "failed"), false, RolledBack},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { require.Equal(t, test.want, r.OwnerOf(test.there, resource(nil), test.sent)) })
	}
}

func TestMarks(t *testing.T) {
	started := metav1.NewMicroTime(time.Unix(1, 0))
	tests := map[string]struct {
		sb                              *v1alpha1.Sandbox
		started, mayBeAnswered, resumed bool
	}{
		"pending":            {resource(nil), false, false, false},
		"resumed":            {annotated(v1alpha1.AnnotationResumed, "true"), false, false, true},
		"has a start time":   {resource(func(sb *v1alpha1.Sandbox) { sb.Status.StartTime = &started }), true, true, false},
		"is Running":         {resource(func(sb *v1alpha1.Sandbox) { sb.Status.Phase = v1alpha1.PhaseRunning }), true, true, false},
		"in a later attempt": {resource(func(sb *v1alpha1.Sandbox) { sb.Status.Attempt = 2 }), true, true, false},
		"in its first":       {resource(func(sb *v1alpha1.Sandbox) { sb.Status.Attempt = 1 }), false, false, false},
		"fast":               {resource(func(sb *v1alpha1.Sandbox) { sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeFast }), false, true, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.started, HasStarted(test.sb))
			require.Equal(t, test.mayBeAnswered, mayBeAnswered(test.sb))
			require.Equal(t, test.resumed, resumed(test.sb))
		})
	}
}

func TestAbandoned(t *testing.T) {
	r := New(Config{})
	require.False(t, r.Abandoned(nil))
	require.False(t, r.Abandoned(resource(nil)))
	require.True(t, r.Abandoned(annotated(v1alpha1.AnnotationAbandoned, "true")), "by the mark")
	r.abandoned[callOf(resource(nil))] = struct{}{}
	require.True(t, r.Abandoned(resource(nil)), "by this process's memory")
	require.False(t, r.Abandoned(annotated(v1alpha1.AnnotationCreateTime, "t2")), "another call of the name")
}
