package rest

import (
	"net/http"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
)

// upstream is a component that the gateway calls.
type upstream struct {
	// name is the component's name for people.
	name string
	conn grpc.ClientConnInterface
}

// route is one HTTP binding of a method, from the method's google.api.http annotation.
type route struct {
	method   protoreflect.MethodDescriptor
	upstream upstream
	// verb is the HTTP method. pattern is the path as grpc-gateway writes it: /v1/namespaces/{namespace=*}/sandboxes.
	verb, pattern string
	// body is the field that the body fills: "*" for the whole message, "" for none.
	body string
	// path matches the paths of the pattern.
	path *regexp.Regexp
}

// streams reports whether the method has a stream. A nil route, of a path outside the API, does not.
func (r *route) streams() bool {
	return r != nil && (r.method.IsStreamingServer() || r.method.IsStreamingClient())
}

// fullMethod returns the method as gRPC calls it.
func (r *route) fullMethod() string {
	return "/" + string(r.method.Parent().FullName()) + "/" + string(r.method.Name())
}

// queried returns the message whose fields the query may set; nil if it may set none.
func (r *route) queried() proto.Message {
	if r == nil || r.body == "*" {
		return nil
	}
	return newMessage(r.method.Input())
}

// newMessage returns an empty message of a generated type.
func newMessage(d protoreflect.MessageDescriptor) proto.Message {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		panic(err) // the services' own packages register their messages
	}
	return t.New().Interface()
}

// services are the services of the REST API with the components that serve them. Methods without an HTTP binding are not
// part of it.
func services(allocator, collector, sandboxes upstream) map[protoreflect.ServiceDescriptor]upstream {
	return map[protoreflect.ServiceDescriptor]upstream{
		sandboxv1.File_fastsandbox_sandbox_v1_sandbox_service_proto.Services().ByName("SandboxService"):         allocator,
		allocatorv1.File_fastsandbox_allocator_v1_allocator_service_proto.Services().ByName("AllocatorService"): allocator,
		authv1.File_fastsandbox_auth_v1_auth_service_proto.Services().ByName("AuthService"):                     allocator,
		gcv1.File_fastsandbox_gc_v1_gc_proto.Services().ByName("GarbageCollectorService"):                       collector,
		processv1.File_fastsandbox_process_v1_process_service_proto.Services().ByName("ProcessService"):         sandboxes,
		runv1.File_fastsandbox_run_v1_run_service_proto.Services().ByName("RunService"):                         sandboxes,
		usagev1.File_fastsandbox_usage_v1_usage_service_proto.Services().ByName("UsageService"):                 sandboxes,
		filesystemService(): sandboxes,
	}
}

func filesystemService() protoreflect.ServiceDescriptor {
	return filesystemv1.File_fastsandbox_filesystem_v1_filesystem_service_proto.Services().ByName("FilesystemService")
}

// routeTable is the HTTP bindings by verb and pattern.
type routeTable map[string]*route

// newRouteTable returns the bindings of all methods of the services.
func newRouteTable(all map[protoreflect.ServiceDescriptor]upstream) routeTable {
	table := routeTable{}
	for service, up := range all {
		for i := range service.Methods().Len() {
			method := service.Methods().Get(i)
			rule, _ := proto.GetExtension(method.Options(), annotations.E_Http).(*annotations.HttpRule)
			for _, binding := range append([]*annotations.HttpRule{rule}, rule.GetAdditionalBindings()...) {
				if verb, path := target(binding); path != "" {
					r := newRoute(method, up, verb, path, binding.GetBody())
					table[r.verb+" "+r.pattern] = r
				}
			}
		}
	}
	return table
}

func newRoute(method protoreflect.MethodDescriptor, up upstream, verb, path, body string) *route {
	variable := regexp.MustCompile(`\{([^}=]+)\}`)
	pattern := variable.ReplaceAllString(path, "{$1=*}")
	match := regexp.MustCompile(`\\\{[^}]+\\\}`).ReplaceAllString(regexp.QuoteMeta(path), "[^/]+")
	return &route{method: method, upstream: up, verb: verb, pattern: pattern, body: body, path: regexp.MustCompile("^" + match + "$")}
}

// target returns a binding's HTTP method and path.
func target(rule *annotations.HttpRule) (verb, path string) {
	switch {
	case rule.GetGet() != "":
		return http.MethodGet, rule.GetGet()
	case rule.GetPost() != "":
		return http.MethodPost, rule.GetPost()
	case rule.GetPatch() != "":
		return http.MethodPatch, rule.GetPatch()
	case rule.GetDelete() != "":
		return http.MethodDelete, rule.GetDelete()
	case rule.GetPut() != "":
		return http.MethodPut, rule.GetPut()
	}
	return "", ""
}

// of returns the route of a verb and a pattern; nil if there is none.
func (t routeTable) of(verb, pattern string) *route { return t[verb+" "+pattern] }

// allowed returns the HTTP methods of a path, for the Allow header.
func (t routeTable) allowed(path string) string {
	var verbs []string
	custom := false // the path ends with a custom verb such as :logs, which the pattern of a plain name matches too
	for _, r := range t {
		if !r.path.MatchString(path) {
			continue
		}
		isCustom := strings.Contains(r.pattern[strings.LastIndexByte(r.pattern, '/'):], ":")
		if isCustom && !custom {
			verbs, custom = nil, true
		}
		if isCustom == custom && !slices.Contains(verbs, r.verb) {
			verbs = append(verbs, r.verb)
		}
	}
	order := []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
	slices.SortFunc(verbs, func(a, b string) int { return slices.Index(order, a) - slices.Index(order, b) })
	return strings.Join(verbs, ", ")
}
