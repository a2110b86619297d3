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
	testclock "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// TestLogsDirect reads a log from the agent, with a ticket and without the caller's own certificate.
func TestLogsDirect(t *testing.T) {
	b, cluster := withAgent(t)
	var got *agentv1.StreamLogsRequest
	var caller auth.Caller
	cluster.agent = serveAgent(t, b, rpc.RoleAgent, &logsAgent{logs: func(in *agentv1.StreamLogsRequest, s agentv1.AgentService_StreamLogsServer) error {
		got = in
		caller, _ = auth.CallerOf(s.Context())
		return errors.Join(s.Send(&agentv1.StreamLogsResponse{Data: []byte("one\ntw")}), s.Send(&agentv1.StreamLogsResponse{Data: []byte("o\xff")}))
	}})
	r := b.run(t, "logs", "web", "--direct", "-f", "--tail", "7", "--since", "5m", "--context", "two")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "one\ntwo\xff", r.out)
	require.Equal(t, "ticket-1", caller.User)
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
	b, cluster := withAgent(t)
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

// TestLogsDirectRenewsTicket breaks the stream after the end of the ticket.
func TestLogsDirectRenewsTicket(t *testing.T) {
	b, cluster := withAgent(t)
	c := testclock.NewFakeClock(now)
	b.clock = later{RealClock: clock.RealClock{}, fake: c}
	var tickets []string
	cluster.agent = serveAgent(t, b, rpc.RoleAgent, &logsAgent{logs: func(_ *agentv1.StreamLogsRequest, s agentv1.AgentService_StreamLogsServer) error {
		caller, _ := auth.CallerOf(s.Context())
		if tickets = append(tickets, caller.User); len(tickets) == 1 {
			c.Step(time.Minute)
			return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "restarting")
		}
		return nil
	}})
	r := b.run(t, "logs", "web", "--direct")
	require.Zero(t, r.code, r.err)
	require.Equal(t, []string{"ticket-1", "ticket-2"}, tickets)
}

// later is a clock whose time is that of a fake and whose timers are real.
type later struct {
	clock.RealClock
	fake *testclock.FakeClock
}

func (l later) Now() time.Time { return l.fake.Now() }

func TestLogsDirectErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		role rpc.Role
		err  error
		code int
		want string
	}{
		"no such sandbox":      {[]string{"none"}, rpc.RoleAgent, nil, 3, "sandbox default/none does not exist (SANDBOX_NOT_FOUND)"},
		"another namespace":    {[]string{"web", "-n", "other"}, rpc.RoleAgent, nil, 3, "other/web"},
		"forbidden":            {[]string{"web"}, rpc.RoleAgent, fault.New(errdefs.ErrPermissionDenied, tunnel.ReasonCluster, "forbidden"), 9, "(CLUSTER_REFUSED)"},
		"not an agent":         {[]string{"web"}, rpc.RoleJanitor, nil, 9, "(CERTIFICATE_NOT_ACCEPTED)"},
		"a mismatch of fences": {[]string{"web"}, rpc.RoleAgent, nil, 5, "(FENCE_MISMATCH)"},
	} {
		t.Run(name, func(t *testing.T) {
			b, cluster := withAgent(t)
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
