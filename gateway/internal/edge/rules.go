package edge

import (
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
			for _, m := range methods(s) {
				rules[m] = rpc.Rule{Elsewhere: true}
			}
		}
	}
	inside := func(verb, subresource string, names ...string) {
		for _, m := range names {
			rules[m] = rpc.Rule{
				Access:    auth.Access{Verb: verb, Group: v1alpha1.Group, Resource: "sandboxes", Subresource: subresource},
				Namespace: "namespace",
			}
		}
	}
	subresources := map[protoreflect.Name]string{"ProcessService": "exec", "FilesystemService": "files", "TunnelService": "portforward"}
	for _, s := range OfAgents {
		inside("create", subresources[s.Name()], methods(s)...)
	}
	// The create and the deletion of the sandbox are decided by the allocator as well.
	inside("create", "exec", runv1.RunService_RunSandbox_FullMethodName, runv1.RunService_StartSandbox_FullMethodName)
	inside("get", "usage", usagev1.UsageService_GetSandboxUsage_FullMethodName)
	inside("watch", "usage", usagev1.UsageService_WatchSandboxUsage_FullMethodName)
	inside("list", "usage", usagev1.UsageService_ListSandboxUsage_FullMethodName)
	return rules
}

// methods returns the full names of a service's methods.
func methods(s protoreflect.ServiceDescriptor) []string {
	names := make([]string, s.Methods().Len())
	for i := range names {
		names[i] = "/" + string(s.FullName()) + "/" + string(s.Methods().Get(i).Name())
	}
	return names
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
