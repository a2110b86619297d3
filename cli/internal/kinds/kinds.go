// Package kinds understands kinds of Kubernetes objects as people write them for kubectl: deploy, deployments, Deployment,
// deployments.apps, deployments.v1.apps. It is pure: what kinds there are is said by whoever asks. All of it may be called
// concurrently.
package kinds

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	// Namespaced tells whether its objects live in namespaces; Listed whether they can be listed.
	Namespaced, Listed bool
}

// String is Kind.group.
func (k Kind) String() string {
	if k.Group == "" {
		return k.Kind
	}
	return k.Kind + "." + k.Group
}

// Path is where its objects are, for HTTP: of one namespace, or of all.
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

// List is all kinds that an API server serves, in its order of preference, one version of each.
type List []Kind

// Find returns the kind that is meant: by its own names before short ones, and by the first that has the name.
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

// Parse takes the words of a command line apart: KIND/NAME, or KIND NAME.
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
		return "", "", fmt.Errorf("%q is no object, want KIND/NAME, for instance deploy/web", strings.Join(args, " "))
	}
	return spelling, name, nil
}

// errOld is what an API server without aggregated discovery is told of.
var errOld = errors.New("the API server does not tell its kinds in one answer, as Kubernetes 1.27 and later do")

// discovery is the part of apidiscovery.k8s.io's APIGroupDiscoveryList that counts; its versions agree on it.
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

// Accept is the media types to ask /api and /apis for, so that Decode understands the answer.
const Accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," +
	"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json"

// Decode reads an answer of /api or /apis.
func Decode(raw []byte) (List, error) {
	var d discovery
	if err := json.Unmarshal(raw, &d); err != nil {
		return nil, fmt.Errorf("reading the API server's kinds: %w", err)
	}
	if d.Kind != "APIGroupDiscoveryList" {
		return nil, errOld
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
