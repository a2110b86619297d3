package tunnel_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// answers is an API server that answers each path with something fixed; what has no answer is forbidden.
func answers(t *testing.T, byPath map[string]string) *tunnel.Cluster {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := byPath[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		if r.Header.Get("Accept") == "" {
			t.Errorf("%s: no media type asked for", r.URL.Path)
		}
		w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	c, err := tunnel.New(&rest.Config{Host: s.URL})
	require.NoError(t, err)
	return c
}

func TestKinds(t *testing.T) {
	const list = `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{"name":"GROUP"},"versions":[{"version":"v1","resources":[
		{"resource":"THINGs","responseKind":{"kind":"THING"},"scope":"Namespaced","verbs":["list"]}]}]}]}`
	c := answers(t, map[string]string{"/api": list, "/apis": list, "/apis/GROUP/v1/namespaces/ns/THINGs": `{"items":[{"metadata":{"name":"a"}},{"metadata":{"name":"b"}}]}`})
	all, err := c.Kinds(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
	thing, ok := all.Find("things.group")
	require.True(t, ok)
	names, err := c.Names(t.Context(), thing, "ns")
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, names)
	_, err = c.Names(t.Context(), thing, "other")
	require.True(t, errdefs.IsPermissionDenied(err), "%v", err)
	require.Equal(t, tunnel.ReasonCluster, fault.ReasonOf(err))
}

func TestKindsRefused(t *testing.T) {
	_, err := answers(t, nil).Kinds(t.Context())
	require.True(t, errdefs.IsPermissionDenied(err), "%v", err)
	_, err = answers(t, map[string]string{"/api": `{"kind":"APIVersions"}`}).Kinds(t.Context())
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	require.ErrorContains(t, err, "1.27")
	_, err = answers(t, map[string]string{"/api/v1/pods": `{`}).Names(t.Context(), kinds.Kind{Version: "v1", Resource: "pods"}, "")
	require.ErrorContains(t, err, "listing pods")
}
