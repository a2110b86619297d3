// Package kinds parses kinds of Kubernetes objects as people write them for kubectl: deploy, deployments, Deployment,
// deployments.apps, deployments.v1.apps. It also decodes what an API server answers to discovery. It is pure: its callers make the
// requests. All of it may be called concurrently.
package kinds

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kind is a kind of object that an API server serves.
type Kind struct {
	// Group and Version of the API; the core group has no name.
	Group, Version string
	// Resource is its plural, as it stands in paths; Kind its name in manifests.
	Resource, Kind string
	// Singular and Short are its other names.
	Singular string
	Short    []string
	// Namespaced reports whether its objects live in namespaces; Listed, whether they can be listed.
	Namespaced, Listed bool
}

// String is Kind.group.
func (k Kind) String() string {
	if k.Group == "" {
		return k.Kind
	}
	return k.Kind + "." + k.Group
}

// Path returns the URL path of its objects: in one namespace, or in all.
func (k Kind) Path(namespace string) string {
	path := "/apis/" + k.Group + "/" + k.Version
	if k.Group == "" {
		path = "/api/" + k.Version
	}
	if k.Namespaced && namespace != "" {
		path += "/namespaces/" + namespace
	}
	return path + "/" + k.Resource
}

// List is the kinds that an API server serves, in its order of preference, one version of each.
type List []Kind

// Find returns the kind with a name. Full names take precedence over short names, earlier kinds over later ones.
func (l List) Find(spelling string) (Kind, bool) {
	name, group, qualified := strings.Cut(spelling, ".")
	for _, has := range []func(Kind) bool{
		func(k Kind) bool {
			return strings.EqualFold(name, k.Resource) || strings.EqualFold(name, k.Kind) || strings.EqualFold(name, k.Singular)
		},
		func(k Kind) bool {
			return slices.ContainsFunc(k.Short, func(s string) bool { return strings.EqualFold(name, s) })
		},
	} {
		i := slices.IndexFunc(l, func(k Kind) bool {
			return name != "" && has(k) && (!qualified || strings.EqualFold(group, k.Group) || strings.EqualFold(group, k.Version+"."+k.Group))
		})
		if i >= 0 {
			return l[i], true
		}
	}
	return Kind{}, false
}

// Parse splits the arguments of a command line: KIND/NAME, or KIND NAME.
func Parse(args []string) (spelling, name string, err error) {
	switch len(args) {
	case 0:
		return "", "", errors.New("KIND/NAME is missing, for instance deploy/web")
	case 1:
		var ok bool
		if spelling, name, ok = strings.Cut(args[0], "/"); !ok {
			return "", "", fmt.Errorf("a name is missing: %s/NAME", args[0])
		}
	case 2:
		spelling, name = args[0], args[1]
	default:
		return "", "", fmt.Errorf("unexpected argument %q", args[2])
	}
	if spelling == "" || name == "" || strings.Contains(name, "/") || strings.Contains(spelling, "/") {
		return "", "", fmt.Errorf("invalid object %q, want KIND/NAME, for instance deploy/web", strings.Join(args, " "))
	}
	return spelling, name, nil
}

// ErrNotAggregated is Decode's error for an answer of an API server without aggregated discovery: DecodeGroups reads it.
var ErrNotAggregated = errors.New("the API server has no aggregated discovery")

// discovery is the part of apidiscovery.k8s.io's APIGroupDiscoveryList that is used; its versions agree on it.
type discovery struct {
	Kind  string `json:"kind"`
	Items []struct {
		Metadata struct {
			Name string `json:"name"`
		} `json:"metadata"`
		Versions []struct {
			Version   string `json:"version"`
			Resources []struct {
				Resource     string `json:"resource"`
				ResponseKind *struct {
					Kind string `json:"kind"`
				} `json:"responseKind"`
				Scope            string   `json:"scope"`
				SingularResource string   `json:"singularResource"`
				ShortNames       []string `json:"shortNames"`
				Verbs            []string `json:"verbs"`
			} `json:"resources"`
		} `json:"versions"`
	} `json:"items"`
}

// Accept is the media types to request from /api and /apis, so that Decode can read the answer.
const Accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," +
	"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json"

// Decode reads an aggregated answer of /api or /apis. The error is ErrNotAggregated if the answer is of the older form, in which
// kinds are listed for each group and version.
func Decode(raw []byte) (List, error) {
	var d discovery
	if err := json.Unmarshal(raw, &d); err != nil {
		return nil, fmt.Errorf("reading the API server's kinds: %w", err)
	}
	if d.Kind != "APIGroupDiscoveryList" {
		return nil, ErrNotAggregated
	}
	var out List
	for _, g := range d.Items {
		known := map[string]bool{}
		for _, v := range g.Versions { // the preferred one is the first
			for _, r := range v.Resources {
				if known[r.Resource] || r.ResponseKind == nil || r.ResponseKind.Kind == "" {
					continue
				}
				known[r.Resource] = true
				out = append(out, Kind{Group: g.Metadata.Name, Version: v.Version, Resource: r.Resource, Kind: r.ResponseKind.Kind,
					Singular: r.SingularResource, Short: r.ShortNames, Namespaced: r.Scope == "Namespaced", Listed: slices.Contains(r.Verbs, "list")})
			}
		}
	}
	return out, nil
}

// DecodeGroups reads an answer of /api or /apis of an API server without aggregated discovery. It returns the group versions, the
// preferred version of each group first.
func DecodeGroups(raw []byte) ([]schema.GroupVersion, error) {
	var answer struct {
		Kind     string            `json:"kind"`
		Versions []string          `json:"versions"`
		Groups   []metav1.APIGroup `json:"groups"`
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return nil, fmt.Errorf("reading the API server's groups: %w", err)
	}
	var out []schema.GroupVersion
	switch answer.Kind {
	case "APIVersions": // of the core group
		for _, v := range answer.Versions {
			out = append(out, schema.GroupVersion{Version: v})
		}
	case "APIGroupList":
		for _, g := range answer.Groups {
			out = append(out, preferredFirst(g)...)
		}
	default:
		return nil, fmt.Errorf("reading the API server's groups: unexpected answer %q", answer.Kind)
	}
	return out, nil
}

func preferredFirst(g metav1.APIGroup) []schema.GroupVersion {
	out := []schema.GroupVersion{{Group: g.Name, Version: g.PreferredVersion.Version}}
	for _, v := range g.Versions {
		if v.Version != g.PreferredVersion.Version {
			out = append(out, schema.GroupVersion{Group: g.Name, Version: v.Version})
		}
	}
	return out
}

// DecodeResources reads the answer of an API server about one group and version, without aggregated discovery.
func DecodeResources(of schema.GroupVersion, raw []byte) (List, error) {
	var answer metav1.APIResourceList
	if err := json.Unmarshal(raw, &answer); err != nil {
		return nil, fmt.Errorf("reading the API server's kinds of %s: %w", of, err)
	}
	var out List
	for _, r := range answer.APIResources {
		if strings.Contains(r.Name, "/") {
			continue // a subresource
		}
		out = append(out, Kind{Group: of.Group, Version: of.Version, Resource: r.Name, Kind: r.Kind, Singular: r.SingularName,
			Short: r.ShortNames, Namespaced: r.Namespaced, Listed: slices.Contains([]string(r.Verbs), "list")})
	}
	return out, nil
}

// Merge joins lists and keeps the first version of each resource.
func Merge(lists ...List) List {
	var out List
	known := map[schema.GroupResource]bool{}
	for _, k := range slices.Concat(lists...) {
		resource := schema.GroupResource{Group: k.Group, Resource: k.Resource}
		if !known[resource] {
			known[resource] = true
			out = append(out, k)
		}
	}
	return out
}
