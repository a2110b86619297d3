package admission_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
)

// FuzzUpdate admits an update with an arbitrary mask, whose sandbox is an arbitrary message. An admitted update leaves everything
// alone that a sandbox is: of its spec only the fields that the mask may name change, of its labels none of ours.
func FuzzUpdate(f *testing.F) {
	raw, err := proto.Marshal(&sandboxv1.Sandbox{
		Namespace: "ns", Name: "a", Labels: map[string]string{"a": "b", v1alpha1.Group + "/pool": "x"},
		Spec: &sandboxv1.SandboxSpec{Image: "other", Pool: "other", Command: []string{"x"}},
	})
	require.NoError(f, err)
	for _, mask := range []string{"labels", "labels,spec.expire_time", "spec", "*", "spec.image", "labels,labels", "spec.reset_revision,spec.ttl_after_finished", ""} {
		f.Add(mask, raw)
	}
	f.Fuzz(func(t *testing.T, mask string, raw []byte) {
		sb := &sandboxv1.Sandbox{}
		if proto.Unmarshal(raw, sb) != nil {
			return
		}
		sb.Namespace, sb.Name = "ns", "a"
		paths := strings.Split(mask, ",")
		req := update(sb, paths...)
		if err := admission.Update(req, now); err != nil {
			require.NotEmpty(t, fault.ReasonOf(err))
			require.NotEmpty(t, fieldOf(t, err))
			return
		}
		got := &v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "p"}}
		got.Namespace, got.Name, got.UID = "ns", "a", "uid"
		got.Labels = map[string]string{v1alpha1.Group + "/pool": "p"}
		got.Annotations = map[string]string{v1alpha1.AnnotationSandboxUID: "u"}
		before := got.DeepCopy()
		admission.Apply(got, req)
		once := got.DeepCopy()
		admission.Apply(got, req)
		require.Empty(t, cmp.Diff(once, got), "applying it twice changes nothing")
		require.Equal(t, "p", got.Labels[v1alpha1.Group+"/pool"])
		// What the mask does not name, and what it cannot name, is as before.
		put := map[string]func(){
			"labels":                        func() { got.Labels = before.Labels },
			"spec.expire_time":              func() { got.Spec.ExpireTime = before.Spec.ExpireTime },
			"spec.failure_policy":           func() { got.Spec.FailurePolicy = before.Spec.FailurePolicy },
			"spec.recovery_timeout":         func() { got.Spec.RecoveryTimeoutSeconds = before.Spec.RecoveryTimeoutSeconds },
			"spec.termination_grace_period": func() { got.Spec.TerminationGracePeriodSeconds = before.Spec.TerminationGracePeriodSeconds },
			"spec.ttl_after_finished":       func() { got.Spec.TTLAfterFinished = before.Spec.TTLAfterFinished },
			"spec.reset_revision":           func() { got.Spec.ResetRevision = before.Spec.ResetRevision },
		}
		for _, path := range paths {
			require.Contains(t, put, path)
			put[path]()
		}
		require.Empty(t, cmp.Diff(before, got))
	})
}
