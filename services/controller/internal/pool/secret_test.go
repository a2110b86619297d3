package pool

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func certificate(namespace, content string, labels map[string]string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "agent-tls", Labels: labels}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{"tls.crt": []byte(content)}}
}

var managed = map[string]string{labelManagedBy: managedBy}

func (f *fixture) mirror(p *v1alpha1.SandboxPool) error {
	f.secrets.config.Injection.Insecure = false
	return f.secrets.mirror(f.t.Context(), p)
}

func (f *fixture) copied() *corev1.Secret {
	f.t.Helper()
	var s corev1.Secret
	require.NoError(f.t, f.client.Get(f.t.Context(), types.NamespacedName{Namespace: "ns", Name: "agent-tls"}, &s))
	return &s
}

func TestCertificateIsCopied(t *testing.T) {
	for name, tc := range map[string]struct {
		objects []client.Object
		writes  []string
	}{
		"missing":    {nil, []string{"create Secret"}},
		"outdated":   {[]client.Object{certificate("ns", "old", managed)}, []string{"patch Secret"}},
		"up to date": {[]client.Object{certificate("ns", "new", managed)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, append(tc.objects, certificate("system", "new", nil))...)
			require.NoError(t, f.mirror(testPool()))
			require.Equal(t, tc.writes, f.api.calls)
			require.Equal(t, "new", string(f.copied().Data["tls.crt"]))
			require.Equal(t, corev1.SecretTypeTLS, f.copied().Type)
			require.Equal(t, managedBy, f.copied().Labels[labelManagedBy])
		})
	}
}

func TestCertificateIsNotCopied(t *testing.T) {
	t.Run("agents without TLS", func(t *testing.T) {
		f := newFixture(t)
		require.NoError(t, f.secrets.mirror(t.Context(), testPool()))
	})
	t.Run("a pool in the controller's namespace", func(t *testing.T) {
		f := newFixture(t)
		require.NoError(t, f.mirror(testPool(func(p *v1alpha1.SandboxPool) { p.Namespace = "system" })))
	})
}

// A Secret that the controller has not created is an error of the configuration, and is not changed.
func TestForeignSecretIsKept(t *testing.T) {
	f := newFixture(t, certificate("system", "new", nil), certificate("ns", "mine", map[string]string{labelManagedBy: "helm"}))
	err := f.mirror(testPool())
	var invalid *templateError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "SecretConflict", invalid.reason)
	require.Contains(t, err.Error(), "namespace ns has a Secret agent-tls that is not labeled app.kubernetes.io/managed-by=fast-sandbox-controller")
	require.Empty(t, f.api.calls)
}

// The copy is checked again after secretCheck, and at once if the certificate changes or the namespace has another pool.
func TestCopyIsCheckedOnceAMinute(t *testing.T) {
	f := newFixture(t, certificate("system", "new", nil))
	require.NoError(t, f.mirror(testPool()))
	remove := func() { require.NoError(t, f.client.Delete(t.Context(), certificate("ns", "", nil))) }
	remove()
	require.NoError(t, f.mirror(testPool()))
	require.Equal(t, 1, f.api.writes("create Secret"))

	f.clock.Step(secretCheck)
	require.NoError(t, f.mirror(testPool()))
	require.Equal(t, 2, f.api.writes("create Secret"))

	remove()
	require.NoError(t, f.mirror(testPool(func(p *v1alpha1.SandboxPool) { p.UID = "again" })))
	require.Equal(t, 3, f.api.writes("create Secret"))

	renewed := certificate("system", "renewed", nil)
	require.NoError(t, f.client.Update(t.Context(), renewed))
	require.NoError(t, f.mirror(testPool()))
	require.Equal(t, "renewed", string(f.copied().Data["tls.crt"]))

	f.clock.Step(secretCheck)
	require.NoError(t, f.mirror(testPool()))
	require.Len(t, f.secrets.checked, 1, "pools that were removed are remembered")
}

func TestCopyErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		objects []client.Object
		call    string
		message string
	}{
		"no certificate":          {nil, "", "reading secret system/agent-tls with the agents' certificate"},
		"the copy cannot be read": {[]client.Object{certificate("system", "new", nil)}, "get Secret", "reading secret system/agent-tls"},
		"it cannot be created":    {[]client.Object{certificate("system", "new", nil)}, "create Secret", "copying secret agent-tls to namespace ns"},
		"it cannot be updated":    {[]client.Object{certificate("system", "new", nil), certificate("ns", "old", managed)}, "patch Secret", "copying secret agent-tls to namespace ns"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, tc.objects...)
			f.api.fail[tc.call] = errAPI
			err := f.mirror(testPool())
			require.ErrorContains(t, err, tc.message)
			if tc.call == "" {
				require.True(t, apierrors.IsNotFound(err))
				return
			}
			require.ErrorIs(t, err, errAPI)
			delete(f.api.fail, tc.call)
			require.NoError(t, f.mirror(testPool()), "the failure was cached")
			require.Equal(t, "new", string(f.copied().Data["tls.crt"]))
		})
	}
}
