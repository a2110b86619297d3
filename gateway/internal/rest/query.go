package rest

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// checkQuery refuses a query parameter that the call does not have: grpc-gateway would ignore it, and a misspelt
// `gracePeriod` must not end a sandbox at once.
func (a *api) checkQuery(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		if err := checkQuery(r.URL.RawQuery, queried(r, params), params); err != nil {
			a.writeError(r.Context(), w, err, 0)
			return
		}
		next(w, r, params)
	}
}

// queried is the message whose fields a request's query may set; nil if it may set none.
func queried(r *http.Request, params map[string]string) proto.Message {
	_, named := params["name"]
	switch {
	case isStream(r) && named:
		return &sandboxv1.StreamLogsRequest{}
	case isStream(r):
		return &sandboxv1.WatchSandboxesRequest{}
	case r.Method == http.MethodDelete:
		return &sandboxv1.DeleteSandboxRequest{}
	case r.Method == http.MethodPatch:
		return &sandboxv1.UpdateSandboxRequest{}
	case r.Method == http.MethodGet && !named:
		return &sandboxv1.ListSandboxesRequest{}
	default:
		return nil
	}
}

func checkQuery(raw string, m proto.Message, params map[string]string) error {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return fault.Field("query", "it cannot be parsed: %v", err)
	}
	for _, key := range slices.Sorted(keys(values)) {
		field := fieldOf(m, key)
		if _, bound := params[key]; field == nil || bound {
			return fault.Field(key, "unknown field %q in the query", key)
		}
		if !field.IsList() && len(values[key]) > 1 {
			return fault.Field(key, "it is given %d times", len(values[key]))
		}
	}
	return nil
}

func keys(values url.Values) func(func(string) bool) {
	return func(yield func(string) bool) {
		for key := range values {
			if !yield(key) {
				return
			}
		}
	}
}

// fieldOf is the field that a dotted path of proto or JSON names means, or nil.
func fieldOf(m proto.Message, path string) protoreflect.FieldDescriptor {
	fields := walk(m, path)
	if len(fields) == 0 {
		return nil
	}
	return fields[len(fields)-1]
}

// protoPath is a dotted path by its fields' proto names; one that means no field stays as it is, for the server to refuse.
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
