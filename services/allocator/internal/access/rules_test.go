package access_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/access"
)

// TestRules: only the placement of the controller, and what the gateway asks, is closed to users, and only creates of sandboxes count as such.
func TestRules(t *testing.T) {
	users.CheckRules(t, access.Rules(), []string{
		allocatorv1.AllocatorService_Allocate_FullMethodName, allocatorv1.AllocatorService_Release_FullMethodName,
		allocatorv1.AllocatorService_LocateSandbox_FullMethodName,
	},
		sandboxv1.File_fastsandbox_sandbox_v1_sandbox_service_proto.Services().ByName("SandboxService"),
		allocatorv1.File_fastsandbox_allocator_v1_allocator_service_proto.Services().ByName("AllocatorService"),
		authv1.File_fastsandbox_auth_v1_auth_service_proto.Services().ByName("AuthService"))
	for method, rule := range access.Rules() {
		require.Equal(t, method == sandboxv1.SandboxService_CreateSandbox_FullMethodName, rule.Creates, method)
	}
}
