package feed_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/feed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sink records its calls.
type sink struct {
	mu                  sync.Mutex
	joined, left, beats int
	snapshots           []*agentv1.AgentSnapshot
	deltas              []*agentv1.AgentDelta
	afterLeft           bool
}

func (s *sink) note(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.afterLeft = s.afterLeft || s.left > 0
	f()
}

func (s *sink) Joined(*agentv1.AgentInfo, string) { s.note(func() { s.joined++ }) }
func (s *sink) Left(string)                       { s.note(func() { s.left++ }) }
func (s *sink) Heartbeat(string)                  { s.note(func() { s.beats++ }) }
func (s *sink) Snapshot(_ string, x *agentv1.AgentSnapshot) {
	s.note(func() { s.snapshots = append(s.snapshots, x) })
}
func (s *sink) Delta(_ string, x *agentv1.AgentDelta) {
	s.note(func() { s.deltas = append(s.deltas, x) })
}

func (s *sink) is(f func() bool) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return f()
	}
}

type fixture struct {
	sink  *sink
	feed  *feed.Feed
	agent *fakeagent.Agent
}

func start(t *testing.T, silence time.Duration, script func(*fakeagent.Agent)) *fixture {
	t.Helper()
	f := &fixture{sink: &sink{}, agent: fakeagent.New(&agentv1.AgentInfo{PodUid: "a", Capacity: 5})}
	if script != nil {
		script(f.agent)
	}
	pipe := bufconn.Listen(1 << 16)
	f.feed = feed.New(feed.Config{Sink: f.sink, Clock: clock.RealClock{}, Silence: silence, Dial: func(*agentv1.AgentInfo, string) (*grpc.ClientConn, error) {
		return grpc.NewClient("passthrough:///a", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	}})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = f.feed.Run(ctx) })
	wg.Go(func() { _ = f.agent.Serve(ctx, pipe, rpc.TLS{Insecure: true}) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return f
}

func (f *fixture) eventually(t *testing.T, cond func() bool) {
	t.Helper()
	require.Eventually(t, f.sink.is(cond), 5*time.Second, 2*time.Millisecond)
}

func TestSnapshotDeltaHeartbeatLeft(t *testing.T) {
	f := start(t, 0, func(a *fakeagent.Agent) { a.Heartbeat = 5 * time.Millisecond })
	f.feed.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
	f.feed.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
	f.eventually(t, func() bool { return len(f.sink.snapshots) == 1 && f.sink.beats > 2 })
	f.agent.Put(&agentv1.SandboxReport{Record: &agentv1.SandboxRecord{Fence: &agentv1.Fence{SandboxUid: "u", Attempt: 1}}})
	f.eventually(t, func() bool { return len(f.sink.deltas) == 1 })
	_, ok := f.feed.Client("a")
	require.True(t, ok)
	require.False(t, f.feed.Gone("b"), "not before all Pods are known")
	f.feed.SetSynced()
	require.True(t, f.feed.Gone("b"))
	f.feed.RemovePod("a")
	f.feed.RemovePod("a")
	f.eventually(t, func() bool { return f.sink.left == 1 })
	require.True(t, f.feed.Gone("a"))
	require.Equal(t, 1, f.agent.Watches())
	require.Equal(t, 1, f.sink.joined)
	require.False(t, f.sink.afterLeft, "nothing follows Left")
}

func TestBrokenStreamIsReopened(t *testing.T) {
	tests := map[string]struct {
		silence time.Duration
		script  func(*fakeagent.Agent)
	}{
		"a number is skipped": {0, func(a *fakeagent.Agent) { a.Heartbeat, a.Skip = 2*time.Millisecond, true }},
		"silence":             {30 * time.Millisecond, func(a *fakeagent.Agent) { a.Heartbeat = time.Hour }},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			f := start(t, test.silence, test.script)
			f.feed.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
			f.eventually(t, func() bool { return len(f.sink.snapshots) >= 2 })
			require.GreaterOrEqual(t, f.agent.Watches(), 2)
		})
	}
}

func TestAnotherAgentAtTheAddressIsIgnored(t *testing.T) {
	f := start(t, 0, nil)
	f.feed.SetPod(&agentv1.AgentInfo{PodUid: "other"}, "one")
	require.Eventually(t, func() bool { return f.agent.Watches() >= 2 }, 5*time.Second, 2*time.Millisecond)
	f.eventually(t, func() bool { return len(f.sink.snapshots) == 0 })
}

// TestHeldPodIsNotGone: a Pod that is not known to be an agent gets no connection, and its end is not taken for granted.
func TestHeldPodIsNotGone(t *testing.T) {
	f := start(t, 0, nil)
	f.feed.SetSynced()
	f.feed.HoldPod("a")
	require.False(t, f.feed.Gone("a"))
	_, ok := f.feed.Client("a")
	require.False(t, ok)
	f.feed.RemovePod("a")
	require.True(t, f.feed.Gone("a"))
	f.feed.HoldPod("a")
	f.feed.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
	f.feed.HoldPod("a")
	f.eventually(t, func() bool { return len(f.sink.snapshots) == 1 })
	f.feed.RemovePod("a")
	f.eventually(t, func() bool { return f.sink.left == 1 })
	require.True(t, f.feed.Gone("a"))
}
