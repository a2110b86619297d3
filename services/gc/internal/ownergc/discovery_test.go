package ownergc_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// shown is a fixed result of discovery.
type shown struct {
	groups []*metav1.APIGroup
	lists  []*metav1.APIResourceList
	err    error
}

func (s shown) ServerGroupsAndResources() ([]*metav1.APIGroup, []*metav1.APIResourceList, error) {
	return s.groups, s.lists, s.err
}

func group(name string, versions ...string) *metav1.APIGroup {
	g := &metav1.APIGroup{Name: name, PreferredVersion: metav1.GroupVersionForDiscovery{Version: versions[0]}}
	for _, v := range versions {
		g.Versions = append([]metav1.GroupVersionForDiscovery{{Version: v}}, g.Versions...) // the preferred one last
	}
	return g
}

func list(groupVersion string, api ...metav1.APIResource) *metav1.APIResourceList {
	return &metav1.APIResourceList{GroupVersion: groupVersion, APIResources: api}
}

func api(name, kind string, namespaced bool, verbs ...string) metav1.APIResource {
	return metav1.APIResource{Name: name, Kind: kind, Namespaced: namespaced, Verbs: verbs}
}

var all = []string{"get", "list", "watch", "delete", "patch"} //nolint:gochecknoglobals // a constant

func TestDiscover(t *testing.T) {
	found, err := ownergc.Discover(shown{
		groups: []*metav1.APIGroup{group("", "v1"), group("apps", "v1", "v1beta1")},
		lists: []*metav1.APIResourceList{
			list("v1", api("pods", "Pod", true, all...), api("pods/status", "Pod", true, all...), api("nodes", "Node", false, all...),
				api("events", "Event", true, all...), api("bindings", "Binding", true, "create"), api("readonly", "ReadOnly", true, "get", "list", "watch")),
			list("apps/v1beta1", api("deployments", "Deployment", true, all...), api("old", "Old", true, all...)),
			list("apps/v1", api("deployments", "Deployment", true, all...)),
		},
	}, []schema.GroupResource{{Resource: "events"}})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"Pod": "v1/pods", "Node": "v1/nodes", "Deployment.apps": "apps/v1/deployments", "Old.apps": "apps/v1beta1/old"}, found.Watched())
	require.Equal(t, map[graph.Kind]graph.Scope{
		{Kind: "Pod"}: graph.ScopeNamespaced, {Kind: "Node"}: graph.ScopeCluster, {Kind: "Event"}: graph.ScopeNamespaced,
		{Kind: "ReadOnly"}: graph.ScopeNamespaced, {Group: "apps", Kind: "Deployment"}: graph.ScopeNamespaced, {Group: "apps", Kind: "Old"}: graph.ScopeNamespaced,
	}, found.Scopes())
	require.Equal(t, 2, found.Versions(graph.Kind{Group: "apps", Kind: "Deployment"}))
}

func TestUnreadableGroupKeepsItsResources(t *testing.T) {
	before, err := ownergc.Discover(shown{groups: []*metav1.APIGroup{group("", "v1"), group("away", "v1"), group("gone", "v1")}, lists: []*metav1.APIResourceList{
		list("v1", api("pods", "Pod", true, all...)), list("away/v1", api("things", "Thing", true, all...)), list("gone/v1", api("relics", "Relic", true, all...))}}, nil)
	require.NoError(t, err)
	now, err := ownergc.Discover(shown{
		groups: []*metav1.APIGroup{group("", "v1"), group("away", "v1")},
		lists:  []*metav1.APIResourceList{list("v1", api("pods", "Pod", true, all...))},
		err:    &discovery.ErrGroupDiscoveryFailed{Groups: map[schema.GroupVersion]error{{Group: "away", Version: "v1"}: errors.New("503")}},
	}, nil)
	require.NoError(t, err)
	now.Keep(before)
	require.Contains(t, now.Watched(), "Thing.away")
	require.Equal(t, 1, now.Versions(graph.Kind{Group: "away", Kind: "Thing"}))
	require.NotContains(t, now.Watched(), "Relic.gone")
	require.Equal(t, 1, now.Failed())
}

func TestEmptyDiscoveryIsAnError(t *testing.T) {
	_, err := ownergc.Discover(shown{}, nil)
	require.ErrorIs(t, err, ownergc.ErrNoResources)
	away := errors.New("connection refused")
	_, err = ownergc.Discover(shown{err: away}, nil)
	require.ErrorIs(t, err, away)
}

// TestDiscoverWithoutAggregation: an API server older than Kubernetes 1.27 lists kinds for each group and version. One of its
// groups is served by an extension server that is down.
func TestDiscoverWithoutAggregation(t *testing.T) {
	paths := map[string]string{
		"/api":    `{"kind":"APIVersions","versions":["v1"]}`,
		"/api/v1": `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"pods","kind":"Pod","namespaced":true,"verbs":["get","list","watch","delete"]}]}`,
		"/apis": `{"kind":"APIGroupList","groups":[
			{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}],"preferredVersion":{"groupVersion":"apps/v1","version":"v1"}},
			{"name":"down","versions":[{"groupVersion":"down/v1","version":"v1"}],"preferredVersion":{"groupVersion":"down/v1","version":"v1"}}]}`,
		"/apis/apps/v1": `{"kind":"APIResourceList","groupVersion":"apps/v1","resources":[{"name":"deployments","kind":"Deployment","namespaced":true,"verbs":["get","list","watch","delete"]}]}`,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		body, ok := paths[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write([]byte(body))
	}))
	defer server.Close()
	client, err := discovery.NewDiscoveryClientForConfig(&rest.Config{Host: server.URL})
	require.NoError(t, err)
	found, err := ownergc.Discover(client, nil)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"Pod": "v1/pods", "Deployment.apps": "apps/v1/deployments"}, found.Watched())
	require.Equal(t, 1, found.Failed())
}
