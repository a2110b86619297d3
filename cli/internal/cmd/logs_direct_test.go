package cmd_test

import (
	"errors"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// TestLogsDirect reads a log from the agent while the allocator is down.
func TestLogsDirect(t *testing.T) {
	b, cluster := withResources(t, assigned(t, "web"))
	var got *agentv1.StreamLogsRequest
	cluster.agent = serveAgent(t, b, rpc.RoleAgent, &logsAgent{logs: func(in *agentv1.StreamLogsRequest, s agentv1.AgentService_StreamLogsServer) error {
		got = in
		return errors.Join(s.Send(&agentv1.StreamLogsResponse{Data: []byte("one\ntw")}), s.Send(&agentv1.StreamLogsResponse{Data: []byte("o\xff")}))
	}})
	r := b.run(t, "logs", "web", "--direct", "-f", "--tail", "7", "--since", "5m", "--context", "two")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "one\ntwo\xff", r.out)
	require.Equal(t, "two", cluster.options.Context)
	require.Equal(t, []tunnel.Pod{{Namespace: "default", Name: "agent-1", Node: "node-1", Ports: map[string]int32{"agent": 5758}}}, cluster.pods)
	require.Equal(t, []int32{5758}, cluster.ports)
	require.Empty(t, cmp.Diff(&agentv1.StreamLogsRequest{
		Fence: &agentv1.Fence{SandboxUid: "sandbox-uid", Attempt: 3, AgentUid: "agent-uid"}, Follow: true, TailLines: proto.Int64(7),
		Since: timestamppb.New(now.Add(-5 * time.Minute)),
	}, got, protocmp.Transform()))
}

// TestLogsDirectContinuesAfterBreak breaks the stream from the agent.
func TestLogsDirectContinuesAfterBreak(t *testing.T) {
	b, cluster := withResources(t, assigned(t, "web"))
	b.clock = clock.RealClock{}
	streams := 0
	cluster.agent = serveAgent(t, b, rpc.RoleAgent, &logsAgent{logs: func(_ *agentv1.StreamLogsRequest, s agentv1.AgentService_StreamLogsServer) error {
		if streams++; streams == 1 {
			return errors.Join(s.Send(&agentv1.StreamLogsResponse{Data: []byte("on")}), fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "restarting"))
		}
		return s.Send(&agentv1.StreamLogsResponse{Data: []byte("one\n")})
	}})
	r := b.run(t, "logs", "web", "--direct")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "one\n", r.out)
	require.Equal(t, 2, streams)
}

func TestLogsDirectErrors(t *testing.T) {
	broken := resource("broken", map[string]string{v1alpha1.AnnotationAssignment: "{"})
	for name, tc := range map[string]struct {
		args []string
		role rpc.Role
		err  error
		code int
		want string
	}{
		"no such sandbox":      {[]string{"none"}, rpc.RoleAgent, nil, 3, "no custom resource for sandbox default/none (SANDBOX_NOT_FOUND)"},
		"another namespace":    {[]string{"web", "-n", "other"}, rpc.RoleAgent, nil, 3, "other/web"},
		"not assigned":         {[]string{"pending"}, rpc.RoleAgent, nil, 5, `sandbox "pending" is not assigned to an agent (PHASE_CONFLICT)`},
		"invalid assignment":   {[]string{"broken"}, rpc.RoleAgent, nil, 1, "assignment"},
		"forbidden":            {[]string{"web"}, rpc.RoleAgent, fault.New(errdefs.ErrPermissionDenied, tunnel.ReasonCluster, "forbidden"), 9, "(CLUSTER_REFUSED)"},
		"not an agent":         {[]string{"web"}, rpc.RoleJanitor, nil, 9, "(CERTIFICATE_NOT_ACCEPTED)"},
		"a mismatch of fences": {[]string{"web"}, rpc.RoleAgent, nil, 5, "(FENCE_MISMATCH)"},
	} {
		t.Run(name, func(t *testing.T) {
			b, cluster := withResources(t, assigned(t, "web"), resource("pending", nil), broken)
			cluster.err = tc.err
			cluster.agent = serveAgent(t, b, tc.role, &logsAgent{logs: func(*agentv1.StreamLogsRequest, agentv1.AgentService_StreamLogsServer) error {
				return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "another attempt")
			}})
			r := b.run(t, append([]string{"logs", "--direct"}, tc.args...)...)
			require.Equal(t, tc.code, r.code, r.err)
			require.Contains(t, r.err, tc.want)
			require.Empty(t, r.out)
		})
	}
}
