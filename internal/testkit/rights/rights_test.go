package rights_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/rights"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const roles = `# a comment
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: r}
rules:
  - {apiGroups: [""], resources: [pods, pods/log], verbs: [get]}
  - {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [mine], verbs: [update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: c}
rules:
  - {apiGroups: ["*"], resources: ["*"], verbs: [list]}
`

const bindings = `apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: r}
roleRef: {kind: Role, name: r}
subjects: [{kind: ServiceAccount, name: a, namespace: ns}, {kind: ServiceAccount, name: b, namespace: ns}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: c}
roleRef: {kind: ClusterRole, name: c}
subjects: [{kind: ServiceAccount, name: a, namespace: ns}]
`

// kustomization makes a directory with files and a kustomization in the namespace ns.
func kustomization(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	list := "namespace: ns\nresources:\n  - ../directory\n"
	for name, content := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
		list += "  - " + name + "\n"
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(list), 0o600))
	return dir
}

func TestOf(t *testing.T) {
	objects, err := rights.Objects(kustomization(t, map[string]string{"roles.yaml": roles, "bindings.yaml": bindings}))
	require.NoError(t, err)
	got, err := rights.Of(objects)
	require.NoError(t, err)
	require.ElementsMatch(t, []rights.Right{
		{"a", "ns", "core", "pods", "", "get"}, {"a", "ns", "core", "pods/log", "", "get"}, {"a", "ns", "coordination.k8s.io", "leases", "mine", "update"},
		{"b", "ns", "core", "pods", "", "get"}, {"b", "ns", "core", "pods/log", "", "get"}, {"b", "ns", "coordination.k8s.io", "leases", "mine", "update"},
		{"a", rights.Cluster, "*", "*", "", "list"},
	}, got)
}

func TestProblems(t *testing.T) {
	objects, err := rights.Objects(kustomization(t, map[string]string{"bindings.yaml": bindings}))
	require.NoError(t, err)
	_, err = rights.Of(objects)
	require.ErrorContains(t, err, "the role r of the binding r is missing")
	_, err = rights.Objects(kustomization(t, map[string]string{"broken.yaml": "a: ["}))
	require.ErrorContains(t, err, "broken.yaml")
	_, err = rights.Objects(filepath.Join(t.TempDir(), "none"))
	require.Error(t, err)
	_, err = rights.Objects(t.TempDir())
	require.ErrorContains(t, err, "kustomization.yaml")
}

func TestPermits(t *testing.T) {
	pods := rights.Right{Account: "a", Scope: "n", Group: rights.Core, Resource: "pods", Verb: "get"}
	lease := rights.Right{Account: "a", Scope: "n", Group: "g", Resource: "leases", Name: "mine", Verb: "update"}
	all := rights.Right{Account: "a", Scope: rights.Cluster, Group: "*", Resource: "*", Verb: "list"}
	for name, tc := range map[string]struct {
		right                                  rights.Right
		verb, group, resource, namespace, name string
		want                                   bool
	}{
		"within":               {pods, "get", "", "pods", "n", "p", true},
		"another verb":         {pods, "list", "", "pods", "n", "", false},
		"another namespace":    {pods, "get", "", "pods", "m", "p", false},
		"all namespaces":       {pods, "get", "", "pods", "", "", false},
		"a subresource":        {pods, "get", "", "pods/log", "n", "p", false},
		"another group":        {pods, "get", "g", "pods", "n", "p", false},
		"the object":           {lease, "update", "g", "leases", "n", "mine", true},
		"another object":       {lease, "update", "g", "leases", "n", "yours", false},
		"everything":           {all, "list", "g", "x/y", "m", "", true},
		"everything, anywhere": {all, "list", "", "pods", "", "", true},
		"not each verb":        {all, "get", "", "pods", "n", "p", false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, tc.right.Permits(tc.verb, tc.group, tc.resource, tc.namespace, tc.name))
		})
	}
}
