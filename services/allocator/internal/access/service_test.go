package access_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	testclock "k8s.io/utils/clock/testing"

	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/access"
)

const keyNamespace = "keys"

// decisions is an Authorizer with one answer.
type decisions struct {
	asked  []auth.Access
	answer auth.Decision
	err    error
}

func (d *decisions) Decide(_ context.Context, _ auth.Caller, what auth.Access) (auth.Decision, error) {
	d.asked = append(d.asked, what)
	return d.answer, d.err
}

type env struct {
	*access.Service
	cluster *fake.Clientset
	clock   *testclock.FakeClock
	rights  *decisions
}

// newEnv returns a service in a cluster with ServiceAccounts team-a/builder and team-b/builder.
func newEnv(t *testing.T) env {
	t.Helper()
	account := func(namespace string) runtime.Object {
		return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "builder", UID: "uid-of-builder"}}
	}
	e := env{cluster: fake.NewClientset(account("team-a"), account("team-b")), clock: testclock.NewFakeClock(time.Unix(1_900_000_000, 0)), rights: &decisions{}}
	e.Service = access.New(access.Config{Authorizer: e.rights, Core: e.cluster.CoreV1(), KeyNamespace: keyNamespace, Clock: e.clock})
	return e
}

// as returns the context of a call of a user.
func as(t *testing.T, user string) context.Context {
	t.Helper()
	return auth.WithCaller(t.Context(), auth.Caller{User: user, Groups: []string{"g"}, Method: auth.Certificate})
}

// authenticate returns whom a key stands for. It remembers nothing.
func (e env) authenticate(t *testing.T, key string) (auth.Caller, error) {
	t.Helper()
	accounts := func(namespace string) auth.Accounts { return e.cluster.CoreV1().ServiceAccounts(namespace) }
	return auth.NewKeys(e.cluster.CoreV1().Secrets(keyNamespace), accounts, auth.DefaultTiming(), e.clock).Authenticate(t.Context(), key)
}

func TestWhoAmI(t *testing.T) {
	e := newEnv(t)
	me, err := e.WhoAmI(as(t, "alice"), &authv1.WhoAmIRequest{})
	require.NoError(t, err)
	require.Equal(t, "alice", me.GetUser())
	require.Equal(t, []string{"g"}, me.GetGroups())
	require.Equal(t, authv1.Method_METHOD_CERTIFICATE, me.GetMethod())
}

// TestCallsWithoutUser: without authentication there is no user to answer about.
func TestCallsWithoutUser(t *testing.T) {
	e := newEnv(t)
	_, who := e.WhoAmI(t.Context(), &authv1.WhoAmIRequest{})
	_, may := e.CheckAccess(t.Context(), &authv1.CheckAccessRequest{})
	_, create := e.CreateAPIKey(t.Context(), &authv1.CreateAPIKeyRequest{Namespace: "team-a", ServiceAccount: "builder"})
	for _, err := range []error{who, may, create} {
		require.True(t, errdefs.IsUnauthorized(err), "%v", err)
		require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err))
	}
}

func TestCheckAccess(t *testing.T) {
	e := newEnv(t)
	core := ""
	e.rights.answer = auth.Decision{Allowed: true, Reason: "by role"}
	for _, tc := range []struct {
		in   *authv1.CheckAccessRequest
		want auth.Access
	}{
		{&authv1.CheckAccessRequest{Verb: "get", Resource: "sandboxes", Subresource: "log", Namespace: "team-a"},
			auth.Access{Verb: "get", Group: v1alpha1.Group, Resource: "sandboxes", Subresource: "log", Namespace: "team-a"}},
		{&authv1.CheckAccessRequest{Verb: "list", Resource: "pods", Group: &core}, auth.Access{Verb: "list", Resource: "pods"}},
	} {
		e.rights.asked = nil
		answer, err := e.CheckAccess(as(t, "alice"), tc.in)
		require.NoError(t, err)
		require.True(t, answer.GetAllowed())
		require.Equal(t, "by role", answer.GetReason())
		require.Equal(t, []auth.Access{tc.want}, e.rights.asked)
	}
	e.rights.err = errors.New("the API server is away")
	_, err := e.CheckAccess(as(t, "alice"), &authv1.CheckAccessRequest{Verb: "get", Resource: "sandboxes"})
	require.ErrorIs(t, err, e.rights.err)
}

// TestAPIKey creates, uses, lists and revokes a key.
func TestAPIKey(t *testing.T) {
	e := newEnv(t)
	made, err := e.CreateAPIKey(as(t, "alice"), &authv1.CreateAPIKeyRequest{Namespace: "team-a", ServiceAccount: "builder", Description: "CI", Ttl: durationpb.New(time.Hour)})
	require.NoError(t, err)
	require.Equal(t, "alice", made.GetApiKey().GetCreatedBy())
	require.Equal(t, e.clock.Now().Add(time.Hour).UTC(), made.GetApiKey().GetExpireTime().AsTime())

	c, err := e.authenticate(t, made.GetKey())
	require.NoError(t, err)
	require.Equal(t, "system:serviceaccount:team-a:builder", c.User)
	require.Contains(t, c.Groups, "system:serviceaccounts:team-a")
	require.Equal(t, auth.APIKey, c.Method)

	secrets, err := e.cluster.CoreV1().Secrets(keyNamespace).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, secrets.Items, 1)
	for name, value := range secrets.Items[0].Data {
		require.NotContains(t, made.GetKey(), string(value), "%s has a part of the key", name)
	}

	list, err := e.ListAPIKeys(as(t, "alice"), &authv1.ListAPIKeysRequest{Namespace: "team-a"})
	require.NoError(t, err)
	require.Len(t, list.GetApiKeys(), 1)
	require.Equal(t, "CI", list.GetApiKeys()[0].GetDescription())

	for range 2 { // also when it is gone
		_, err = e.RevokeAPIKey(as(t, "alice"), &authv1.RevokeAPIKeyRequest{Namespace: "team-a", Id: made.GetApiKey().GetId()})
		require.NoError(t, err)
	}
	_, err = e.authenticate(t, made.GetKey())
	require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err))
}

// TestAPIKeyEnds: a key ends at its time, and with its ServiceAccount.
func TestAPIKeyEnds(t *testing.T) {
	e := newEnv(t)
	create := func(ttl time.Duration) string {
		t.Helper()
		in := &authv1.CreateAPIKeyRequest{Namespace: "team-a", ServiceAccount: "builder"}
		if ttl > 0 {
			in.Ttl = durationpb.New(ttl)
		}
		made, err := e.CreateAPIKey(as(t, "alice"), in)
		require.NoError(t, err)
		return made.GetKey()
	}
	short, long := create(time.Minute), create(0)
	e.clock.Step(time.Minute)
	_, err := e.authenticate(t, short)
	require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err))
	_, err = e.authenticate(t, long)
	require.NoError(t, err)

	accounts := e.cluster.CoreV1().ServiceAccounts("team-a")
	require.NoError(t, accounts.Delete(t.Context(), "builder", metav1.DeleteOptions{}))
	_, err = accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "builder", UID: "another"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = e.authenticate(t, long)
	require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err), "a new ServiceAccount of the same name is not the old one")
}

// TestForeignAPIKeys: the right in one namespace shows and revokes no keys of another, whatever their labels say.
func TestForeignAPIKeys(t *testing.T) {
	e := newEnv(t)
	made, err := e.CreateAPIKey(as(t, "bob"), &authv1.CreateAPIKeyRequest{Namespace: "team-b", ServiceAccount: "builder"})
	require.NoError(t, err)
	secrets := e.cluster.CoreV1().Secrets(keyNamespace)
	s, err := secrets.Get(t.Context(), auth.SecretPrefix+made.GetApiKey().GetId(), metav1.GetOptions{})
	require.NoError(t, err)
	for key := range s.Labels {
		s.Labels[key] = "team-a"
	}
	_, err = secrets.Update(t.Context(), s, metav1.UpdateOptions{})
	require.NoError(t, err)

	list, err := e.ListAPIKeys(as(t, "alice"), &authv1.ListAPIKeysRequest{Namespace: "team-a"})
	require.NoError(t, err)
	require.Empty(t, list.GetApiKeys())
	_, err = e.RevokeAPIKey(as(t, "alice"), &authv1.RevokeAPIKeyRequest{Namespace: "team-a", Id: made.GetApiKey().GetId()})
	require.NoError(t, err)
	_, err = e.authenticate(t, made.GetKey())
	require.NoError(t, err, "the key of team-b is still valid")
}

func TestAPIKeyErrors(t *testing.T) {
	e := newEnv(t)
	_, err := e.CreateAPIKey(as(t, "alice"), &authv1.CreateAPIKeyRequest{Namespace: "team-a", ServiceAccount: "none"})
	require.Equal(t, fault.ServiceAccountNotFound, fault.ReasonOf(err))
	e.cluster.PrependReactor("*", "secrets", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("the API server is away")
	})
	_, create := e.CreateAPIKey(as(t, "alice"), &authv1.CreateAPIKeyRequest{Namespace: "team-a", ServiceAccount: "builder"})
	_, list := e.ListAPIKeys(as(t, "alice"), &authv1.ListAPIKeysRequest{Namespace: "team-a"})
	_, revoke := e.RevokeAPIKey(as(t, "alice"), &authv1.RevokeAPIKeyRequest{Namespace: "team-a", Id: "id"})
	for _, err := range []error{create, list, revoke} {
		require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "%v", err)
	}
}
