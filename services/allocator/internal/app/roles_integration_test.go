//go:build integration

package app_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// TestRolesOfTheGateway: on its own behalf the gateway finds sandboxes and agents, and can do nothing else; an agent cannot do even that.
func TestRolesOfTheGateway(t *testing.T) {
	c := newCluster(t)
	a := c.start()
	a.awaitAgent(t)
	as := func(role rpc.Role) allocatorv1.AllocatorServiceClient {
		conn, err := rpc.Dial(a.conn.Target(), rpc.ClientConfig{TLS: c.issuer.TLS(t, role), ServerName: rpc.RoleAllocator.ServerName()})
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return allocatorv1.NewAllocatorServiceClient(conn)
	}
	list, err := as(rpc.RoleGateway).ListAgents(t.Context(), &allocatorv1.ListAgentsRequest{Namespace: ns, Pool: pool})
	require.NoError(t, err)
	require.Len(t, list.GetAgents(), 1)
	require.NotEmpty(t, list.GetAgents()[0].GetInfo().GetPodUid())
	_, err = as(rpc.RoleGateway).ListPools(t.Context(), &allocatorv1.ListPoolsRequest{})
	require.Equal(t, fault.PermissionDenied, fault.ReasonOf(rpc.FromStatus(err)))
	_, err = as(rpc.RoleAgent).ListAgents(t.Context(), &allocatorv1.ListAgentsRequest{})
	require.Equal(t, fault.PermissionDenied, fault.ReasonOf(rpc.FromStatus(err)))
}
