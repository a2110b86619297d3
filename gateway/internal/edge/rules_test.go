package edge_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/edge"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// TestRules: every method has a rule, and those that agents or this process serve are decided here.
func TestRules(t *testing.T) {
	rules := edge.Rules()
	ours := map[string]bool{}
	for _, s := range slices.Concat(edge.OfAgents, edge.OfGateway) {
		for i := range s.Methods().Len() {
			ours["/"+string(s.FullName())+"/"+string(s.Methods().Get(i).Name())] = true
		}
	}
	for method, rule := range rules {
		require.Equal(t, !ours[method], rule.Elsewhere, method)
	}
	for _, m := range []string{
		processv1.ProcessService_RunProcess_FullMethodName, processv1.ProcessService_StartProcess_FullMethodName, runv1.RunService_RunSandbox_FullMethodName,
		runv1.RunService_StartSandbox_FullMethodName,
	} {
		require.Equal(t, "process.args", rules[m].Command, m)
		require.Equal(t, "exec", rules[m].Access.Subresource, m)
	}
	users.CheckRules(t, rules, nil, slices.Concat(edge.OfAllocator, edge.OfCollector, edge.OfAgents, edge.OfGateway)...)
}

// TestUsageRules: who may see what sandboxes use is a right of its own, and a list of all namespaces needs it in all of them.
func TestUsageRules(t *testing.T) {
	rules := edge.Rules()
	for method, verb := range map[string]string{
		usagev1.UsageService_GetSandboxUsage_FullMethodName: "get", usagev1.UsageService_WatchSandboxUsage_FullMethodName: "watch",
		usagev1.UsageService_ListSandboxUsage_FullMethodName: "list",
	} {
		require.Equal(t, rpc.Rule{
			Access: auth.Access{Verb: verb, Group: v1alpha1.Group, Resource: "sandboxes", Subresource: "usage"}, Namespace: "namespace",
		}, rules[method], method)
	}
}
