//go:build e2e

package e2e_test

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// user is a caller with a token and without a certificate.
type user struct{ token string }

// serviceAccount returns a user that is a new ServiceAccount, bound to a ClusterRole in the namespace of the tests if one is given.
func serviceAccount(t *testing.T, role string) (name string, u user) {
	t.Helper()
	name = uniqueName("user")
	kubectl(t, "create", "serviceaccount", name)
	t.Cleanup(func() { kubectl(t, "delete", "serviceaccount", name) })
	if role != "" {
		kubectl(t, "create", "rolebinding", name, "--clusterrole", role, "--serviceaccount", cluster.Namespace+":"+name)
		t.Cleanup(func() { kubectl(t, "delete", "rolebinding", name) })
	}
	return name, user{strings.TrimSpace(kubectl(t, "create", "token", name, "--audience", "fast-sandbox.io"))}
}

// fsbctl runs fsb-ctl as the user.
func (u user) fsbctl(t *testing.T, args ...string) cluster.Result {
	t.Helper()
	return cluster.Exec(t, "env", append([]string{"-u", "FSB_CERT", "-u", "FSB_KEY", "FSB_TOKEN=" + u.token, cluster.Binary(t, "fsb-ctl")}, args...)...)
}

// get reads a path of the gateway as the user, if it has a token.
func (u user) get(t *testing.T, path string, header ...string) (int, string) {
	t.Helper()
	tls := cluster.TLS(t)
	tls.CertFile, tls.KeyFile = "", ""
	cfg, err := tls.ClientConfig("gateway.fast-sandbox.io")
	require.NoError(t, err)
	transport := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, cluster.Env(t, "FSB_GATEWAY")+path, nil)
	require.NoError(t, err)
	if u.token != "" {
		req.Header.Set("Authorization", "Bearer "+u.token)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body)
}

const listPath = "/v1/namespaces/" + cluster.Namespace + "/sandboxes"

// TestUserOfNamespace is the README's user: what it may do in its namespace, and that it may do nothing else.
func TestUserOfNamespace(t *testing.T) {
	name, u := serviceAccount(t, "fast-sandbox-edit")
	r := u.fsbctl(t, "auth", "whoami")
	require.Zero(t, r.Code, r.Stderr)
	require.Contains(t, r.Stdout, "system:serviceaccount:"+cluster.Namespace+":"+name)
	require.Zero(t, u.fsbctl(t, "auth", "can-i", "create", "sandboxes").Code)
	require.Equal(t, 9, u.fsbctl(t, "auth", "can-i", "create", "sandboxes", "-n", "kube-system").Code)

	r = u.fsbctl(t, "run", uniqueName("mine"), "--image", cluster.Busybox, "--pool", cluster.Pool, "--rm", "--", "echo", "hello")
	require.Zero(t, r.Code, r.Stderr)
	require.Equal(t, "hello\n", r.Stdout)
	code, body := u.get(t, listPath)
	require.Equal(t, http.StatusOK, code, body)
	out := cluster.OK(t, "tools/grpcurl", "-cacert", cluster.Env(t, "FSB_CACERT"), "-H", "authorization: Bearer "+u.token,
		"-d", `{"namespace":"`+cluster.Namespace+`"}`, cluster.Env(t, "FSB_ADDR"), "fastsandbox.sandbox.v1.SandboxService/ListSandboxes")
	require.Contains(t, out, "{")

	for _, args := range [][]string{
		{"list", "--all-namespaces"}, {"list", "-n", "kube-system"},
		{"run", uniqueName("foreign"), "-n", "kube-system", "--image", cluster.Busybox, "--pool", cluster.Pool, "--", "true"},
		{"apikey", "create", name}, {"janitor", "verdicts", "--node", strings.TrimSpace(kubectl(t, "get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"))},
	} {
		r := u.fsbctl(t, args...)
		require.NotZero(t, r.Code, "%v\n%s", args, r.Stdout)
		require.Contains(t, r.Stderr, "PERMISSION_DENIED", "%v", args)
	}
}

// TestStrangers: who proves nothing, or proves something else than a user of ours, gets nothing.
func TestStrangers(t *testing.T) {
	name, stranger := serviceAccount(t, "")
	forAPIServer := user{strings.TrimSpace(kubectl(t, "create", "token", name))}
	for what, tc := range map[string]struct {
		user   user
		header []string
		code   int
		reason string
	}{
		"no proof":                     {user{}, nil, http.StatusUnauthorized, "UNAUTHENTICATED"},
		"nonsense":                     {user{"nonsense"}, nil, http.StatusUnauthorized, "UNAUTHENTICATED"},
		"a token for the API server":   {forAPIServer, nil, http.StatusUnauthorized, "UNAUTHENTICATED"},
		"an API key that is not known": {user{"fsb_aaaaaaaaaaaaaaaa_bbbbbbbbbbbbbbbbbbbbbbbbbb"}, nil, http.StatusUnauthorized, "UNAUTHENTICATED"},
		"no right":                     {stranger, nil, http.StatusForbidden, "PERMISSION_DENIED"},
		"no right, and another's name": {stranger, []string{"Grpc-Metadata-Fast-Sandbox-Caller-Bin",
			base64.StdEncoding.EncodeToString([]byte(`{"User":"admin","Groups":["system:masters"]}`))}, http.StatusForbidden, "PERMISSION_DENIED"},
	} {
		t.Run(what, func(t *testing.T) {
			code, body := tc.user.get(t, listPath, tc.header...)
			require.Equal(t, tc.code, code, body)
			require.Contains(t, body, tc.reason)
			if tc.user.token == "" {
				return // fsb-ctl does not ask without credentials
			}
			r := tc.user.fsbctl(t, "list")
			require.Equal(t, 9, r.Code, r.Stderr)
			require.Contains(t, r.Stderr, tc.reason)
		})
	}
}

// TestAPIKey creates a key, uses it, and waits until its revocation has taken effect.
func TestAPIKey(t *testing.T) {
	name, _ := serviceAccount(t, "fast-sandbox-view")
	key := user{strings.TrimSpace(fsbctl(t, "apikey", "create", name, "--description", uuid.NewString()))}
	require.Zero(t, key.fsbctl(t, "list").Code)
	require.Equal(t, 9, key.fsbctl(t, "delete", "any").Code, "the role may only view")
	id, _, _ := strings.Cut(strings.TrimPrefix(key.token, "fsb_"), "_")
	require.Contains(t, fsbctl(t, "apikey", "list"), id)
	require.NotContains(t, fsbctl(t, "apikey", "list", "-o", "json"), key.token)
	fsbctl(t, "apikey", "revoke", id)
	require.True(t, eventually(20*time.Second, func() bool { return key.fsbctl(t, "list").Code == 9 }))
}
