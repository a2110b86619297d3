package feed_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/feed"
)

// scripted is an agent that sends one script on its first stream, and a good snapshot on all others.
type scripted struct {
	agentv1.UnimplementedAgentServiceServer
	script []*agentv1.WatchStatusResponse

	mu      sync.Mutex
	streams int
}

func (s *scripted) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	s.mu.Lock()
	s.streams++
	script := []*agentv1.WatchStatusResponse{snapshot("a", 1, "good")}
	if s.streams == 1 {
		script = s.script
	}
	s.mu.Unlock()
	for _, m := range script {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (s *scripted) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.streams
}

func snapshot(uid string, sequence int64, epoch string) *agentv1.WatchStatusResponse {
	return &agentv1.WatchStatusResponse{Sequence: sequence, Epoch: epoch, Content: &agentv1.WatchStatusResponse_Snapshot{
		Snapshot: &agentv1.AgentSnapshot{Info: &agentv1.AgentInfo{PodUid: uid}},
	}}
}

func delta(sequence int64, epoch string) *agentv1.WatchStatusResponse {
	return &agentv1.WatchStatusResponse{Sequence: sequence, Epoch: epoch, Content: &agentv1.WatchStatusResponse_Delta{Delta: &agentv1.AgentDelta{}}}
}

func heartbeat(sequence int64, epoch string) *agentv1.WatchStatusResponse {
	return &agentv1.WatchStatusResponse{Sequence: sequence, Epoch: epoch}
}

// serve runs an agent, and a feed that reaches it by every address, after the first failures of Dial.
func serve(t *testing.T, agent *scripted, failures int) (*feed.Feed, *sink) {
	t.Helper()
	pipe := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	agentv1.RegisterAgentServiceServer(server, agent)
	s := &sink{}
	var mu sync.Mutex
	f := feed.New(feed.Config{Sink: s, Clock: clock.RealClock{}, Dial: func(*agentv1.AgentInfo, string) (*grpc.ClientConn, error) {
		mu.Lock()
		defer mu.Unlock()
		if failures--; failures >= 0 {
			return nil, errors.New("the certificate is half written")
		}
		return grpc.NewClient("passthrough:///a", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	}})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = f.Run(ctx) })
	wg.Go(func() { _ = server.Serve(pipe) })
	t.Cleanup(func() { cancel(); server.Stop(); wg.Wait() })
	return f, s
}

// TestStreamIsChecked: what precedes the first invalid message counts, what follows does not, and the stream is opened again.
func TestStreamIsChecked(t *testing.T) {
	tests := map[string]struct {
		script                   []*agentv1.WatchStatusResponse
		snapshots, deltas, beats int // that arrive, the good snapshot of the next stream included
		again                    bool
	}{
		"valid": {[]*agentv1.WatchStatusResponse{snapshot("a", 1, "e"), delta(2, "e"), heartbeat(3, "e")}, 1, 1, 1, false},
		"a delta without a snapshot": {
			[]*agentv1.WatchStatusResponse{delta(1, "e"), snapshot("a", 2, "e")}, 1, 0, 0, true,
		},
		"a heartbeat without a snapshot": {[]*agentv1.WatchStatusResponse{heartbeat(1, "e")}, 1, 0, 0, true},
		"a second snapshot":              {[]*agentv1.WatchStatusResponse{snapshot("a", 1, "e"), snapshot("a", 2, "e")}, 2, 0, 0, true},
		"a number is skipped": {
			[]*agentv1.WatchStatusResponse{snapshot("a", 1, "e"), delta(2, "e"), delta(4, "e"), delta(5, "e")}, 2, 1, 0, true,
		},
		"a number is repeated":         {[]*agentv1.WatchStatusResponse{snapshot("a", 1, "e"), delta(2, "e"), delta(2, "e")}, 2, 1, 0, true},
		"it does not begin with one":   {[]*agentv1.WatchStatusResponse{snapshot("a", 7, "e")}, 1, 0, 0, true},
		"another epoch":                {[]*agentv1.WatchStatusResponse{snapshot("a", 1, "e"), delta(2, "f")}, 2, 0, 0, true},
		"the snapshot of another":      {[]*agentv1.WatchStatusResponse{snapshot("b", 1, "e")}, 1, 0, 0, true},
		"no epoch, as in the snapshot": {[]*agentv1.WatchStatusResponse{snapshot("a", 1, ""), delta(2, "")}, 1, 1, 0, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			agent := &scripted{script: test.script}
			f, s := serve(t, agent, 0)
			f.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
			require.Eventually(t, s.is(func() bool {
				return len(s.snapshots) == test.snapshots && len(s.deltas) == test.deltas && s.beats == test.beats
			}), testkit.Timeout, testkit.Tick)
			f.RemovePod("a")
			require.Eventually(t, s.is(func() bool { return s.left == 1 }), testkit.Timeout, testkit.Tick)
			require.Equal(t, []int{test.snapshots, test.deltas, test.beats}, []int{len(s.snapshots), len(s.deltas), s.beats}, "until its end")
			require.Equal(t, test.again, agent.count() == 2)
		})
	}
}

// TestAgentThatReportsWithoutEnd: what is read of it is bounded, over all its streams.
func TestAgentThatReportsWithoutEnd(t *testing.T) {
	script := []*agentv1.WatchStatusResponse{snapshot("a", 1, "e")}
	for n := int64(2); n < 60_000; n++ {
		script = append(script, delta(n, "e"))
	}
	f, s := serve(t, &scripted{script: script}, 0)
	begin := time.Now()
	f.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "a:1")
	deltas := 0
	require.Eventually(t, s.is(func() bool { deltas = len(s.deltas); return deltas > 25_000 }), testkit.Timeout, testkit.Tick)
	most := 20_000 + 2_000*time.Since(begin).Seconds()
	require.LessOrEqual(t, float64(deltas), most+1)
	f.RemovePod("a")
	require.Eventually(t, s.is(func() bool { return s.left == 1 }), testkit.Timeout, testkit.Tick, "while it waits")
}

// TestDialIsRepeated: until then there is no connection, and the agent is not gone.
func TestDialIsRepeated(t *testing.T) {
	agent := &scripted{script: []*agentv1.WatchStatusResponse{snapshot("a", 1, "e")}}
	f, s := serve(t, agent, 2)
	f.SetSynced()
	f.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
	require.False(t, f.Gone("a"))
	require.Eventually(t, s.is(func() bool { return len(s.snapshots) == 1 }), testkit.Timeout, testkit.Tick)
	_, ok := f.Client("a")
	require.True(t, ok)
	_, ok = f.Client("b")
	require.False(t, ok)
}

// TestPodWithAnotherAddress: its agent joins again, and the calls of both connections do not mix.
func TestPodWithAnotherAddress(t *testing.T) {
	agent := &scripted{script: []*agentv1.WatchStatusResponse{snapshot("a", 1, "e"), delta(2, "e")}}
	f, s := serve(t, agent, 0)
	f.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "one")
	require.Eventually(t, s.is(func() bool { return len(s.deltas) == 1 }), testkit.Timeout, testkit.Tick)
	f.SetPod(&agentv1.AgentInfo{PodUid: "a"}, "two")
	require.Eventually(t, s.is(func() bool { return s.joined == 2 && len(s.snapshots) == 2 }), testkit.Timeout, testkit.Tick)
	require.Zero(t, s.left, "it is the same Pod")
	f.RemovePod("a")
	require.Eventually(t, s.is(func() bool { return s.left == 1 }), testkit.Timeout, testkit.Tick)
	require.False(t, s.afterLeft)
	require.Equal(t, 2, agent.count())
}
