package kinds_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
)

const core = `{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[{"metadata":{},"versions":[{"version":"v1","resources":[
 {"resource":"pods","responseKind":{"group":"","version":"v1","kind":"Pod"},"scope":"Namespaced","singularResource":"pod","shortNames":["po"],"verbs":["get","list"]},
 {"resource":"nodes","responseKind":{"kind":"Node"},"scope":"Cluster","singularResource":"node","shortNames":["no"],"verbs":["list"]},
 {"resource":"bindings","responseKind":{"kind":"Binding"},"scope":"Namespaced","singularResource":"binding","verbs":["create"]},
 {"resource":"events","responseKind":{"kind":"Event"},"scope":"Namespaced","singularResource":"event","shortNames":["ev"],"verbs":["list"]},
 {"resource":"odd","scope":"Namespaced"}]}]}]}`

const groups = `{"kind":"APIGroupDiscoveryList","items":[
 {"metadata":{"name":"apps"},"versions":[{"version":"v1","resources":[
  {"resource":"deployments","responseKind":{"kind":"Deployment"},"scope":"Namespaced","singularResource":"deployment","shortNames":["deploy"],"verbs":["list"]}]},
  {"version":"v1beta1","resources":[{"resource":"deployments","responseKind":{"kind":"Deployment"},"scope":"Namespaced","shortNames":["deploy"]}]}]},
 {"metadata":{"name":"events.k8s.io"},"versions":[{"version":"v1","resources":[
  {"resource":"events","responseKind":{"kind":"Event"},"scope":"Namespaced","singularResource":"event","shortNames":["ev"],"verbs":["list"]}]}]},
 {"metadata":{"name":"example.com"},"versions":[{"version":"v1","resources":[
  {"resource":"po","responseKind":{"kind":"PO"},"scope":"Cluster","shortNames":["deploy"]}]}]}]}`

func all(t *testing.T) kinds.List {
	t.Helper()
	one, err := kinds.Decode([]byte(core))
	require.NoError(t, err)
	two, err := kinds.Decode([]byte(groups))
	require.NoError(t, err)
	return append(one, two...)
}

func TestFind(t *testing.T) {
	list := all(t)
	require.Len(t, list, 7, "one version of each kind, and nothing that is no kind")
	for spelling, want := range map[string]string{
		"pods": "Pod", "pod": "Pod", "Pod": "Pod", "PODS": "Pod", "pods.v1.": "Pod", "pods.": "Pod",
		"po": "PO.example.com", // a name goes before another's short one
		"no": "Node", "deploy": "Deployment.apps", "Deployment": "Deployment.apps", "deployments.apps": "Deployment.apps",
		"deploy.apps": "Deployment.apps", "deployments.v1.apps": "Deployment.apps", "deploy.example.com": "PO.example.com",
		"events": "Event", "ev.events.k8s.io": "Event.events.k8s.io", "events.events.k8s.io": "Event.events.k8s.io",
	} {
		found, ok := list.Find(spelling)
		require.True(t, ok, spelling)
		require.Equal(t, want, found.String(), spelling)
	}
	for _, spelling := range []string{"", ".", "deployment.", "deployments.app", "deployments.v2.apps", "webs", "odd"} {
		_, ok := list.Find(spelling)
		require.False(t, ok, spelling)
	}
}

func TestPath(t *testing.T) {
	list := all(t)
	for spelling, want := range map[string]string{
		"pods": "/api/v1/namespaces/ns/pods", "nodes": "/api/v1/nodes", "deploy": "/apis/apps/v1/namespaces/ns/deployments", "po": "/apis/example.com/v1/po",
	} {
		found, _ := list.Find(spelling)
		require.Equal(t, want, found.Path("ns"))
	}
	pods, _ := list.Find("pods")
	require.Equal(t, "/api/v1/pods", pods.Path(""))
	require.True(t, pods.Listed)
	bindings, _ := list.Find("bindings")
	require.False(t, bindings.Listed)
}

func TestParse(t *testing.T) {
	for _, args := range [][]string{{"deploy.apps/web"}, {"deploy.apps", "web"}} {
		spelling, name, err := kinds.Parse(args)
		require.NoError(t, err)
		require.Equal(t, "deploy.apps", spelling)
		require.Equal(t, "web", name)
	}
	for want, args := range map[string][]string{
		"KIND/NAME is missing":              {},
		"a name is missing: web/NAME":       {"web"},
		`unexpected argument "more"`:        {"pod", "web", "more"},
		`invalid object "/web"`:             {"/web"},
		`invalid object "pod/"`:             {"pod/"},
		`invalid object "pod/a/b"`:          {"pod/a/b"},
		`invalid object "pod/a b"`:          {"pod/a", "b"},
		`invalid object "pod "`:             {"pod", ""},
		`invalid object "pod a/b", want KI`: {"pod", "a/b"},
	} {
		_, _, err := kinds.Parse(args)
		require.ErrorContains(t, err, want)
	}
}

func TestDecodeRefuses(t *testing.T) {
	_, err := kinds.Decode([]byte(`{"kind":"APIGroupList","groups":[]}`))
	require.ErrorIs(t, err, kinds.ErrNotAggregated)
	_, err = kinds.Decode([]byte(`{`))
	require.ErrorContains(t, err, "reading the API server's kinds")
}

func TestDecodeGroups(t *testing.T) {
	for answer, want := range map[string][]string{
		`{"kind":"APIVersions","versions":["v1"]}`: {"v1"},
		`{"kind":"APIGroupList","groups":[{"name":"apps","versions":[{"version":"v1beta1"},{"version":"v1"}],"preferredVersion":{"version":"v1"}},
			{"name":"example.com","versions":[{"version":"v2"}],"preferredVersion":{"version":"v2"}}]}`: {"apps/v1", "apps/v1beta1", "example.com/v2"},
		`{"kind":"APIGroupList"}`: nil,
	} {
		got, err := kinds.DecodeGroups([]byte(answer))
		require.NoError(t, err)
		var names []string
		for _, v := range got {
			names = append(names, v.String())
		}
		require.Equal(t, want, names, answer)
	}
	for _, answer := range []string{`{`, `{"kind":"Status"}`} {
		_, err := kinds.DecodeGroups([]byte(answer))
		require.ErrorContains(t, err, "reading the API server's groups")
	}
}

func TestDecodeResources(t *testing.T) {
	apps := schema.GroupVersion{Group: "apps", Version: "v1"}
	got, err := kinds.DecodeResources(apps, []byte(`{"kind":"APIResourceList","groupVersion":"apps/v1","resources":[
		{"name":"deployments","singularName":"deployment","namespaced":true,"kind":"Deployment","verbs":["get","list"],"shortNames":["deploy"]},
		{"name":"deployments/scale","namespaced":true,"group":"autoscaling","version":"v1","kind":"Scale","verbs":["get"]}]}`))
	require.NoError(t, err)
	require.Equal(t, kinds.List{{Group: "apps", Version: "v1", Resource: "deployments", Kind: "Deployment", Singular: "deployment", Short: []string{"deploy"},
		Namespaced: true, Listed: true}}, got)
	_, err = kinds.DecodeResources(apps, []byte(`{`))
	require.ErrorContains(t, err, "apps/v1")
}

func TestMergeKeepsTheFirstVersion(t *testing.T) {
	one := kinds.List{{Group: "apps", Version: "v1", Resource: "deployments"}}
	two := kinds.List{{Group: "apps", Version: "v1beta1", Resource: "deployments"}, {Group: "apps", Version: "v1beta1", Resource: "scales"}, {Version: "v1", Resource: "deployments"}}
	require.Equal(t, kinds.List{one[0], two[1], two[2]}, kinds.Merge(one, two))
}
