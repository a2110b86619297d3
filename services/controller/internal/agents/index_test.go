package agents_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// feed is an AllocatorService whose watch sends what the test puts into it, and ends when told to.
type feed struct {
	allocatorv1.UnimplementedAllocatorServiceServer
	events chan *allocatorv1.WatchAgentsResponse // nil ends the stream
}

// WatchAgents sends the script.
func (f *feed) WatchAgents(_ *allocatorv1.WatchAgentsRequest, s grpc.ServerStreamingServer[allocatorv1.WatchAgentsResponse]) error {
	for {
		select {
		case <-s.Context().Done():
			return nil
		case e := <-f.events:
			if e == nil {
				return rpc.ToStatus(fault.New(errdefs.ErrUnavailable, fault.NotLeader, "another replica leads").RetryIn(time.Second))
			}
			if err := s.Send(e); err != nil {
				return err
			}
		}
	}
}

// told collects what subscribers are told.
type told struct {
	mu     sync.Mutex
	names  map[string]int
	synced int
}

func (c *told) add(n types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names[n.Name]++
}

func (c *told) take(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.names[name]
	delete(c.names, name)
	return n > 0
}

func setUp(t *testing.T) (*feed, *agents.Index, *told) {
	t.Helper()
	f := &feed{events: make(chan *allocatorv1.WatchAgentsResponse)}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	allocatorv1.RegisterAllocatorServiceServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := rpc.Dial("passthrough:///allocator", rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })}})
	require.NoError(t, err)
	index := agents.NewIndex(clock.RealClock{})
	c := &told{names: map[string]int{}}
	index.Subscribe(agents.Subscriber{Sandbox: c.add, Pool: c.add, Synced: func() { c.mu.Lock(); c.synced++; c.mu.Unlock() }})
	conns := agents.NewConns(rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}}, clock.RealClock{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	w := &agents.Watcher{Allocator: allocatorv1.NewAllocatorServiceClient(conn), Index: index, Conns: conns, Clock: clock.RealClock{}}
	go func() { ended <- w.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close())
		require.NoError(t, conns.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return f, index, c
}

func agentMessage(kind allocatorv1.WatchAgentsResponse_Type, uid string, ready bool, heard *timestamppb.Timestamp, reports ...*agentv1.SandboxReport) *allocatorv1.WatchAgentsResponse {
	return &allocatorv1.WatchAgentsResponse{Type: kind, Sandboxes: reports, Agent: &allocatorv1.Agent{Ready: ready, LastHeartbeatTime: heard, Address: "x:1",
		Info: &agentv1.AgentInfo{PodUid: uid, Namespace: "ns", Pool: "pool-of-" + uid}}}
}

func report(uid string, attempt int64, state agentv1.SandboxState) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: state, Record: &agentv1.SandboxRecord{Namespace: "ns", Name: "name-" + uid,
		Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt}}}
}

const (
	kindAgent     = allocatorv1.WatchAgentsResponse_TYPE_AGENT
	kindSandboxes = allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES
	kindGone      = allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE
	running       = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	terminated    = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

func fence(agent, uid string, attempt int64) *agentv1.Fence {
	return &agentv1.Fence{AgentUid: agent, SandboxUid: uid, Attempt: attempt}
}

func eventually(t *testing.T, is func() bool) {
	t.Helper()
	require.Eventually(t, is, 20*time.Second, 2*time.Millisecond)
}

func TestIndexFollowsTheStream(t *testing.T) {
	f, index, told := setUp(t)
	now := timestamppb.Now()
	f.events <- agentMessage(kindAgent, "a", true, now, report("s1", 1, running), report("s2", 1, running))
	f.events <- agentMessage(kindAgent, "b", true, now, report("s1", 2, running))
	require.False(t, index.Synced())
	require.Nil(t, index.Report(fence("a", "s1", 1)), "shown before the registry was read whole")
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, index.Synced)
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	require.Nil(t, index.Report(fence("b", "s1", 1)), "another agent's")
	require.Len(t, index.Reports("s1"), 2)
	require.Len(t, index.Pool(types.NamespacedName{Namespace: "ns", Name: "pool-of-a"}), 1)
	eventually(t, func() bool { return told.take("name-s1") && told.take("pool-of-b") })

	// A change, and an end that stays readable.
	f.events <- agentMessage(kindSandboxes, "a", true, now, report("s1", 1, terminated))
	eventually(t, func() bool { return told.take("name-s1") })
	require.Equal(t, terminated, index.Report(fence("a", "s1", 1)).GetState())
	require.Len(t, index.Reports("s1"), 1, "a container that is gone is not on any agent")
	a, ok := index.Agent("a")
	require.True(t, ok)
	require.Len(t, a.Sandboxes, 1)

	// What an agent's whole word leaves out is gone from it.
	told.take("name-s2")
	f.events <- agentMessage(kindAgent, "a", true, now)
	eventually(t, func() bool { return told.take("name-s2") })
	require.Nil(t, index.Report(fence("a", "s2", 1)))

	// An agent that goes takes its reports along.
	told.take("name-s1")
	f.events <- agentMessage(kindGone, "b", false, now)
	eventually(t, func() bool { return told.take("name-s1") })
	require.Empty(t, index.Reports("s1"))
	_, ok = index.Agent("b")
	require.False(t, ok)
}

// TestStreamThatBreaks: what was known stays as the last word, unsynced, until all is read again; then what has gone
// meanwhile is told of.
func TestStreamThatBreaks(t *testing.T) {
	f, index, told := setUp(t)
	now := timestamppb.Now()
	f.events <- agentMessage(kindAgent, "a", true, now, report("s1", 1, running))
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, func() bool { return index.Synced() && told.take("name-s1") })
	f.events <- nil
	eventually(t, func() bool { return !index.Synced() })
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	require.Equal(t, agents.Unknown, index.Standing("a"))
	f.events <- agentMessage(kindAgent, "b", true, now)
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, func() bool { return index.Synced() && told.take("name-s1") })
	require.Nil(t, index.Report(fence("a", "s1", 1)))
	told.mu.Lock()
	require.Equal(t, 2, told.synced)
	told.mu.Unlock()
}

// TestReplicaThatDoesNotLead: the stream is refused, or ends before it has synced, until some replica leads. Nothing
// is concluded from what came before that.
func TestReplicaThatDoesNotLead(t *testing.T) {
	f, index, _ := setUp(t)
	now := timestamppb.Now()
	f.events <- nil
	f.events <- agentMessage(kindAgent, "stale", true, now, report("s0", 1, running))
	f.events <- nil
	f.events <- nil
	require.False(t, index.Synced())
	f.events <- agentMessage(kindAgent, "a", true, now, report("s1", 1, running))
	require.Nil(t, index.Report(fence("stale", "s0", 1)))
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, index.Synced)
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	require.Equal(t, agents.Absent, index.Standing("stale"))
}

// TestStanding: what the Registry says of an agent counts, and no time that it says.
func TestStanding(t *testing.T) {
	f, index, _ := setUp(t)
	old := timestamppb.New(time.Now().Add(-time.Minute))
	for uid, reason := range map[string]string{"ready": "", "draining": "Draining", "silent": "HeartbeatTimeout", "unheard": "Connecting"} {
		m := agentMessage(kindAgent, uid, uid == "ready", old)
		m.Agent.Reason = reason
		f.events <- m
	}
	require.Equal(t, agents.Unknown, index.Standing("ready"), "not read yet")
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, index.Synced)
	for uid, want := range map[string]agents.Standing{
		"ready": agents.Present, "draining": agents.Quiet, "silent": agents.Silent, "unheard": agents.Quiet, "nobody": agents.Absent,
	} {
		require.Equal(t, want, index.Standing(uid), uid)
	}
}

func TestConnsAfterTheEnd(t *testing.T) {
	conns := agents.NewConns(rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}}, clock.RealClock{})
	_, err := conns.Client("")
	require.ErrorContains(t, err, "no address")
	_, err = conns.Client("127.0.0.1:1")
	require.NoError(t, err)
	conns.Drop("127.0.0.1:1")
	conns.Drop("127.0.0.1:1")
	_, err = conns.Snapshot(t.Context(), "127.0.0.1:1", "uid")
	require.Error(t, err)
	require.NoError(t, conns.Close())
	_, err = conns.Client("127.0.0.1:1")
	require.Error(t, err, "a connection after the end would have no owner")
}
