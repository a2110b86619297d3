package tunnel_test

import (
	"fmt"
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
	_, err = answers(t, map[string]string{"/api": `{"kind":"Status"}`}).Kinds(t.Context())
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	_, err = answers(t, map[string]string{"/api/v1/pods": `{`}).Names(t.Context(), kinds.Kind{Version: "v1", Resource: "pods"}, "")
	require.ErrorContains(t, err, "listing pods")
}

// TestKindsWithoutAggregatedDiscovery: an API server older than Kubernetes 1.27, or a proxy that does not pass the media types on.
func TestKindsWithoutAggregatedDiscovery(t *testing.T) {
	const deployments = `{"kind":"APIResourceList","resources":[{"name":"deployments","singularName":"deployment","namespaced":true,"kind":"Deployment",
		"verbs":["list"],"shortNames":["deploy"]}%s]}`
	paths := map[string]string{
		"/api":    `{"kind":"APIVersions","versions":["v1"]}`,
		"/api/v1": `{"kind":"APIResourceList","resources":[{"name":"pods","singularName":"pod","namespaced":true,"kind":"Pod","verbs":["list"]},{"name":"pods/log","kind":"Pod"}]}`,
		"/apis": `{"kind":"APIGroupList","groups":[
			{"name":"apps","versions":[{"version":"v1beta1"},{"version":"v1"}],"preferredVersion":{"version":"v1"}},
			{"name":"down.example.com","versions":[{"version":"v1"}],"preferredVersion":{"version":"v1"}}]}`,
		"/apis/apps/v1":      fmt.Sprintf(deployments, ""),
		"/apis/apps/v1beta1": fmt.Sprintf(deployments, `,{"name":"olds","kind":"Old"}`),
		// down.example.com is refused: its server is down, or this user may not read it.
		"/apis/apps/v1/namespaces/ns/deployments": `{"items":[{"metadata":{"name":"web"}}]}`,
	}
	c := answers(t, paths)
	all, err := c.Kinds(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 3)
	deploy, ok := all.Find("deploy")
	require.True(t, ok)
	require.Equal(t, "v1", deploy.Version, "the preferred version")
	require.True(t, deploy.Namespaced)
	names, err := c.Names(t.Context(), deploy, "ns")
	require.NoError(t, err)
	require.Equal(t, []string{"web"}, names)
	old, ok := all.Find("olds.apps")
	require.True(t, ok)
	require.Equal(t, "v1beta1", old.Version)

	delete(paths, "/api/v1")
	_, err = answers(t, paths).Kinds(t.Context())
	require.True(t, errdefs.IsPermissionDenied(err), "nothing of the core group can be read: %v", err)
}
