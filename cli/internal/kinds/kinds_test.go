package kinds_test

import (
	"testing"

	"github.com/stretchr/testify/require"

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
		"KIND/NAME is missing":            {},
		"a name is missing: web/NAME":     {"web"},
		`unexpected argument "more"`:      {"pod", "web", "more"},
		`"/web" is no object`:             {"/web"},
		`"pod/" is no object`:             {"pod/"},
		`"pod/a/b" is no object`:          {"pod/a/b"},
		`"pod/a b" is no object`:          {"pod/a", "b"},
		`"pod " is no object`:             {"pod", ""},
		`"pod a/b" is no object, want KI`: {"pod", "a/b"},
	} {
		_, _, err := kinds.Parse(args)
		require.ErrorContains(t, err, want)
	}
}

func TestDecodeRefuses(t *testing.T) {
	_, err := kinds.Decode([]byte(`{"kind":"APIGroupList","groups":[]}`))
	require.ErrorContains(t, err, "1.27")
	_, err = kinds.Decode([]byte(`{`))
	require.ErrorContains(t, err, "reading the API server's kinds")
}
