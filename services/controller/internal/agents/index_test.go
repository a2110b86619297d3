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
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// allocator is an AllocatorService whose WatchAgents sends the events of the test.
type allocator struct {
	allocatorv1.UnimplementedAllocatorServiceServer
	events chan *allocatorv1.WatchAgentsResponse // nil ends the stream
}

// WatchAgents implements allocatorv1.AllocatorServiceServer.
func (f *allocator) WatchAgents(_ *allocatorv1.WatchAgentsRequest, s grpc.ServerStreamingServer[allocatorv1.WatchAgentsResponse]) error {
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

// notifications records what a subscriber received.
type notifications struct {
	mu     sync.Mutex
	names  map[string]int
	synced int
}

func (c *notifications) add(n types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names[n.Name]++
}

// take reports whether the name was received since it was taken last.
func (c *notifications) take(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.names[name]
	delete(c.names, name)
	return n > 0
}

func setUp(t *testing.T) (*allocator, *agents.Index, *notifications) {
	t.Helper()
	f := &allocator{events: make(chan *allocatorv1.WatchAgentsResponse)}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	allocatorv1.RegisterAllocatorServiceServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := rpc.Dial("passthrough:///allocator", rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })}})
	require.NoError(t, err)
	index := agents.NewIndex(clock.RealClock{})
	c := &notifications{names: map[string]int{}}
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

func agentMessage(kind allocatorv1.WatchAgentsResponse_Type, uid string, ready bool, heartbeat *timestamppb.Timestamp, reports ...*agentv1.SandboxReport) *allocatorv1.WatchAgentsResponse {
	return &allocatorv1.WatchAgentsResponse{Type: kind, Sandboxes: reports, Agent: &allocatorv1.Agent{Ready: ready, LastHeartbeatTime: heartbeat, Address: "x:1",
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

func fence(agent, uid string, attempt int64) identity.Fence {
	return identity.Fence{AgentUID: agent, SandboxUID: uid, Attempt: attempt}
}

func eventually(t *testing.T, condition func() bool) {
	t.Helper()
	require.Eventually(t, condition, testkit.Timeout, testkit.Tick)
}

func TestIndexFollowsTheStream(t *testing.T) {
	f, index, received := setUp(t)
	now := timestamppb.Now()
	f.events <- agentMessage(kindAgent, "a", true, now, report("s1", 1, running), report("s2", 1, running))
	f.events <- agentMessage(kindAgent, "b", true, now, report("s1", 2, running))
	require.False(t, index.Synced())
	require.Nil(t, index.Report(fence("a", "s1", 1)), "visible before SYNCED")
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, index.Synced)
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	require.Nil(t, index.Report(fence("b", "s1", 1)), "reported by another agent")
	require.Len(t, index.Reports("s1"), 2)
	require.Len(t, index.Pool(types.NamespacedName{Namespace: "ns", Name: "pool-of-a"}), 1)
	eventually(t, func() bool { return received.take("name-s1") && received.take("pool-of-b") })

	// The report of a container that was removed stays readable.
	f.events <- agentMessage(kindSandboxes, "a", true, now, report("s1", 1, terminated))
	eventually(t, func() bool { return received.take("name-s1") })
	require.Equal(t, terminated, index.Report(fence("a", "s1", 1)).GetState())
	require.Len(t, index.Reports("s1"), 1, "a removed container is on no agent")
	a, ok := index.Agent("a")
	require.True(t, ok)
	require.Len(t, a.Sandboxes, 1)

	// A full report of an agent that does not list a sandbox removes it.
	received.take("name-s2")
	f.events <- agentMessage(kindAgent, "a", true, now)
	eventually(t, func() bool { return received.take("name-s2") })
	require.Nil(t, index.Report(fence("a", "s2", 1)))

	// The reports of an agent that is removed are removed, too.
	received.take("name-s1")
	f.events <- agentMessage(kindGone, "b", false, now)
	eventually(t, func() bool { return received.take("name-s1") })
	require.Empty(t, index.Reports("s1"))
	_, ok = index.Agent("b")
	require.False(t, ok)
}

// TestBrokenStreamKeepsContent: after the stream has broken, the content stays until the Registry is read again. Then the
// subscribers receive the names of sandboxes that were removed in between.
func TestBrokenStreamKeepsContent(t *testing.T) {
	f, index, received := setUp(t)
	now := timestamppb.Now()
	f.events <- agentMessage(kindAgent, "a", true, now, report("s1", 1, running))
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, func() bool { return index.Synced() && received.take("name-s1") })
	f.events <- nil
	eventually(t, func() bool { return !index.Synced() })
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	require.Equal(t, agents.Unknown, index.Status("a"))
	f.events <- agentMessage(kindAgent, "b", true, now)
	require.NotNil(t, index.Report(fence("a", "s1", 1)))
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	eventually(t, func() bool { return index.Synced() && received.take("name-s1") })
	require.Nil(t, index.Report(fence("a", "s1", 1)))
	received.mu.Lock()
	require.Equal(t, 2, received.synced)
	received.mu.Unlock()
}

// TestUnsyncedStreamIsDiscarded: replicas that do not lead refuse the stream or end it before SYNCED.
func TestUnsyncedStreamIsDiscarded(t *testing.T) {
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
	require.Equal(t, agents.Absent, index.Status("stale"))
}

// TestStatus: the Registry's reason counts, not its timestamps.
func TestStatus(t *testing.T) {
	f, index, _ := setUp(t)
	old := timestamppb.New(time.Now().Add(-time.Minute))
	for uid, reason := range map[string]string{"ready": "", "draining": "Draining", "silent": "HeartbeatTimeout", "connecting": "Connecting"} {
		m := agentMessage(kindAgent, uid, uid == "ready", old)
		m.Agent.Reason = reason
		f.events <- m
	}
	require.Equal(t, agents.Unknown, index.Status("ready"), "not synced yet")
	require.Equal(t, 10*time.Second, index.HeartbeatTimeout(), "the default")
	f.events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED, HeartbeatTimeout: durationpb.New(time.Minute)}
	eventually(t, index.Synced)
	require.Equal(t, time.Minute, index.HeartbeatTimeout(), "the allocator's")
	for uid, want := range map[string]agents.Status{
		"ready": agents.Ready, "draining": agents.NotReady, "silent": agents.Silent, "connecting": agents.NotReady, "removed": agents.Absent,
	} {
		require.Equal(t, want, index.Status(uid), uid)
	}
}

func TestClosedConnsRefuseClients(t *testing.T) {
	conns := agents.NewConns(rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}}, clock.RealClock{})
	_, err := conns.Client("", "uid")
	require.ErrorContains(t, err, "no address")
	_, err = conns.Client("127.0.0.1:1", "uid")
	require.NoError(t, err)
	conns.Drop("127.0.0.1:1")
	conns.Drop("127.0.0.1:1")
	_, err = conns.Snapshot(t.Context(), "127.0.0.1:1", "uid")
	require.Error(t, err)
	require.NoError(t, conns.Close())
	_, err = conns.Client("127.0.0.1:1", "uid")
	require.Error(t, err, "nothing would close the connection")
}
