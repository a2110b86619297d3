// Package rights reads which rights the manifests in deploy give to the accounts of the components, one verb on one resource at a time.
// It understands as much of kustomize as these manifests use: the resources and the namespace of a kustomization.
package rights

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// Cluster is the scope of a right in all namespaces, and to resources of the cluster.
const Cluster = "cluster"

// Core is the API group whose name is empty.
const Core = "core"

// Right is one verb on one resource.
type Right struct {
	// Account is the name of a ServiceAccount. No two components have accounts of one name.
	Account string
	// Scope is a namespace, or Cluster.
	Scope string
	// Group is an API group, or Core.
	Group string
	// Resource is a resource, RESOURCE/SUBRESOURCE or *; Name is the only object that the right is to, empty for all objects.
	Resource, Name string
	Verb           string
}

// String returns a line for messages.
func (r Right) String() string {
	resource := r.Resource
	if r.Name != "" {
		resource += " " + r.Name
	}
	return fmt.Sprintf("%s may %s %s of %s (%s)", r.Account, r.Verb, resource, r.Group, r.Scope)
}

// Permits reports whether a request is within the right. An empty namespace is a request over all namespaces, or to a resource of the
// cluster.
func (r Right) Permits(verb, group, resource, namespace, name string) bool {
	if group == "" {
		group = Core
	}
	return r.Verb == verb && (r.Group == "*" || r.Group == group) && (r.Resource == "*" || r.Resource == resource) &&
		(r.Name == "" || r.Name == name) && (r.Scope == Cluster || r.Scope == namespace)
}

// kustomization is what the manifests use of one.
type kustomization struct {
	Namespace string   `json:"namespace"`
	Resources []string `json:"resources"`
}

// clusterKinds have no namespace.
var clusterKinds = []string{"Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"} //nolint:gochecknoglobals // a constant

// Objects returns the objects of a directory with a kustomization, or of one file. Directories that it includes are left out.
func Objects(path string) ([]*unstructured.Unstructured, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("reading manifests: %w", err)
	}
	if !info.IsDir() {
		return read(path, "")
	}
	raw, err := os.ReadFile(filepath.Join(path, "kustomization.yaml"))
	if err != nil {
		return nil, fmt.Errorf("reading manifests: %w", err)
	}
	var k kustomization
	if err := yaml.Unmarshal(raw, &k); err != nil {
		return nil, fmt.Errorf("reading the kustomization in %s: %w", path, err)
	}
	var out []*unstructured.Unstructured
	for _, name := range k.Resources {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		objects, err := read(filepath.Join(path, name), k.Namespace)
		if err != nil {
			return nil, err
		}
		out = append(out, objects...)
	}
	return out, nil
}

func read(path, namespace string) ([]*unstructured.Unstructured, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading manifests: %w", err)
	}
	var out []*unstructured.Unstructured
	for document := range strings.SplitSeq("\n"+string(raw), "\n---\n") {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &u.Object); err != nil {
			return nil, fmt.Errorf("reading %s: %w", path, err)
		}
		if len(u.Object) == 0 {
			continue
		}
		if u.GetNamespace() == "" && !slices.Contains(clusterKinds, u.GetKind()) {
			u.SetNamespace(namespace)
		}
		out = append(out, u)
	}
	return out, nil
}

// Of returns the rights that bindings among the objects give to accounts, each once, in order.
func Of(objects []*unstructured.Unstructured) ([]Right, error) {
	roles := map[string][]rbacv1.PolicyRule{}
	for _, o := range objects {
		if o.GetKind() != "Role" && o.GetKind() != "ClusterRole" {
			continue
		}
		var role rbacv1.ClusterRole // a Role has the same rules
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &role); err != nil {
			return nil, fmt.Errorf("reading the role %s: %w", o.GetName(), err)
		}
		roles[key(o.GetKind(), o.GetNamespace(), o.GetName())] = role.Rules
	}
	var out []Right
	for _, o := range objects {
		if o.GetKind() != "RoleBinding" && o.GetKind() != "ClusterRoleBinding" {
			continue
		}
		given, err := bound(o, roles)
		if err != nil {
			return nil, err
		}
		out = append(out, given...)
	}
	slices.SortFunc(out, func(a, b Right) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(out), nil
}

func key(kind, namespace, name string) string {
	if kind == "ClusterRole" {
		namespace = ""
	}
	return kind + "/" + namespace + "/" + name
}

// bound returns the rights of one binding.
func bound(o *unstructured.Unstructured, roles map[string][]rbacv1.PolicyRule) ([]Right, error) {
	var binding rbacv1.RoleBinding // a ClusterRoleBinding has the same fields
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &binding); err != nil {
		return nil, fmt.Errorf("reading the binding %s: %w", o.GetName(), err)
	}
	rules, ok := roles[key(binding.RoleRef.Kind, o.GetNamespace(), binding.RoleRef.Name)]
	if !ok {
		return nil, errors.New("the role " + binding.RoleRef.Name + " of the binding " + o.GetName() + " is missing")
	}
	scope := o.GetNamespace()
	if o.GetKind() == "ClusterRoleBinding" {
		scope = Cluster
	}
	var out []Right
	for _, s := range binding.Subjects {
		for _, r := range rules {
			out = append(out, expand(Right{Account: s.Name, Scope: scope}, r)...)
		}
	}
	return out, nil
}

// expand returns the rights of one rule.
func expand(base Right, r rbacv1.PolicyRule) []Right {
	names := r.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	var out []Right
	for _, group := range r.APIGroups {
		for _, resource := range r.Resources {
			for _, name := range names {
				for _, verb := range r.Verbs {
					one := base
					one.Group, one.Resource, one.Name, one.Verb = group, resource, name, verb
					if group == "" {
						one.Group = Core
					}
					out = append(out, one)
				}
			}
		}
	}
	return out
}
