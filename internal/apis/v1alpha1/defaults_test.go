package v1alpha1_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func TestDefaultPoolOf(t *testing.T) {
	require.Equal(t, "default", v1alpha1.DefaultPoolOf(nil))
	require.Equal(t, "default", v1alpha1.DefaultPoolOf(map[string]string{v1alpha1.AnnotationDefaultPool: ""}))
	require.Equal(t, "gpu", v1alpha1.DefaultPoolOf(map[string]string{v1alpha1.AnnotationDefaultPool: "gpu"}))
}

func TestPool(t *testing.T) {
	s := &v1alpha1.Sandbox{}
	require.Empty(t, s.Pool())
	s.Status.Pool = "default"
	require.Equal(t, "default", s.Pool())
	s.Spec.PoolRef = "gpu"
	require.Equal(t, "gpu", s.Pool())
}

func TestDeleteGracePeriod(t *testing.T) {
	for _, tt := range []struct {
		name  string
		value *string
		want  *time.Duration
		valid bool
	}{
		{"unset", nil, nil, true},
		{"zero", ptr.To("0"), ptr.To(time.Duration(0)), true},
		{"one minute", ptr.To("60"), ptr.To(time.Minute), true},
		{"maximum", ptr.To("3600"), ptr.To(time.Hour), true},
		{"too long", ptr.To("3601"), nil, false},
		{"negative", ptr.To("-1"), nil, false},
		{"empty", ptr.To(""), nil, false},
		{"not a number", ptr.To("60s"), nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &v1alpha1.Sandbox{}
			if tt.value != nil {
				s.Annotations = map[string]string{v1alpha1.AnnotationDeleteGracePeriod: *tt.value}
			}
			got, err := s.DeleteGracePeriod()
			require.Equal(t, tt.valid, err == nil, "%v", err)
			require.Equal(t, tt.want, got)
		})
	}
}

func TestAssignment(t *testing.T) {
	s := &v1alpha1.Sandbox{}
	got, err := s.Assignment()
	require.NoError(t, err)
	require.Nil(t, got)

	want := v1alpha1.Assignment{AgentPod: "pod", AgentUID: "agent", NodeName: "node", AgentAddress: "1.2.3.4:5758", SandboxUID: "uid", Attempt: 2}
	s.SetAssignment(&want)
	got, err = s.Assignment()
	require.NoError(t, err)
	require.Equal(t, &want, got)
	s.SetAssignment(nil)
	require.NotContains(t, s.Annotations, v1alpha1.AnnotationAssignment)

	for _, invalid := range []string{"{", `{"agentUID":"a","sandboxUID":"s"}`, `{"sandboxUID":"s","attempt":1}`, `{"agentUID":"a","attempt":1}`} {
		s.Annotations = map[string]string{v1alpha1.AnnotationAssignment: invalid}
		_, err := s.Assignment()
		require.ErrorContains(t, err, v1alpha1.AnnotationAssignment, invalid)
	}
}

func TestEffectiveUID(t *testing.T) {
	s := &v1alpha1.Sandbox{}
	s.UID = "api-server"
	require.Equal(t, "api-server", s.EffectiveUID())
	s.Annotations = map[string]string{v1alpha1.AnnotationSandboxUID: "fast"}
	require.Equal(t, "fast", s.EffectiveUID())
}
