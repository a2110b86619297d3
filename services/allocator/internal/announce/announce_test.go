package announce_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/announce"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// elector says which term it has.
type elector struct {
	mu      sync.Mutex
	term    int64
	changed chan struct{}
}

func (e *elector) State() (leader.State, <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return leader.State{Term: e.term}, e.changed
}

func (e *elector) Superseded(int64) {}

func (e *elector) Confirm(context.Context) (bool, error) { return true, nil }

func (e *elector) set(term int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.term = term
	close(e.changed)
	e.changed = make(chan struct{})
}

// agents counts the announcements.
type agents struct {
	agentv1.AgentServiceClient // what is not used is nil

	mu        sync.Mutex
	announced int
	fails     int
}

func (a *agents) AnnounceLeader(context.Context, *agentv1.AnnounceLeaderRequest, ...grpc.CallOption) (*agentv1.AnnounceLeaderResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fails > 0 {
		a.fails--
		return nil, errors.New("not now")
	}
	a.announced++
	return &agentv1.AnnounceLeaderResponse{}, nil
}

func (a *agents) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.announced
}

func TestAnnouncements(t *testing.T) { synctest.Test(t, testAnnouncements) }

func testAnnouncements(t *testing.T) {
	e, a, set := &elector{changed: make(chan struct{})}, &agents{fails: 2}, tasks.New()
	l := leadership.New(e, leadership.NewIdentity("a", "10.0.0.1:1"))
	n := announce.New(announce.Config{
		Lead: l, Tasks: set, Clock: clock.RealClock{}, Client: func(string) (agentv1.AgentServiceClient, bool) { return a, true },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = set.Run(ctx) })
	wg.Go(func() { _ = n.Run(ctx) })
	announced := func(uid string) func() bool { return func() bool { return n.Announced(uid) } }

	n.Connected("a")
	<-time.After(time.Hour)
	synctest.Wait()
	require.False(t, n.Announced("a"))
	require.Zero(t, a.count(), "a standby has nothing to announce")
	e.set(1)
	<-time.After(time.Minute)
	require.True(t, announced("a")(), "also after failures")
	require.Equal(t, 1, a.count())
	require.False(t, n.Announced("b"), "it has not connected")
	n.Connected("b")
	<-time.After(time.Minute)
	require.True(t, announced("b")())
	e.set(0)
	require.False(t, n.Announced("a"), "a suspended leader relies on nothing")
	e.set(2)
	<-time.After(time.Minute)
	require.True(t, n.Announced("a") && n.Announced("b") && a.count() == 4, "under a higher term again")
	n.Connected("a")
	<-time.After(time.Minute)
	require.True(t, n.Announced("a") && a.count() == 5, "and by each new stream")
	n.Gone("a")
	require.False(t, n.Announced("a"))
	e.set(3)
	<-time.After(time.Minute)
	require.True(t, announced("b")())
	require.Equal(t, 6, a.count())
}

func TestSingleReplicaAnnouncesNothing(t *testing.T) {
	n := announce.New(announce.Config{Lead: leadership.Alone(), Tasks: tasks.New(), Clock: clock.RealClock{}})
	n.Connected("a")
	require.True(t, n.Announced("a"))
	require.True(t, n.Announced("unknown"))
}
