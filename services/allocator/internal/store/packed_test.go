package store

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// TestPack: what comes out is what went in, but for what no component reads.
func TestPack(t *testing.T) {
	c := newCodec()
	full := typical()
	full.DeletionTimestamp = &metav1.Time{Time: time.Unix(1000, 0)}
	full.Annotations[v1alpha1.AnnotationAbandoned] = "1"
	fence := identity.Fence{SandboxUID: full.EffectiveUID(), Attempt: 1, AgentUID: full.EffectiveUID()}
	other := typical()
	other.Annotations[v1alpha1.AnnotationSandboxUID] = "another"
	unassigned := typical()
	unassigned.SetAssignment(nil)
	unassigned.Status = v1alpha1.SandboxStatus{}
	broken := typical()
	broken.Annotations[v1alpha1.AnnotationAssignment] = "{"
	strange := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "\"<&\u2028\\", UID: "u"}}
	for name, test := range map[string]struct {
		in   *v1alpha1.Sandbox
		want packed
	}{
		"all":             {full, packed{uid: fence.SandboxUID, phase: v1alpha1.PhaseRunning, assigned: fence, recorded: true, deleting: true, abandoned: true}},
		"another's fence": {other, packed{uid: "another", phase: v1alpha1.PhaseRunning, assigned: fence, recorded: true}},
		"not assigned":    {unassigned, packed{uid: fence.SandboxUID}},
		"not readable":    {broken, packed{uid: fence.SandboxUID, phase: v1alpha1.PhaseRunning, recorded: true}},
		"hardly anything": {strange, packed{uid: "u"}},
	} {
		t.Run(name, func(t *testing.T) {
			given := test.in.DeepCopy()
			given.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
			if len(given.Annotations) > 0 {
				given.Annotations[corev1.LastAppliedConfigAnnotation] = "{}"
			}
			before := given.DeepCopy()
			p := c.pack(given)
			require.Equal(t, before, given, "the argument is not changed")
			want, err := json.Marshal(test.in)
			require.NoError(t, err)
			got, err := json.Marshal(c.unpack(p))
			require.NoError(t, err)
			require.JSONEq(t, string(want), string(got))

			test.want.text = p.text
			test.want.version, test.want.objectUID = test.in.ResourceVersion, test.in.UID
			test.want.requestID, test.want.pool = test.in.Annotations[v1alpha1.AnnotationRequestID], test.in.Spec.PoolRef
			require.Equal(t, test.want, *p)
		})
	}
}

// TestPackIsSmall: most of what sandboxes have in common is in the dictionary.
func TestPackIsSmall(t *testing.T) {
	c := newCodec()
	sb := typical()
	for i, name := range []string{v1alpha1.AnnotationSandboxUID, v1alpha1.AnnotationRequestID, v1alpha1.AnnotationRequestDigest} {
		sb.Annotations[name] = fmt.Sprintf("%08d-1a2b-4c3d-8e4f-%012d", i*7654321, i*123456789)
	}
	sb.Name, sb.ResourceVersion = "sbx-00042-017", "123456"
	raw, err := json.Marshal(sb)
	require.NoError(t, err)
	require.Less(t, len(c.pack(sb).text), len(raw)/3)
}
