package pool

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// notAuthorized returns the answer of an API server's authorizer to a user.
func notAuthorized(user string) error {
	return apierrors.NewForbidden(corev1.Resource("pods"), "", fmt.Errorf("User %q cannot create resource %q in API group %q in the namespace %q", user, "pods", "", "ns"))
}

const command = "`kubectl create rolebinding fast-sandbox-controller --namespace ns --clusterrole fast-sandbox-pool-namespace "

func TestAsUnbound(t *testing.T) {
	account := notAuthorized("system:serviceaccount:fast-sandbox-system:controller")
	for name, tc := range map[string]struct {
		err  error
		want string // empty: the error stays as it is
	}{
		"no error":          {nil, ""},
		"a service account": {account, command + "--serviceaccount fast-sandbox-system:controller`"},
		"another user":      {notAuthorized("someone"), command + "--user someone`"},
		"a wrapped answer":  {fmt.Errorf("creating agent pod: %w", account), command},
		"one of several":    {errors.Join(nil, fmt.Errorf("reading the certificate: %w", account)), command},
		"admission":         {apierrors.NewForbidden(corev1.Resource("pods"), "a", errors.New("violates PodSecurity")), ""},
		"another error":     {errAPI, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := asUnbound(tc.err, "ns")
			if tc.want == "" {
				require.Equal(t, tc.err, err)
				return
			}
			require.ErrorContains(t, err, tc.want)
			require.ErrorIs(t, err, tc.err)
		})
	}
}

// TestUnboundNamespaceIsReported: the pool says what an administrator has to do, whatever the controller was refused.
func TestUnboundNamespaceIsReported(t *testing.T) {
	for name, tc := range map[string]struct {
		call    string
		objects []client.Object
	}{
		"a Pod cannot be created":                        {"create Pod", []client.Object{testPool(poolMin(1))}},
		"a terminated Pod cannot be deleted":             {"delete Pod", []client.Object{testPool(poolMin(1)), agentPod("a", inPhase(corev1.PodFailed))}},
		"the agent of a deleted pool cannot be drained":  {"patch Pod", []client.Object{testPool(beingDeleted), agentPod("a")}},
		"the last Pod of a deleted pool cannot be ended": {"delete Pod", []client.Object{testPool(beingDeleted), agentPod("a", inPhase(corev1.PodFailed))}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, tc.objects...)
			f.api.fail[tc.call] = notAuthorized("system:serviceaccount:fast-sandbox-system:controller")
			_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
			require.ErrorContains(t, err, command, "the pool must be reconciled again")
			progressing := meta.FindStatusCondition(f.pool().Status.Conditions, v1alpha1.ConditionProgressing)
			require.Equal(t, metav1.ConditionFalse, progressing.Status)
			require.Equal(t, reasonUnbound, progressing.Reason)
			require.Contains(t, progressing.Message, command)
		})
	}
}
