package liveness_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/liveness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// elector is the view of a standby.
type elector struct {
	leadership.Elector // what is not used is nil
	holder             string
	changed            chan struct{}
}

func (e *elector) State() (leader.State, <-chan struct{}) {
	return leader.State{Holder: e.holder}, e.changed
}

// serve runs a server until the test ends or the returned function is called.
func serve(t *testing.T, address string) (string, func()) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	s := grpc.NewServer()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Serve(l)
	}()
	stop := func() { s.Stop(); <-ended }
	t.Cleanup(stop)
	return l.Addr().String(), stop
}

func TestRun(t *testing.T) {
	address, kill := serve(t, "127.0.0.1:0")
	holder := leadership.Identity{Pod: "a", Address: address, Nonce: "1"}.String()
	var reports atomic.Int64
	var dials atomic.Int64
	e := &elector{holder: holder, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- liveness.Run(ctx, liveness.Config{
			Lead: leadership.New(e, leadership.NewIdentity("b", "127.0.0.1:1")), Clock: clock.RealClock{},
			Dial: func(address string) (*grpc.ClientConn, error) {
				dials.Add(1)
				return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
			},
			Refused: func(who string) {
				if who == holder {
					reports.Add(1)
				}
			},
		})
	}()
	require.Eventually(t, func() bool { return dials.Load() == 1 }, testkit.Timeout, testkit.Tick)
	require.Zero(t, reports.Load(), "the server answers")

	kill()
	require.Eventually(t, func() bool { return reports.Load() > 2 }, testkit.Timeout, testkit.Tick, "it is reported repeatedly")

	_, kill = serve(t, address)
	quiet := func() bool {
		before := reports.Load()
		<-clock.RealClock{}.After(4 * testkit.Tick)
		return reports.Load() == before
	}
	require.Eventually(t, quiet, testkit.Timeout, testkit.Tick, "a server that answers again is not reported")
	before := reports.Load()
	kill()
	require.Eventually(t, func() bool { return reports.Load() > before }, testkit.Timeout, testkit.Tick)
	cancel()
	require.NoError(t, <-ended)
}

// A leader without a known address, and one that runs alone, are not watched.
func TestRunWithoutALeader(t *testing.T) {
	for name, view := range map[string]*leadership.View{
		"alone":     leadership.Alone(),
		"no holder": leadership.New(&elector{changed: make(chan struct{})}, leadership.NewIdentity("b", "127.0.0.1:1")),
		"foreign":   leadership.New(&elector{holder: "another program", changed: make(chan struct{})}, leadership.NewIdentity("b", "127.0.0.1:1")),
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.NoError(t, liveness.Run(ctx, liveness.Config{Lead: view, Clock: clock.RealClock{}}))
		})
	}
}
