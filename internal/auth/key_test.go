package auth_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// keyServer keeps the Secrets of API keys, and ServiceAccounts of one namespace.
type keyServer struct {
	apiServer

	// named is called with the name of each Secret that is asked for, if it is set.
	named    func(name string)
	secrets  map[string]*corev1.Secret
	accounts map[string]string // uid by name
}

type keySecrets struct{ *keyServer }

func (s keySecrets) Get(ctx context.Context, name string, _ metav1.GetOptions) (*corev1.Secret, error) {
	if err := s.receive(ctx); err != nil {
		return nil, err
	}
	if s.named != nil {
		s.named(name)
	}
	if secret, ok := s.secrets[name]; ok {
		return secret, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "secrets"}, name)
}

type keyAccounts struct {
	*keyServer
	namespace string
}

func (s keyAccounts) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.ServiceAccount, error) {
	uid, ok := s.accounts[name]
	if s.namespace != "team" || !ok {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "serviceaccounts"}, name)
	}
	return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name, UID: "uid-" + "builder"}}, func() error {
		if uid == "" {
			return errAway
		}
		return nil
	}()
}

var keyTime = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// newKeys returns an authenticator and a key for the ServiceAccount team/builder that ends after an hour.
func newKeys(t testing.TB) (*auth.Keys, *keyServer, *clocktesting.FakePassiveClock, string, auth.Key) {
	t.Helper()
	k := auth.Key{Namespace: "team", ServiceAccount: "builder", UID: "uid-builder", Description: "CI", Creator: "alice", Expires: keyTime.Add(time.Hour)}
	text, data := auth.NewKey(&k)
	name := auth.SecretPrefix + k.ID
	s := &keyServer{
		secrets:  map[string]*corev1.Secret{name: {ObjectMeta: metav1.ObjectMeta{Name: name}, Type: auth.SecretType, Data: data}},
		accounts: map[string]string{"builder": "uid-builder"},
	}
	clock := clocktesting.NewFakePassiveClock(keyTime)
	accounts := func(namespace string) auth.Accounts { return keyAccounts{s, namespace} }
	return auth.NewKeys(keySecrets{s}, accounts, auth.DefaultTiming(), clock), s, clock, text, k
}

func TestKeyIsAServiceAccount(t *testing.T) {
	keys, s, _, text, k := newKeys(t)
	c, err := keys.Authenticate(t.Context(), text)
	require.NoError(t, err)
	require.Equal(t, auth.Caller{
		User: "system:serviceaccount:team:builder", UID: "uid-builder", Method: auth.APIKey,
		Groups: []string{"system:authenticated", "system:serviceaccounts", "system:serviceaccounts:team"},
	}, c)
	read, ok := auth.ReadKey(s.secrets[auth.SecretPrefix+k.ID])
	require.True(t, ok)
	require.Equal(t, k, read)
	secret := text[strings.LastIndex(text, "_")+1:]
	for name, value := range s.secrets[auth.SecretPrefix+k.ID].Data {
		require.NotContains(t, string(value), secret, "%s keeps the secret", name)
	}
}

// TestKeysThatAreRefused: each is UNAUTHENTICATED, with a message that does not say why, except for what has not the form of a key.
func TestKeysThatAreRefused(t *testing.T) {
	for name, change := range map[string]func(s *keyServer, c *clocktesting.FakePassiveClock, text string, secret *corev1.Secret) string{
		"another secret": func(_ *keyServer, _ *clocktesting.FakePassiveClock, text string, _ *corev1.Secret) string {
			return text[:len(text)-1] + map[bool]string{true: "b", false: "a"}[text[len(text)-1] == 'a']
		},
		"revoked": func(s *keyServer, _ *clocktesting.FakePassiveClock, text string, secret *corev1.Secret) string {
			delete(s.secrets, secret.Name)
			return text
		},
		"ended": func(_ *keyServer, c *clocktesting.FakePassiveClock, text string, _ *corev1.Secret) string {
			c.SetTime(keyTime.Add(time.Hour))
			return text
		},
		"service account deleted": func(s *keyServer, _ *clocktesting.FakePassiveClock, text string, _ *corev1.Secret) string {
			delete(s.accounts, "builder")
			return text
		},
		"service account created again": func(_ *keyServer, _ *clocktesting.FakePassiveClock, text string, secret *corev1.Secret) string {
			secret.Data["service-account-uid"] = []byte("uid-former")
			return text
		},
		"a Secret of another type": func(_ *keyServer, _ *clocktesting.FakePassiveClock, text string, secret *corev1.Secret) string {
			secret.Type = corev1.SecretTypeOpaque
			return text
		},
		"an expiry that cannot be read": func(_ *keyServer, _ *clocktesting.FakePassiveClock, text string, secret *corev1.Secret) string {
			secret.Data["expires"] = []byte("soon")
			return text
		},
		"no hash": func(_ *keyServer, _ *clocktesting.FakePassiveClock, text string, secret *corev1.Secret) string {
			delete(secret.Data, "hash")
			return text
		},
		"no secret": func(*keyServer, *clocktesting.FakePassiveClock, string, *corev1.Secret) string {
			return "fsb_abcdefghijklmnop_"
		},
		"a path": func(*keyServer, *clocktesting.FakePassiveClock, string, *corev1.Secret) string {
			return "fsb_../../../default/_x"
		},
		"the id is cut": func(*keyServer, *clocktesting.FakePassiveClock, string, *corev1.Secret) string { return "fsb_abc_def" },
	} {
		t.Run(name, func(t *testing.T) {
			keys, s, clock, text, k := newKeys(t)
			text = change(s, clock, text, s.secrets[auth.SecretPrefix+k.ID])
			_, err := keys.Authenticate(t.Context(), text)
			require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err), "%v", err)
		})
	}
}

// TestKeysWithoutTheAPIServer: a key that was accepted stays so for a while, and ends at its own end at the latest.
func TestKeysWithoutTheAPIServer(t *testing.T) {
	keys, s, clock, text, _ := newKeys(t)
	_, err := keys.Authenticate(t.Context(), text)
	require.NoError(t, err)
	s.set(func(s *apiServer) { s.away = true })
	clock.SetTime(keyTime.Add(time.Minute))
	_, err = keys.Authenticate(t.Context(), text)
	require.NoError(t, err)
	clock.SetTime(keyTime.Add(6 * time.Minute))
	_, err = keys.Authenticate(t.Context(), text)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "%v", err)
	_, again := fault.RetryAfter(err)
	require.True(t, again)
}

// TestServiceAccountCannotBeAsked: no answer is no evidence that the key is invalid.
func TestServiceAccountCannotBeAsked(t *testing.T) {
	keys, s, _, text, _ := newKeys(t)
	s.accounts["builder"] = ""
	_, err := keys.Authenticate(t.Context(), text)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "%v", err)
}
