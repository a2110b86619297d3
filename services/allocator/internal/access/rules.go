// Package access says what a user needs for each call of the allocator, and serves auth.v1.AuthService: who the caller is, what it
// may do, and API keys. It keeps no state; keys are Secrets. All methods may be called concurrently.
package access

import (
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Fields of requests.
const (
	namespace = "namespace"
	pool      = "pool"
)

// Rules returns what a user needs for each method. Agents and images are subresources of the pools that they belong to.
func Rules() map[string]rpc.Rule {
	ours := func(verb, resource, subresource, field string) rpc.Rule {
		return rpc.Rule{Access: auth.Access{Verb: verb, Group: v1alpha1.Group, Resource: resource, Subresource: subresource}, Namespace: field}
	}
	// Who may create a token of a ServiceAccount can act as it already.
	keys := func(name string) rpc.Rule {
		return rpc.Rule{Access: auth.Access{Verb: "create", Resource: "serviceaccounts", Subresource: "token"}, Namespace: namespace, Name: name}
	}
	named := func(r rpc.Rule, name string) rpc.Rule { r.Name = name; return r }
	creates := ours("create", "sandboxes", "", namespace)
	creates.Creates = true
	return map[string]rpc.Rule{
		sandboxv1.SandboxService_CreateSandbox_FullMethodName:   creates,
		sandboxv1.SandboxService_DeleteSandbox_FullMethodName:   ours("delete", "sandboxes", "", namespace),
		sandboxv1.SandboxService_UpdateSandbox_FullMethodName:   ours("update", "sandboxes", "", "sandbox.namespace"),
		sandboxv1.SandboxService_GetSandbox_FullMethodName:      ours("get", "sandboxes", "", namespace),
		sandboxv1.SandboxService_ListSandboxes_FullMethodName:   ours("list", "sandboxes", "", namespace),
		sandboxv1.SandboxService_WatchSandboxes_FullMethodName:  ours("watch", "sandboxes", "", namespace),
		sandboxv1.SandboxService_StreamLogs_FullMethodName:      ours("get", "sandboxes", "log", namespace),
		sandboxv1.SandboxService_CreateLogTicket_FullMethodName: ours("get", "sandboxes", "log", namespace),

		allocatorv1.AllocatorService_ListAgents_FullMethodName:  named(ours("list", "sandboxpools", "agents", namespace), pool),
		allocatorv1.AllocatorService_WatchAgents_FullMethodName: named(ours("watch", "sandboxpools", "agents", namespace), pool),
		allocatorv1.AllocatorService_ListPools_FullMethodName:   ours("list", "sandboxpools", "", namespace),
		allocatorv1.AllocatorService_GetPool_FullMethodName:     ours("get", "sandboxpools", "", namespace),
		allocatorv1.AllocatorService_ListImages_FullMethodName:  named(ours("get", "sandboxpools", "images", namespace), pool),
		allocatorv1.AllocatorService_PullImage_FullMethodName:   named(ours("create", "sandboxpools", "images", namespace), pool),

		authv1.AuthService_WhoAmI_FullMethodName:       {Self: true},
		authv1.AuthService_CheckAccess_FullMethodName:  {Self: true},
		authv1.AuthService_CreateAPIKey_FullMethodName: keys("service_account"),
		authv1.AuthService_ListAPIKeys_FullMethodName:  keys(""),
		authv1.AuthService_RevokeAPIKey_FullMethodName: keys("id"),
	}
}
