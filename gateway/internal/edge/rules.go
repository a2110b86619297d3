package edge

import (
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// The services that other components than agents serve.
var (
	// OfAllocator are those of the allocator.
	OfAllocator = []protoreflect.ServiceDescriptor{ //nolint:gochecknoglobals // constant
		sandboxv1.File_fastsandbox_sandbox_v1_sandbox_service_proto.Services().ByName("SandboxService"),
		allocatorv1.File_fastsandbox_allocator_v1_allocator_service_proto.Services().ByName("AllocatorService"),
		authv1.File_fastsandbox_auth_v1_auth_service_proto.Services().ByName("AuthService"),
	}
	// OfCollector are those of the garbage collector.
	OfCollector = []protoreflect.ServiceDescriptor{ //nolint:gochecknoglobals // constant
		gcv1.File_fastsandbox_gc_v1_gc_proto.Services().ByName("GarbageCollectorService"),
	}
	// OfGateway are those that the gateway serves itself.
	OfGateway = []protoreflect.ServiceDescriptor{ //nolint:gochecknoglobals // constant
		runv1.File_fastsandbox_run_v1_run_service_proto.Services().ByName("RunService"),
		usagev1.File_fastsandbox_usage_v1_usage_service_proto.Services().ByName("UsageService"),
	}
	// OfAgents are those of agents.
	OfAgents = []protoreflect.ServiceDescriptor{ //nolint:gochecknoglobals // constant
		processv1.File_fastsandbox_process_v1_process_service_proto.Services().ByName("ProcessService"),
		filesystemv1.File_fastsandbox_filesystem_v1_filesystem_service_proto.Services().ByName("FilesystemService"),
		tunnelv1.File_fastsandbox_tunnel_v1_tunnel_service_proto.Services().ByName("TunnelService"),
	}
)

// Rules returns what a user needs for each method. Agents do not know users: this process decides about calls into sandboxes, and the components
// that serve the others decide about those.
func Rules() map[string]rpc.Rule {
	rules := map[string]rpc.Rule{}
	for _, list := range [][]protoreflect.ServiceDescriptor{OfAllocator, OfCollector} {
		for _, s := range list {
			for i := range s.Methods().Len() {
				rules[nameOf(s.Methods().Get(i))] = rpc.Rule{Elsewhere: true}
			}
		}
	}
	for _, s := range slices.Concat(OfAgents, OfGateway) {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			rules[nameOf(m)] = ruleOf(m)
		}
	}
	return rules
}

func nameOf(m protoreflect.MethodDescriptor) string {
	return "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
}

// ruleOf returns the rule of a method that is decided here. For RunService, the allocator decides about the create and the deletion of the sandbox
// as well.
func ruleOf(m protoreflect.MethodDescriptor) rpc.Rule {
	access := auth.Access{Verb: "create", Group: v1alpha1.Group, Resource: "sandboxes"}
	r := rpc.Rule{Namespace: "namespace"}
	switch m.Parent().Name() {
	case "ProcessService":
		access.Subresource = "exec"
	case "RunService":
		access.Subresource, r.Name = "exec", "sandbox.name"
	case "FilesystemService":
		access.Subresource = "files"
	case "TunnelService":
		access.Subresource = "portforward"
	case "UsageService":
		access.Subresource = "usage"
		access.Verb = map[protoreflect.Name]string{"GetSandboxUsage": "get", "WatchSandboxUsage": "watch", "ListSandboxUsage": "list"}[m.Name()]
	}
	switch m.Name() {
	case "RunProcess", "StartProcess", "RunSandbox", "StartSandbox":
		r.Command = "process.args"
	}
	r.Access = access
	return r
}

// transfers reports whether a stream moves something of a size and ends then. It is not ended when the process stops: a client would have to
// begin again.
func transfers(method string) bool {
	switch method {
	case filesystemv1.FilesystemService_ReadFile_FullMethodName, filesystemv1.FilesystemService_WriteFile_FullMethodName,
		filesystemv1.FilesystemService_ReadArchive_FullMethodName, filesystemv1.FilesystemService_WriteArchive_FullMethodName:
		return true
	}
	return false
}
