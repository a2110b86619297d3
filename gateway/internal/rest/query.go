package rest

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// checkQuery refuses a query parameter that is not a field of the request. grpc-gateway ignores such a parameter, and a
// misspelled `gracePeriod` must not delete a sandbox with the default grace period.
func (a *api) checkQuery(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		if err := exchangeOf(r.Context()).binding.checkQuery(r.URL.RawQuery, params); err != nil {
			a.writeError(r.Context(), w, err, 0)
			return
		}
		next(w, r, params)
	}
}

// checkQuery reports the first parameter of a query that the route does not have, or that is set twice, under whichever of its two
// names.
func (r *route) checkQuery(raw string, params map[string]string) error {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return fault.Field("query", "invalid query: %v", err)
	}
	// No message can carry other text, not even that of an error.
	for name, value := range params {
		if !utf8.ValidString(value) {
			return fault.Field(name, "must be UTF-8")
		}
	}
	for key, list := range values {
		if !utf8.ValidString(key + strings.Join(list, "")) {
			return fault.Field("query", "invalid query: must be UTF-8")
		}
	}
	m, set := r.queried(), map[string]int{}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		field := fieldOf(m, key)
		if _, bound := params[key]; field == nil || bound || r.inBody(key) {
			return fault.Field(key, "unknown field %q in the query", key)
		}
		path := protoPath(m, key)
		if set[path] += len(values[key]); !field.IsList() && set[path] > 1 {
			return fault.Field(key, "must not be set more than once, is set %d times", set[path])
		}
	}
	return nil
}

// inBody reports whether a dotted path leads into the field that the body fills.
func (r *route) inBody(path string) bool {
	first, _, _ := strings.Cut(path, ".")
	return r.body != "" && first == r.body
}

// fieldOf returns the field at a dotted path of proto or JSON names; nil if there is none.
func fieldOf(m proto.Message, path string) protoreflect.FieldDescriptor {
	fields := walk(m, path)
	if len(fields) == 0 {
		return nil
	}
	return fields[len(fields)-1]
}

// protoPath converts a dotted path to proto names. A path that leads to no field is returned unchanged, for the server to refuse.
func protoPath(m proto.Message, path string) string {
	fields := walk(m, path)
	if len(fields) == 0 {
		return path
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = string(f.Name())
	}
	return strings.Join(names, ".")
}

// walk returns the fields along a path, or none if one of its names is unknown.
func walk(m proto.Message, path string) []protoreflect.FieldDescriptor {
	if m == nil {
		return nil
	}
	message := m.ProtoReflect().Descriptor()
	var fields []protoreflect.FieldDescriptor
	for name := range strings.SplitSeq(path, ".") {
		if message == nil {
			return nil
		}
		field := message.Fields().ByName(protoreflect.Name(name))
		if field == nil {
			field = message.Fields().ByJSONName(name)
		}
		if field == nil {
			return nil
		}
		fields = append(fields, field)
		if message = field.Message(); field.IsMap() || field.IsList() {
			message = nil
		}
	}
	return fields
}
