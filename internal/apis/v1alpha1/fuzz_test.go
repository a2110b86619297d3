package v1alpha1_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// FuzzAssignment reads an annotation that a user may have written. It is an assignment that can be written and read again, or an
// error; only an empty one is no assignment, because otherwise a container may run.
func FuzzAssignment(f *testing.F) {
	for _, seed := range []string{
		"", "null", "{}", `{"agentUID":"a","sandboxUID":"u","attempt":1}`,
		`{"agentPod":"p","agentUID":"a","nodeName":"n","agentAddress":"10.0.0.1:1","sandboxUID":"u","attempt":2,"started":{"sandboxID":"u-2","startTime":"2026-01-02T03:04:05.678901Z","startPath":"Fast","endpoints":["10.0.0.1:80"]},"superseded":[{"agentUID":"b","sandboxUID":"u","attempt":1}]}`,
		`{"agentUID":"a","sandboxUID":"u","attempt":9223372036854775808}`, `{"AGENTUID":"a","sandboxUid":"\xff","attempt":1}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, annotation string) {
		sb := &v1alpha1.Sandbox{}
		sb.Annotations = map[string]string{v1alpha1.AnnotationAssignment: annotation}
		a, err := sb.Assignment()
		status := sb.EffectiveStatus()
		require.NotNil(t, status)
		if err != nil {
			require.Nil(t, a)
			require.Empty(t, status.Phase, "no sandbox runs by an annotation that cannot be read")
			return
		}
		require.Equal(t, annotation == "", a == nil)
		if a == nil {
			return
		}
		require.NotEmpty(t, a.AgentUID)
		require.NotEmpty(t, a.SandboxUID)
		require.Positive(t, a.Attempt)
		require.Equal(t, a.Started != nil, status.Phase == v1alpha1.PhaseRunning)
		sb.SetAssignment(a)
		written := sb.Annotations[v1alpha1.AnnotationAssignment]
		again, err := sb.Assignment()
		require.NoError(t, err)
		sb.SetAssignment(again)
		require.Equal(t, written, sb.Annotations[v1alpha1.AnnotationAssignment])
	})
}
