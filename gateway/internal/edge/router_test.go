package edge_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/edge"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// mesh is a gateway's gRPC side in front of agents, over connections in memory.
type mesh struct {
	allocatorv1.AllocatorServiceClient // of the locator; other methods are not called

	mu        sync.Mutex
	listeners map[string]*bufconn.Listener // by address
	open      map[string][]net.Conn        // the same
	places    map[string]string            // address by name of the sandbox
	located   int
	dialed    []string
	clock     *clocktesting.FakeClock
	router    *edge.Router
	closing   chan struct{}
	conn      *grpc.ClientConn // to the gateway
}

// LocateSandbox implements the locator. An agent's uid is "uid of ADDRESS".
func (m *mesh) LocateSandbox(_ context.Context, in *allocatorv1.LocateSandboxRequest, _ ...grpc.CallOption) (*allocatorv1.LocateSandboxResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.located++
	address, ok := m.places[in.GetName()]
	if !ok {
		return nil, rpc.ToStatus(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s", in.GetName()))
	}
	return &allocatorv1.LocateSandboxResponse{Assignment: &allocatorv1.Assignment{
		Fence: &agentv1.Fence{SandboxUid: "u-" + in.GetName(), Attempt: 1, AgentUid: "uid of " + address}, AgentAddress: address,
	}}, nil
}

func (m *mesh) move(name, address string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.places[name] = address
}

// breaks ends the connections to an agent.
func (m *mesh) breaks(t *testing.T, address string) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.listeners, address)
	for _, conn := range m.open[address] {
		require.NoError(t, conn.Close())
	}
}

func (m *mesh) lookups() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.located
}

func (m *mesh) dials() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.dialed...)
}

func (m *mesh) dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := rpc.Dial("passthrough:///"+address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			m.mu.Lock()
			l := m.listeners[address]
			m.mu.Unlock()
			if l == nil {
				return nil, errors.New("connection refused")
			}
			conn, err := l.DialContext(ctx)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.open[address] = append(m.open[address], conn)
			return conn, err
		}),
	}})
	require.NoError(t, err)
	return conn
}

// serve serves at an address until the test ends.
func (m *mesh) serve(t *testing.T, address string, register func(*rpc.Server)) {
	t.Helper()
	l := bufconn.Listen(256 << 10)
	m.mu.Lock()
	m.listeners[address] = l
	m.mu.Unlock()
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Listener: l, TLS: rpc.TLS{Insecure: true}, MaxRecvBytes: 8 << 20, DrainTimeout: 10 * time.Millisecond,
	})
	require.NoError(t, err)
	register(server)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
}

func newMesh(t *testing.T) *mesh {
	t.Helper()
	m := &mesh{
		listeners: map[string]*bufconn.Listener{}, open: map[string][]net.Conn{}, places: map[string]string{}, closing: make(chan struct{}),
		clock: clocktesting.NewFakeClock(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)),
	}
	m.router = edge.NewRouter(edge.Config{Locator: m, Clock: m.clock, Dial: func(address, uid string, _ bool) (*grpc.ClientConn, error) {
		if uid != "uid of "+address {
			return nil, errors.New("another agent")
		}
		m.mu.Lock()
		m.dialed = append(m.dialed, address)
		m.mu.Unlock()
		return m.dial(t, address), nil
	}})
	m.serve(t, "gateway", func(s *rpc.Server) {
		for _, d := range edge.OfAgents {
			edge.Register(s, d, m.router, m.closing)
		}
	})
	m.conn = m.dial(t, "gateway")
	t.Cleanup(func() { require.NoError(t, m.conn.Close()); m.router.Close() })
	return m
}

// agent runs the sandboxes that it has, and refuses calls for others as agents do.
type agent struct {
	processv1.UnimplementedProcessServiceServer
	filesystemv1.UnimplementedFilesystemServiceServer
	tunnelv1.UnimplementedTunnelServiceServer

	address string
	mu      sync.Mutex
	has     map[string]bool // by uid
	calls   int
	gone    chan error // how streams have ended
}

func (m *mesh) agent(t *testing.T, address string, sandboxes ...string) *agent {
	t.Helper()
	a := &agent{address: address, has: map[string]bool{}, gone: make(chan error, 16)}
	for _, name := range sandboxes {
		a.has["u-"+name] = true
		m.move(name, address)
	}
	m.serve(t, address, func(s *rpc.Server) {
		processv1.RegisterProcessServiceServer(s, a)
		filesystemv1.RegisterFilesystemServiceServer(s, a)
		tunnelv1.RegisterTunnelServiceServer(s, a)
	})
	return a
}

func (a *agent) lose(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.has, "u-"+name)
}

// check is what an agent does first with each call.
func (a *agent) check(ctx context.Context) error {
	target, err := rpc.TargetOf(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	if !a.has[target.SandboxUID] || target.AgentUID != "uid of "+a.address {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "%s is not here", target.SandboxUID)
	}
	return nil
}

func (a *agent) RunProcess(ctx context.Context, in *processv1.RunProcessRequest) (*processv1.RunProcessResponse, error) {
	if err := a.check(ctx); err != nil {
		return nil, err
	}
	if len(in.GetProcess().GetArgs()) > 0 && in.GetProcess().GetArgs()[0] == "wait" {
		<-ctx.Done()
		a.gone <- ctx.Err()
		return nil, ctx.Err()
	}
	return &processv1.RunProcessResponse{Stdout: append([]byte(a.address+":"), in.GetStdin()...)}, nil
}

// StartProcess sends one event for each argument; with "wait", the stream stays open.
func (a *agent) StartProcess(in *processv1.StartProcessRequest, s grpc.ServerStreamingServer[processv1.StartProcessResponse]) error {
	if err := a.check(s.Context()); err != nil {
		return err
	}
	for _, arg := range in.GetProcess().GetArgs() {
		if arg == "wait" {
			<-s.Context().Done()
			a.gone <- s.Context().Err()
			return s.Context().Err()
		}
		if err := s.Send(&processv1.StartProcessResponse{Event: &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{
			Output: &processv1.ProcessOutput{Data: []byte(a.address + ":" + arg)},
		}}}); err != nil {
			a.gone <- err // the client has left before
			return err
		}
	}
	return nil
}

// StreamInput counts what arrives until the client closes its side.
func (a *agent) StreamInput(s grpc.ClientStreamingServer[processv1.StreamInputRequest, processv1.StreamInputResponse]) error {
	if err := a.check(s.Context()); err != nil {
		return err
	}
	n := int64(0)
	for {
		in, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return s.SendAndClose(&processv1.StreamInputResponse{WrittenBytes: n})
		case err != nil:
			a.gone <- err
			return err
		case string(in.GetData()) == "refuse":
			return fault.New(errdefs.ErrFailedPrecondition, fault.ProcessConflict, "it has no input")
		}
		n += int64(len(in.GetData()))
	}
}

// Tunnel sends back what it receives, and a last message after the client has closed its side.
func (a *agent) Tunnel(s grpc.BidiStreamingServer[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]) error {
	if err := a.check(s.Context()); err != nil {
		return err
	}
	for {
		in, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.Send(&tunnelv1.TunnelResponse{Frame: &tunnelv1.Frame{Connection: 99}})
		}
		if err != nil {
			a.gone <- err
			return err
		}
		if err := s.Send(&tunnelv1.TunnelResponse{Frame: in.GetFrame()}); err != nil {
			return err
		}
	}
}

func (m *mesh) processes() processv1.ProcessServiceClient {
	return processv1.NewProcessServiceClient(m.conn)
}

func run(name, arg string) *processv1.RunProcessRequest {
	return &processv1.RunProcessRequest{Namespace: "ns", Name: name, Process: &processv1.ProcessSpec{Args: []string{arg}}}
}

// runsAt makes a call and checks which agent answers.
func (m *mesh) runsAt(t *testing.T, name, address string) {
	t.Helper()
	resp, err := m.processes().RunProcess(t.Context(), run(name, "x"))
	require.NoError(t, err)
	require.Equal(t, address+":", string(resp.GetStdout()))
}

func requireReason(t *testing.T, err error, reason fault.Reason) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, reason, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
}

func TestRouterRemembers(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x", "y")
	for range 3 {
		m.runsAt(t, "x", "a1")
		m.runsAt(t, "y", "a1")
	}
	require.Equal(t, 2, m.lookups(), "one for each sandbox")
	require.Equal(t, []string{"a1"}, m.dials(), "one connection for an agent")
	m.clock.Step(time.Minute)
	m.runsAt(t, "x", "a1")
	require.Equal(t, 3, m.lookups(), "a location is outdated after a minute")
}

// TestRouterFollowsASandbox moves a sandbox: the agent that had it refuses the call, which goes where it is now.
func TestRouterFollowsASandbox(t *testing.T) {
	m := newMesh(t)
	old := m.agent(t, "a1", "x")
	m.runsAt(t, "x", "a1")
	old.lose("x")
	second := m.agent(t, "a2", "x")
	m.runsAt(t, "x", "a2")
	require.Equal(t, 2, m.lookups())

	second.lose("x")
	third := m.agent(t, "a3", "x")
	stream, err := m.processes().StartProcess(t.Context(), &processv1.StartProcessRequest{Namespace: "ns", Name: "x", Process: &processv1.ProcessSpec{Args: []string{"1"}}})
	require.NoError(t, err)
	out, err := stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "a3:1", string(out.GetEvent().GetOutput().GetData()))
	_, err = stream.Recv()
	require.ErrorIs(t, err, io.EOF)

	third.lose("x")
	before := third.calls
	_, err = m.processes().RunProcess(t.Context(), run("x", "1"))
	requireReason(t, err, fault.FenceMismatch)
	require.Equal(t, before+2, third.calls, "a call is made twice at most")

	m.move("x", "nowhere") // the agent is away when the sandbox moves back
	_, err = m.processes().RunProcess(t.Context(), run("x", "1"))
	requireReason(t, err, fault.AgentUnavailable)
	m.agent(t, "a4", "x")
	m.runsAt(t, "x", "a4")
}

// TestRouterDoesNotRepeat breaks the connection to an agent during a call: it may have had an effect, so that it is not made again.
func TestRouterDoesNotRepeat(t *testing.T) {
	m := newMesh(t)
	a := m.agent(t, "a1", "x")
	failed := make(chan error, 1)
	go func() {
		_, err := m.processes().RunProcess(t.Context(), run("x", "wait"))
		failed <- err
	}()
	require.Eventually(t, func() bool { a.mu.Lock(); defer a.mu.Unlock(); return a.calls == 1 }, testkit.Timeout, testkit.Tick)
	next := m.agent(t, "a2", "x")
	m.breaks(t, "a1")
	err := <-failed
	requireReason(t, err, fault.AgentUnavailable)
	require.True(t, fault.IsUnsettled(rpc.FromStatus(err)), "the outcome is unknown")
	_ = <-a.gone
	require.Zero(t, next.calls)
	m.runsAt(t, "x", "a2")
}

func TestRouterRefuses(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x")
	_, err := m.processes().RunProcess(t.Context(), run("unknown", "1"))
	requireReason(t, err, fault.SandboxNotFound)
	m.move("away", "nowhere")
	_, err = m.processes().RunProcess(t.Context(), run("away", "1"))
	requireReason(t, err, fault.AgentUnavailable)
	require.NotContains(t, err.Error(), "refused", "the error of the connection is not for clients")
	stream, err := m.processes().StartProcess(t.Context(), &processv1.StartProcessRequest{Namespace: "ns", Name: "away", Process: &processv1.ProcessSpec{Args: []string{"1"}}})
	require.NoError(t, err)
	_, err = stream.Recv()
	requireReason(t, err, fault.AgentUnavailable)

	for name, in := range map[string]*processv1.StreamInputRequest{"namespace": {Name: "x"}, "name": {Namespace: "ns"}} {
		input, err := m.processes().StreamInput(t.Context())
		require.NoError(t, err)
		require.NoError(t, input.Send(in))
		_, err = input.CloseAndRecv()
		requireReason(t, err, fault.InvalidField)
		require.True(t, strings.HasPrefix(rpc.FromStatus(err).Error(), name+":"), err)
	}
	input, err := m.processes().StreamInput(t.Context())
	require.NoError(t, err)
	_, err = input.CloseAndRecv() // without a message
	requireReason(t, err, fault.InvalidField)
}

// TestRouterClosesConnections: those that were not used for long, when another one is opened.
func TestRouterClosesConnections(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x")
	m.agent(t, "a2", "y")
	m.runsAt(t, "x", "a1")
	m.clock.Step(10 * time.Minute)
	m.runsAt(t, "y", "a2")
	m.runsAt(t, "x", "a1")
	require.Equal(t, []string{"a1", "a2", "a1"}, m.dials())
}

// WriteFile counts what arrives.
func (a *agent) WriteFile(s grpc.ClientStreamingServer[filesystemv1.WriteFileRequest, filesystemv1.WriteFileResponse]) error {
	if err := a.check(s.Context()); err != nil {
		return err
	}
	n := int64(0)
	for {
		in, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.SendAndClose(&filesystemv1.WriteFileResponse{WrittenBytes: n})
		}
		if err != nil {
			return err
		}
		n += int64(len(in.GetData()))
	}
}
