package rest

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// parameters are those of a request that no HTTP binding describes: the sandbox in its path, and its query.
type parameters struct {
	namespace, name string
	// values are those of the query by the lowerCamel name, lists those that may be set more than once.
	values map[string]string
	lists  map[string][]string
}

// parametersOf returns the parameters of a request. As everywhere in the API, a name is lowerCamel or that of the proto field, and one that
// does not exist is refused. A name that ends with [] may be set more than once.
func parametersOf(r *http.Request, known ...string) (parameters, error) {
	p := parameters{namespace: r.PathValue("namespace"), name: r.PathValue("name"), values: map[string]string{}, lists: map[string][]string{}}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return p, fault.Field("query", "invalid query: %v", err)
	}
	for field, value := range map[string]string{"namespace": p.namespace, "name": p.name} {
		if !utf8.ValidString(value) {
			return p, fault.Field(field, "must be UTF-8")
		}
	}
	for _, key := range slices.Sorted(maps.Keys(query)) {
		list, name := query[key], camel(key)
		switch _, set := p.values[name]; {
		case !utf8.ValidString(key + strings.Join(list, "")):
			return p, fault.Field("query", "invalid query: must be UTF-8")
		case slices.Contains(known, name+"[]"):
			p.lists[name] = append(p.lists[name], list...)
		case !slices.Contains(known, name):
			return p, fault.Field(key, "unknown field %q in the query", key)
		case set || len(list) > 1:
			return p, fault.Field(key, "must not be set more than once")
		default:
			p.values[name] = list[0]
		}
	}
	return p, nil
}

// camel returns the lowerCamel name of a proto field.
func camel(name string) string {
	words := strings.Split(name, "_")
	for i, w := range words[1:] {
		if w != "" {
			words[i+1] = strings.ToUpper(w[:1]) + w[1:]
		}
	}
	return strings.Join(words, "")
}

func (p parameters) text(name string) string { return p.values[name] }

// flag returns a parameter that is true or false; without one, false.
func (p parameters) flag(name string) (bool, error) {
	switch p.values[name] {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, fault.Field(name, "is %q, want true or false", p.values[name])
}

// number returns a parameter that is a number; nil without one.
func (p parameters) number(name string, base, bits int) (*int64, error) {
	v, ok := p.values[name]
	if !ok {
		return nil, nil //nolint:nilnil // it is not set
	}
	n, err := strconv.ParseInt(v, base, bits)
	if err != nil {
		return nil, fault.Field(name, "is %q, want a number in base %d", v, base)
	}
	return &n, nil
}
