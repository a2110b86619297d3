package forward_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/forward"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	wait = testkit.Timeout
	tick = testkit.Tick
)

// elector returns the state that the test has set.
type elector struct {
	mu      sync.Mutex
	state   leader.State
	changed chan struct{}
}

func (e *elector) State() (leader.State, <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state, e.changed
}

func (e *elector) Superseded(int64) {}

func (e *elector) Confirm(context.Context) (bool, error) { return true, nil }

func (e *elector) set(s leader.State) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state = s
	close(e.changed)
	e.changed = make(chan struct{})
}

// replica is one allocator as far as calls go: its handlers tell who handled them.
type replica struct {
	sandboxv1.UnimplementedSandboxServiceServer
	name     string
	elector  *elector
	identity leadership.Identity
	client   sandboxv1.SandboxServiceClient
	forward  *forward.Forwarder
	stop     func()

	onCreate func(ctx context.Context, n int64) error
	onDelete func(ctx context.Context) error
	onLogs   func(stream grpc.ServerStreamingServer[sandboxv1.StreamLogsResponse]) error
	creates  atomic.Int64
	streams  atomic.Int64
}

func (r *replica) CreateSandbox(ctx context.Context, req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	n := r.creates.Add(1)
	if r.onCreate != nil {
		if err := r.onCreate(ctx, n); err != nil {
			return nil, err
		}
	}
	_ = grpc.SetTrailer(ctx, metadata.Pairs("x-handled-by", r.name))
	return &sandboxv1.CreateSandboxResponse{Sandbox: &sandboxv1.Sandbox{Name: req.GetName(), Uid: r.name}}, nil
}

func (r *replica) DeleteSandbox(ctx context.Context, _ *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	return &sandboxv1.DeleteSandboxResponse{}, r.onDelete(ctx)
}

func (r *replica) WatchSandboxes(req *sandboxv1.WatchSandboxesRequest, stream grpc.ServerStreamingServer[sandboxv1.WatchSandboxesResponse]) error {
	r.streams.Add(1)
	if err := stream.Send(&sandboxv1.WatchSandboxesResponse{Sandbox: &sandboxv1.Sandbox{Name: req.GetName(), Uid: r.name}}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (r *replica) StreamLogs(_ *sandboxv1.StreamLogsRequest, stream grpc.ServerStreamingServer[sandboxv1.StreamLogsResponse]) error {
	r.streams.Add(1)
	return r.onLogs(stream)
}

// mesh is some replicas that reach each other by their identities' addresses.
type mesh struct {
	t       *testing.T
	mu      sync.Mutex
	pipes   map[string]*bufconn.Listener
	refused int
}

// refusals returns the number of connections to absent replicas.
func (m *mesh) refusals() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.refused
}

func (m *mesh) dial(address string) (*grpc.ClientConn, error) {
	return rpc.Dial("passthrough:///"+address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			m.mu.Lock()
			pipe := m.pipes[address]
			if pipe == nil {
				m.refused++
			}
			m.mu.Unlock()
			if pipe == nil {
				return nil, errors.New("connection refused")
			}
			return pipe.DialContext(ctx)
		}),
	}})
}

func newMesh(t *testing.T) *mesh { return &mesh{t: t, pipes: map[string]*bufconn.Listener{}} }

func (m *mesh) replica(name string) *replica {
	t := m.t
	t.Helper()
	r := &replica{name: name, elector: &elector{changed: make(chan struct{})}, identity: leadership.NewIdentity(name, name+":9090")}
	r.forward = forward.New(forward.Config{
		Lead: leadership.New(r.elector, r.identity), Dial: m.dial, Clock: clock.RealClock{}, Services: []string{"fastsandbox.sandbox.v1.SandboxService"},
		Timeout: 300 * time.Millisecond,
	})
	ctx, cancel := context.WithCancel(context.Background())
	pipe := bufconn.Listen(1 << 16)
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Listener: pipe, TLS: rpc.TLS{Insecure: true}, DrainTimeout: 10 * time.Millisecond,
		Unary: []grpc.UnaryServerInterceptor{r.forward.Unary}, Stream: []grpc.StreamServerInterceptor{r.forward.Stream},
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, r)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Run(ctx) })
	m.mu.Lock()
	m.pipes[r.identity.Address] = pipe
	m.mu.Unlock()
	conn, err := m.dial(r.identity.Address)
	require.NoError(t, err)
	r.client = sandboxv1.NewSandboxServiceClient(conn)
	r.stop = sync.OnceFunc(func() {
		m.mu.Lock()
		delete(m.pipes, r.identity.Address)
		m.mu.Unlock()
		cancel()
		wg.Wait()
	})
	t.Cleanup(func() { _ = conn.Close(); r.stop(); r.forward.Close() })
	return r
}

// leads makes one replica the leader of all.
func leads(r *replica, all ...*replica) {
	r.elector.set(leader.State{Term: 1, Holder: r.identity.String()})
	for _, other := range all {
		if other != r {
			other.elector.set(leader.State{Holder: r.identity.String()})
		}
	}
}

func create(id string) *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{Namespace: "ns", Name: "one", RequestId: id, Spec: &sandboxv1.SandboxSpec{Image: "x", Pool: "p"}}
}

func TestUnaryCallsReachTheLeader(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	leads(a, a, b)
	var deadline bool
	var seen metadata.MD
	a.onCreate = func(ctx context.Context, _ int64) error {
		_, deadline = ctx.Deadline()
		seen, _ = metadata.FromIncomingContext(ctx)
		return nil
	}
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "x-custom", "v", "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), wait)
	defer cancel()
	for _, r := range []*replica{a, b} {
		var trailer metadata.MD
		resp, err := r.client.CreateSandbox(ctx, create(""), grpc.Trailer(&trailer))
		require.NoError(t, err)
		require.Equal(t, "a", resp.GetSandbox().GetUid())
		require.Equal(t, []string{"a"}, trailer.Get("x-handled-by"))
		require.Equal(t, []string{"v"}, seen.Get("x-custom"))
		require.True(t, deadline)
	}
	require.EqualValues(t, 2, a.creates.Load())
	require.Zero(t, b.creates.Load())
	a.onCreate = func(context.Context, int64) error {
		return fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full").With("pool", "p").RetryIn(3 * time.Second)
	}
	_, here := a.client.CreateSandbox(ctx, create(""))
	_, there := b.client.CreateSandbox(ctx, create(""))
	require.Equal(t, status.Convert(here).Proto().String(), status.Convert(there).Proto().String(), "an error is the same with all its details")
}

func TestStandbyRefusesInvalidRequest(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	leads(a, a, b)
	_, err := b.client.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Namespace: "ns"})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.Zero(t, a.creates.Load())
}

func TestWithoutALeader(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	tests := map[string]leader.State{
		"no leader is known":                  {},
		"it is suspended itself":              {Holder: b.identity.String()},
		"who led is gone":                     {Holder: leadership.NewIdentity("gone", "gone:9090").String()},
		"the other does not know of its lead": {Holder: a.identity.String()},
	}
	for name, state := range tests {
		t.Run(name, func(t *testing.T) {
			b.elector.set(state)
			_, err := b.client.CreateSandbox(t.Context(), create(""))
			require.Equal(t, codes.Unavailable, status.Code(err))
			require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)))
			_, retry := fault.RetryAfter(rpc.FromStatus(err))
			require.True(t, retry)
			stream, err := b.client.WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{})
			require.NoError(t, err)
			_, err = stream.Recv()
			require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = b.client.CreateSandbox(ctx, create(""))
			require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)), "within the caller's deadline")
		})
	}
	require.Zero(t, a.creates.Load()+b.creates.Load())
}

func TestStandbyWaitsForLeader(t *testing.T) {
	for name, elect := range map[string]func(a, b *replica){
		"another": func(a, b *replica) { leads(a, a, b) },
		"itself":  func(a, b *replica) { leads(b, a, b) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			a, b := m.replica("a"), m.replica("b")
			b.elector.set(leader.State{Holder: leadership.NewIdentity("gone", "gone:9090").String()})
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			done := make(chan error, 1)
			go func() {
				_, err := b.client.CreateSandbox(ctx, create(""))
				done <- err
			}()
			refused := m.refusals()
			require.Eventually(t, func() bool { return m.refusals() > refused+1 }, wait, tick, "the former leader is dialed again and again")
			require.Empty(t, done, "the call waits")
			elect(a, b)
			require.NoError(t, <-done)
			require.EqualValues(t, 1, a.creates.Load()+b.creates.Load())
		})
	}
}

func TestForwardedCallIsNotForwardedAgain(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	a.elector.set(leader.State{Holder: b.identity.String()})
	b.elector.set(leader.State{Holder: a.identity.String()})
	_, err := a.client.CreateSandbox(t.Context(), create(""))
	require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)))
}

func TestLeaderFailsDuringCall(t *testing.T) {
	tests := map[string]struct {
		request string
		again   bool
	}{
		"with a request_id it is carried out by the next": {"r1", true},
		"without one it is unknown":                       {"", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			a, b, c := m.replica("a"), m.replica("b"), m.replica("c")
			leads(a, a, b, c)
			a.onCreate = func(ctx context.Context, _ int64) error { <-ctx.Done(); return ctx.Err() }
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			done := make(chan error, 1)
			go func() {
				_, err := b.client.CreateSandbox(ctx, create(test.request))
				done <- err
			}()
			require.Eventually(t, func() bool { return a.creates.Load() == 1 }, wait, tick)
			a.stop()
			leads(c, b, c)
			err := <-done
			if test.again {
				require.NoError(t, err)
				require.EqualValues(t, 1, c.creates.Load())
				return
			}
			require.Error(t, err)
			require.NotEqual(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)), "that would say that it was not carried out")
			require.Zero(t, c.creates.Load())
		})
	}
}

func TestCallMovesToNextLeader(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.replica("a"), m.replica("b"), m.replica("c")
	leads(a, a, b, c)
	release := make(chan struct{})
	defer close(release)
	a.onCreate = func(context.Context, int64) error { <-release; return nil }
	done := make(chan error, 1)
	go func() {
		_, err := b.client.CreateSandbox(context.Background(), create("r1"))
		done <- err
	}()
	require.Eventually(t, func() bool { return a.creates.Load() == 1 }, wait, tick)
	leads(c, b, c)
	require.NoError(t, <-done)
	require.EqualValues(t, 1, c.creates.Load())
}

// A leader deletes and stalls; the next one finds nothing. To the caller that is one delete that succeeded.
func TestDeleteExecutedTwiceSucceeds(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.replica("a"), m.replica("b"), m.replica("c")
	leads(a, a, b, c)
	missing := func(context.Context) error {
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
	}
	release, reached := make(chan struct{}), make(chan struct{})
	defer close(release)
	a.onDelete = func(context.Context) error { close(reached); <-release; return nil }
	b.onDelete, c.onDelete = missing, missing
	request := &sandboxv1.DeleteSandboxRequest{Namespace: "ns", Name: "one"}
	done := make(chan error, 1)
	go func() {
		resp, err := b.client.DeleteSandbox(context.Background(), request)
		if err == nil && resp.GetSandbox().GetName() != "one" {
			err = errors.New("the answer does not name the sandbox")
		}
		done <- err
	}()
	<-reached
	leads(c, b, c)
	require.NoError(t, <-done)
	_, err := b.client.DeleteSandbox(t.Context(), request)
	require.Equal(t, codes.NotFound, status.Code(err), "what was never there is not found")
}

func TestNotLeaderIsRetried(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	leads(a, a, b)
	a.onCreate = func(_ context.Context, n int64) error {
		if n < 3 {
			return fault.New(errdefs.ErrUnavailable, fault.NotLeader, "not now")
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	_, err := b.client.CreateSandbox(ctx, create(""))
	require.NoError(t, err)
	require.EqualValues(t, 3, a.creates.Load())
}

// A leader lost leadership in the middle of a create: the outcome is unknown.
func TestCreateInterruptedByTakeover(t *testing.T) {
	half := fault.Unsettled(fault.New(errdefs.ErrUnavailable, fault.NotLeader, "another has taken over"))
	full := func(context.Context, int64) error {
		return fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full")
	}
	for _, where := range []string{"a", "b"} { // the former leader itself, or a standby
		t.Run("with a request_id it is carried out by the next, by way of "+where, func(t *testing.T) {
			m := newMesh(t)
			a, b := m.replica("a"), m.replica("b")
			leads(a, a, b)
			a.onCreate = func(context.Context, int64) error { leads(b, a, b); return half }
			b.onCreate = full
			_, err := map[string]*replica{"a": a, "b": b}[where].client.CreateSandbox(t.Context(), create("r1"))
			require.Equal(t, fault.NoCapacity, fault.ReasonOf(rpc.FromStatus(err)))
			require.True(t, fault.IsUnsettled(rpc.FromStatus(err)), "the first leader's try may have left something")
			require.EqualValues(t, 1, b.creates.Load())
		})
		t.Run("without one it is not repeated, by way of "+where, func(t *testing.T) {
			m := newMesh(t)
			a, b := m.replica("a"), m.replica("b")
			leads(a, a, b)
			a.onCreate = func(context.Context, int64) error { leads(b, a, b); return half }
			b.onCreate = full
			_, err := map[string]*replica{"a": a, "b": b}[where].client.CreateSandbox(t.Context(), create(""))
			require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)))
			require.True(t, fault.IsUnsettled(rpc.FromStatus(err)))
			require.Zero(t, b.creates.Load())
		})
	}
}

func TestFormerLeaderForwardsItsCalls(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	leads(a, a, b)
	a.onCreate = func(context.Context, int64) error {
		leads(b, a, b)
		return fault.New(errdefs.ErrUnavailable, fault.NotLeader, "another has taken over")
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	resp, err := a.client.CreateSandbox(ctx, create(""))
	require.NoError(t, err)
	require.Equal(t, "b", resp.GetSandbox().GetUid())
}

func TestStreams(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	leads(a, a, b)
	for _, r := range []*replica{a, b} {
		stream, err := r.client.WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{Name: "one"})
		require.NoError(t, err)
		first, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, "a", first.GetSandbox().GetUid())
		require.Equal(t, "one", first.GetSandbox().GetName())
	}
	silent := make(chan struct{})
	a.onLogs = func(stream grpc.ServerStreamingServer[sandboxv1.StreamLogsResponse]) error {
		if err := stream.SendHeader(metadata.Pairs("x-early", "yes")); err != nil {
			return err
		}
		<-silent
		for _, line := range []string{"1", "2"} {
			if err := stream.Send(&sandboxv1.StreamLogsResponse{Data: []byte(line)}); err != nil {
				return err
			}
		}
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "it went away").With("sandbox", "ns/one")
	}
	logs, err := b.client.StreamLogs(t.Context(), &sandboxv1.StreamLogsRequest{Namespace: "ns", Name: "one"})
	require.NoError(t, err)
	header, err := logs.Header()
	require.NoError(t, err)
	require.Equal(t, []string{"yes"}, header.Get("x-early"), "before the first line is there")
	close(silent)
	for _, want := range []string{"1", "2"} {
		m, err := logs.Recv()
		require.NoError(t, err)
		require.Equal(t, want, string(m.GetData()))
	}
	_, err = logs.Recv()
	require.Equal(t, codes.NotFound, status.Code(err))
	require.IsType(t, &errdetails.ErrorInfo{}, status.Convert(err).Details()[0])
}

func TestStreamRefusedBeforeFirstMessageIsRetried(t *testing.T) {
	m := newMesh(t)
	a, b := m.replica("a"), m.replica("b")
	leads(a, a, b)
	a.onLogs = func(stream grpc.ServerStreamingServer[sandboxv1.StreamLogsResponse]) error {
		if a.streams.Load() < 3 {
			return fault.New(errdefs.ErrUnavailable, fault.NotLeader, "not now")
		}
		return stream.Send(&sandboxv1.StreamLogsResponse{Data: []byte("x")})
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	logs, err := b.client.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: "ns", Name: "one"})
	require.NoError(t, err)
	got, err := logs.Recv()
	require.NoError(t, err)
	require.Equal(t, "x", string(got.GetData()))
	require.EqualValues(t, 3, a.streams.Load())
}

func TestStreamsEnd(t *testing.T) {
	tests := map[string]func(a, b *replica){
		"when their leader loses leadership": func(a, b *replica) { leads(b, a, b) },
		"when their leader drains":           func(a, _ *replica) { a.forward.End() },
	}
	for name, end := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			a, b := m.replica("a"), m.replica("b")
			leads(a, a, b)
			var streams []grpc.ServerStreamingClient[sandboxv1.WatchSandboxesResponse]
			for _, r := range []*replica{a, b} {
				stream, err := r.client.WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{})
				require.NoError(t, err)
				_, err = stream.Recv()
				require.NoError(t, err)
				streams = append(streams, stream)
			}
			end(a, b)
			for _, stream := range streams {
				_, err := stream.Recv()
				require.Equal(t, codes.Unavailable, status.Code(err))
				require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)))
			}
		})
	}
}
