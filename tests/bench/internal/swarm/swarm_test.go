package swarm_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/swarm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func record(agent, uid string) *agentv1.SandboxRecord {
	return &agentv1.SandboxRecord{
		Namespace: "ns", Name: uid, Fence: &agentv1.Fence{SandboxUid: uid, Attempt: 1, AgentUid: agent},
		Spec: &sandboxv1.SandboxSpec{Image: "busybox", Ports: []int32{80}},
	}
}

// start starts two agents, the first with one sandbox, and connects to both as an allocator would.
func start(t *testing.T, heartbeat time.Duration) (*swarm.Swarm, map[string]agentv1.AgentServiceClient) {
	t.Helper()
	issuer := pki.New(t)
	s, err := swarm.New(issuer.TLS(t, rpc.RoleAgent), heartbeat)
	require.NoError(t, err)
	certificate := func(uid string) rpc.TLS {
		return issuer.Agent(t, rpc.AgentID{Namespace: "ns", Pod: "pod-" + uid, UID: uid})
	}
	require.NoError(t, s.Add(&agentv1.AgentInfo{PodUid: "one", PodIp: "127.1.0.1", Capacity: 3}, certificate("one"), []string{"busybox"},
		[]*agentv1.SandboxReport{swarm.Running(record("one", "old"), "127.1.0.1", true)}))
	require.NoError(t, s.Add(&agentv1.AgentInfo{PodUid: "two", PodIp: "127.1.0.2", Capacity: 3}, certificate("two"), nil, nil))
	// A port that is free on one loopback address is almost certainly free on the others.
	l, err := net.Listen("tcp", "127.1.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	require.NoError(t, s.Serve(port))
	t.Cleanup(s.Stop)
	tls := issuer.TLS(t, rpc.RoleAllocator)
	clients := map[string]agentv1.AgentServiceClient{}
	for uid, ip := range map[string]string{"one": "127.1.0.1", "two": "127.1.0.2"} {
		address := net.TCPAddr{IP: net.ParseIP(ip), Port: port}
		conn, err := rpc.Dial(address.String(), rpc.ClientConfig{TLS: tls, AgentUID: uid})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		clients[uid] = agentv1.NewAgentServiceClient(conn)
	}
	return s, clients
}

type stream struct {
	t    *testing.T
	recv func() (*agentv1.WatchStatusResponse, error)
	last int64
}

func watch(t *testing.T, c agentv1.AgentServiceClient) *stream {
	t.Helper()
	w, err := c.WatchStatus(t.Context(), &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	return &stream{t: t, recv: w.Recv}
}

// next returns the next message, and checks that the messages are numbered without gaps.
func (s *stream) next() *agentv1.WatchStatusResponse {
	s.t.Helper()
	m, err := s.recv()
	require.NoError(s.t, err)
	s.last++
	require.Equal(s.t, s.last, m.GetSequence())
	return m
}

func drain[T any](t *testing.T, recv func() (*T, error)) (all []*T, err error) {
	t.Helper()
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, m)
	}
}

func TestLifeOfASandbox(t *testing.T) {
	s, clients := start(t, time.Hour)
	ctx, one := t.Context(), clients["one"]
	w := watch(t, one)
	snapshot := w.next().GetSnapshot()
	require.Equal(t, "one", snapshot.GetInfo().GetPodUid())
	require.Len(t, snapshot.GetSandboxes(), 1)
	require.EqualValues(t, 2, snapshot.GetSlots().GetFree())
	require.True(t, snapshot.GetAccepting())
	require.Equal(t, []string{"busybox"}, snapshot.GetImages())

	r := record("one", "new")
	created, err := one.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: r})
	require.NoError(t, err)
	stages, err := drain(t, created.Recv)
	require.NoError(t, err)
	require.Len(t, stages, 2)
	require.Equal(t, []string{"127.1.0.1:80"}, stages[1].GetReport().GetEndpoints())
	for _, state := range []agentv1.SandboxState{agentv1.SandboxState_SANDBOX_STATE_CREATING, agentv1.SandboxState_SANDBOX_STATE_RUNNING} {
		d := w.next().GetDelta()
		require.Equal(t, state, d.GetSandboxes()[0].GetState())
		require.False(t, d.GetSandboxes()[0].GetPersisted())
		require.EqualValues(t, 1, d.GetSlots().GetFree())
	}
	require.Equal(t, 2, s.Count())

	_, err = one.MarkPersisted(ctx, &agentv1.MarkPersistedRequest{Fence: r.GetFence()})
	require.NoError(t, err)
	require.True(t, w.next().GetDelta().GetSandboxes()[0].GetPersisted())
	_, err = one.MarkPersisted(ctx, &agentv1.MarkPersistedRequest{Fence: record("one", "none").GetFence()})
	require.Equal(t, codes.NotFound, status.Code(err))

	deleted, err := one.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: r.GetFence(), Tombstone: &agentv1.Tombstone{Fence: r.GetFence()}})
	require.NoError(t, err)
	ends, err := drain(t, deleted.Recv)
	require.NoError(t, err)
	require.Equal(t, agentv1.DeleteStage_DELETE_STAGE_REMOVED, ends[len(ends)-1].GetStage())
	require.Len(t, w.next().GetDelta().GetTombstonesAdded(), 1)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATED, w.next().GetDelta().GetSandboxes()[0].GetState())
	require.Equal(t, 1, s.Count())
	require.Len(t, watch(t, one).next().GetSnapshot().GetTombstones(), 1)
	_, err = one.ForgetTombstone(ctx, &agentv1.ForgetTombstoneRequest{Fence: r.GetFence()})
	require.NoError(t, err)
	require.Len(t, w.next().GetDelta().GetTombstonesRemoved(), 1)
	require.Empty(t, watch(t, one).next().GetSnapshot().GetTombstones())
	_, err = one.AnnounceLeader(ctx, &agentv1.AnnounceLeaderRequest{})
	require.NoError(t, err)
}

// Each address belongs to one agent, which refuses calls for another agent.
func TestAgentIsChosenByAddress(t *testing.T) {
	_, clients := start(t, time.Hour)
	require.Equal(t, "two", watch(t, clients["two"]).next().GetSnapshot().GetInfo().GetPodUid())
	created, err := clients["two"].CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: record("one", "astray")})
	require.NoError(t, err)
	_, err = drain(t, created.Recv)
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
}

func TestHeartbeats(t *testing.T) {
	_, clients := start(t, time.Millisecond)
	w := watch(t, clients["two"])
	require.NotNil(t, w.next().GetSnapshot())
	for range 3 {
		require.Nil(t, w.next().GetContent())
	}
}

func TestStopEndsStreams(t *testing.T) {
	s, clients := start(t, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w, err := clients["one"].WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	_, err = w.Recv()
	require.NoError(t, err)
	s.Stop()
	_, err = w.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err))
}
