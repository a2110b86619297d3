package auth_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// FuzzAPIKey presents arbitrary text as an API key. Only the key that exists is accepted, and no text makes the API server look for a
// Secret that is none of keys.
func FuzzAPIKey(f *testing.F) {
	keys, s, _, text, k := newKeys(f)
	var asked []string
	s.named = func(name string) { asked = append(asked, name) }
	for _, seed := range []string{text, text + "a", text[:len(text)-1], strings.ToUpper(text), "fsb_", "fsb_" + k.ID + "_", "fsb_../../../default/_x", "fsb_" + k.ID + "_\x00", " " + text} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, presented string) {
		asked = nil
		c, err := keys.Authenticate(t.Context(), presented)
		for _, name := range asked {
			require.Regexp(t, "^"+auth.SecretPrefix+"[a-z0-9]{16}$", name)
		}
		if presented == text {
			require.NoError(t, err)
			require.Equal(t, "system:serviceaccount:team:builder", c.User)
			return
		}
		require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err), "%v", err)
		require.Zero(t, c)
		require.NotContains(t, err.Error(), "secret")
	})
}

// FuzzAPIKeySecret reads Secrets with arbitrary data: what is accepted names a ServiceAccount.
func FuzzAPIKeySecret(f *testing.F) {
	f.Add("apikey-x", "team", "builder", "uid", "2030-01-02T03:04:05Z")
	f.Add("apikey-", "", "", "", "")
	f.Add("other", "team", "builder", "uid", "soon")
	f.Fuzz(func(t *testing.T, name, namespace, account, uid, expires string) {
		k, ok := auth.ReadKey(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Type: auth.SecretType, Data: map[string][]byte{
			"namespace": []byte(namespace), "service-account": []byte(account), "service-account-uid": []byte(uid), "expires": []byte(expires),
		}})
		if !ok {
			return
		}
		require.True(t, strings.HasPrefix(name, auth.SecretPrefix))
		require.NotContains(t, []string{k.Namespace, k.ServiceAccount, k.UID}, "")
	})
}
