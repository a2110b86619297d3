package create_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
)

// TestDryRun: a pool that wants it starts nothing that admission refuses.
func TestDryRun(t *testing.T) {
	kind := v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource()
	tests := map[string]struct {
		mode   v1alpha1.AdmissionMode
		answer error
		reason fault.Reason // empty: it starts
		asked  bool
	}{
		"not wanted":          {"", apierrors.NewForbidden(kind, "one", errors.New("quota")), "", false},
		"after the start":     {v1alpha1.AdmissionAfterStart, apierrors.NewForbidden(kind, "one", errors.New("quota")), "", false},
		"admitted":            {v1alpha1.AdmissionDryRun, nil, "", true},
		"the name is taken":   {v1alpha1.AdmissionDryRun, apierrors.NewAlreadyExists(kind, "one"), "", true},
		"refused":             {v1alpha1.AdmissionDryRun, apierrors.NewForbidden(kind, "one", errors.New("quota")), fault.PhaseConflict, true},
		"invalid":             {v1alpha1.AdmissionDryRun, apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("Sandbox").GroupKind(), "one", field.ErrorList{field.Required(field.NewPath("spec"), "no")}), fault.InvalidField, true},
		"the API server away": {v1alpha1.AdmissionDryRun, fakeapi.Refused(), fault.APIUnavailable, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, 5)
			e.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: poolMeta(), Spec: v1alpha1.SandboxPoolSpec{Admission: test.mode}})
			var calls atomic.Int64
			e.api.Before(func(verb fakeapi.Verb, _ client.Object) error {
				if verb != fakeapi.Create || len(e.agents["a"].Sandboxes()) > 0 { // the write that follows the start is another test's
					return nil
				}
				calls.Add(1)
				return test.answer
			})
			resp, err := e.create(t.Context(), request(nil))
			require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
			require.Equal(t, test.asked, calls.Load() > 0)
			if test.reason != "" {
				require.Empty(t, e.agents["a"].Sandboxes())
				require.Zero(t, e.persist.Pending())
				return
			}
			require.Len(t, e.agents["a"].Sandboxes(), 1)
			require.Equal(t, test.asked, stages(resp)[0] == "admission")
		})
	}
}
