package run_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/run"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

var now = time.Date(2026, 11, 24, 8, 0, 0, 0, time.UTC)

// mesh is the allocator and the agent of a sandbox. What it answers does not change while it serves.
type mesh struct {
	sandboxv1.UnimplementedSandboxServiceServer
	processv1.UnimplementedProcessServiceServer

	replayed, known, hang, deleted bool
	// expires is when the sandbox of an earlier call with the request_id expires.
	expires                        *timestamppb.Timestamp
	createErr, startErr, deleteErr error
	events                         []*processv1.ProcessEvent

	mu       sync.Mutex
	creates  []*sandboxv1.CreateSandboxRequest
	deletes  []*sandboxv1.DeleteSandboxRequest
	starts   []*processv1.StartProcessRequest
	connects []*processv1.ConnectProcessRequest
	input    []byte
	closed   chan struct{}
	draining chan struct{}
	calls    sync.WaitGroup // that are served
}

// serve returns a client of RunService before the mesh.
func serve(t *testing.T, m *mesh) runv1.RunServiceClient {
	t.Helper()
	m.closed, m.draining = make(chan struct{}), make(chan struct{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(
		grpc.UnaryInterceptor(func(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			m.calls.Add(1)
			defer m.calls.Done()
			out, err := next(ctx, in)
			return out, rpc.ToStatus(err)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			m.calls.Add(1)
			defer m.calls.Done()
			return rpc.ToStatus(next(srv, s))
		}),
	)
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, m)
	processv1.RegisterProcessServiceServer(server, m)
	runv1.RegisterRunServiceServer(server, run.New(run.Config{
		Sandboxes: sandboxv1.NewSandboxServiceClient(conn), Processes: processv1.NewProcessServiceClient(conn), Clock: clocktesting.NewFakePassiveClock(now),
		Draining: m.draining,
	}))
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
		require.NoError(t, conn.Close())
	})
	return runv1.NewRunServiceClient(conn)
}

func (m *mesh) CreateSandbox(_ context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.creates = append(m.creates, in)
	if m.createErr != nil {
		return nil, m.createErr
	}
	if m.expires != nil && !m.expires.AsTime().Equal(in.GetSpec().GetExpireTime().AsTime()) {
		return nil, fault.New(errdefs.ErrAlreadyExists, fault.RequestIDReused, "another request")
	}
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: &sandboxv1.Sandbox{Namespace: in.GetNamespace(), Name: "box", Uid: "u", Spec: in.GetSpec()}, Replayed: m.replayed,
		Timings: []*sandboxv1.StageTiming{{Duration: durationpb.New(time.Millisecond)}},
	}, nil
}

func (m *mesh) GetSandbox(_ context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deleted || in.GetName() != m.creates[0].GetName() {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "none")
	}
	return &sandboxv1.GetSandboxResponse{Sandbox: &sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{ExpireTime: m.expires}}}, nil
}

func (m *mesh) DeleteSandbox(_ context.Context, in *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deletes = append(m.deletes, in)
	return &sandboxv1.DeleteSandboxResponse{}, m.deleteErr
}

func (m *mesh) StartProcess(in *processv1.StartProcessRequest, s grpc.ServerStreamingServer[processv1.StartProcessResponse]) error {
	m.mu.Lock()
	m.starts = append(m.starts, in)
	m.mu.Unlock()
	if m.startErr != nil {
		return m.startErr
	}
	return m.send(s.Context(), in.GetStdin(), func(e *processv1.ProcessEvent) error { return s.Send(&processv1.StartProcessResponse{Event: e}) })
}

func (m *mesh) ConnectProcess(in *processv1.ConnectProcessRequest, s grpc.ServerStreamingServer[processv1.ConnectProcessResponse]) error {
	m.mu.Lock()
	m.connects = append(m.connects, in)
	m.mu.Unlock()
	if !m.known {
		return fault.New(errdefs.ErrNotFound, fault.ProcessNotFound, "none")
	}
	return m.send(s.Context(), false, func(e *processv1.ProcessEvent) error { return s.Send(&processv1.ConnectProcessResponse{Event: e}) })
}

// send sends the events; of a process with input, all but the first when the input is closed.
func (m *mesh) send(ctx context.Context, input bool, send func(*processv1.ProcessEvent) error) error {
	for i, e := range m.events {
		if i == 1 && input {
			<-m.closed
		}
		if err := send(e); err != nil {
			return err
		}
	}
	if m.hang {
		<-ctx.Done()
	}
	return ctx.Err()
}

func (m *mesh) SendInput(_ context.Context, in *processv1.SendInputRequest) (*processv1.SendInputResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.input = append(m.input, in.GetData()...)
	return &processv1.SendInputResponse{}, nil
}

func (m *mesh) CloseInput(context.Context, *processv1.CloseInputRequest) (*processv1.CloseInputResponse, error) {
	close(m.closed)
	return &processv1.CloseInputResponse{}, nil
}

func started() *processv1.ProcessEvent {
	return &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Started{Started: &processv1.Process{Pid: 7}}}
}

func output(s processv1.ProcessOutput_Stream, offset int64, data string) *processv1.ProcessEvent {
	return &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{Output: &processv1.ProcessOutput{Stream: s, Offset: offset, Data: []byte(data)}}}
}

func ended(code int32) *processv1.ProcessEvent {
	return &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Ended{Ended: &processv1.ProcessExit{Code: code}}}
}

// ran is the events of a process.
func ran() []*processv1.ProcessEvent {
	return []*processv1.ProcessEvent{
		started(), output(processv1.ProcessOutput_STREAM_STDOUT, 0, "out"), output(processv1.ProcessOutput_STREAM_STDERR, 3, "error"), ended(3),
	}
}

func request() *runv1.RunSandboxRequest {
	return &runv1.RunSandboxRequest{
		Namespace: "ns", Sandbox: &runv1.NewSandbox{Spec: &sandboxv1.SandboxSpec{Image: "img"}, Labels: map[string]string{"a": "b"}},
		Process: &processv1.ProcessSpec{Args: []string{"cat"}}, RequestId: "r",
	}
}

func TestRunSandbox(t *testing.T) {
	m := &mesh{events: ran()}
	client := serve(t, m)
	in := request()
	in.Stdin = []byte(strings.Repeat("x", 3<<20))
	out, err := client.RunSandbox(t.Context(), in)
	require.NoError(t, err)
	require.Equal(t, "out", string(out.GetResult().GetStdout()))
	require.Equal(t, "error", string(out.GetResult().GetStderr()))
	require.Equal(t, int32(3), out.GetResult().GetExit().GetCode())
	require.Equal(t, int32(7), out.GetResult().GetPid())
	require.Equal(t, "box", out.GetSandbox().GetName())
	require.Len(t, out.GetTimings(), 1)
	require.True(t, out.GetDeleted())

	require.Equal(t, len(in.GetStdin()), len(m.input))
	require.Len(t, m.creates, 1)
	created := m.creates[0]
	require.Equal(t, "r", created.GetRequestId())
	require.Equal(t, in.GetSandbox().GetLabels(), created.GetLabels())
	require.True(t, created.GetSpec().GetKeepAlive())
	require.Equal(t, now.Add(time.Hour), created.GetSpec().GetExpireTime().AsTime(), "it expires if this process does not live to delete it")
	require.Len(t, m.starts, 1)
	require.Equal(t, "box", m.starts[0].GetName())
	require.Equal(t, "run", m.starts[0].GetProcess().GetTag())
	require.Len(t, m.deletes, 1)
	require.Equal(t, "u", m.deletes[0].GetUid())
}

// TestLifeOfTheSandbox: what the caller says, and what it does not.
func TestLifeOfTheSandbox(t *testing.T) {
	m := &mesh{events: ran()}
	client := serve(t, m)
	in := request()
	in.Process.Timeout = durationpb.New(10 * time.Second)
	in.Sandbox.Spec.Command = []string{"server"}
	_, err := client.RunSandbox(t.Context(), in)
	require.NoError(t, err)
	require.Equal(t, now.Add(70*time.Second), m.creates[0].GetSpec().GetExpireTime().AsTime())
	require.Equal(t, time.Minute, m.creates[0].GetSpec().GetTtlAfterFinished().AsDuration())
	require.False(t, m.creates[0].GetSpec().GetKeepAlive(), "it has a process of its own")
	require.Nil(t, m.deletes[0].GetGracePeriod(), "which ends as it wants")

	in.Sandbox.Keep = true
	out, err := client.RunSandbox(t.Context(), in)
	require.NoError(t, err)
	require.False(t, out.GetDeleted())
	require.Nil(t, m.creates[1].GetSpec().GetExpireTime())
	require.Len(t, m.deletes, 1)
}

func TestOutputIsBounded(t *testing.T) {
	m := &mesh{events: []*processv1.ProcessEvent{
		started(), output(processv1.ProcessOutput_STREAM_STDOUT, 5, "abcdef"), output(processv1.ProcessOutput_STREAM_STDOUT, 11, "ghi"), ended(0),
	}}
	in := request()
	in.MaxOutputBytes = 4
	out, err := serve(t, m).RunSandbox(t.Context(), in)
	require.NoError(t, err)
	require.Equal(t, "abcd", string(out.GetResult().GetStdout()))
	require.Equal(t, int64(5+2+3), out.GetResult().GetStdoutDroppedBytes(), "with what was lost before")
}

// TestNothingIsLeft has the call fail at each step.
func TestNothingIsLeft(t *testing.T) {
	refused := fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "no such command")
	for name, c := range map[string]struct {
		mesh    *mesh
		keep    bool
		deletes int
		code    codes.Code
	}{
		"create":                      {&mesh{createErr: fault.Field("spec.image", "no")}, false, 0, codes.InvalidArgument},
		"start":                       {&mesh{startErr: refused}, false, 1, codes.FailedPrecondition},
		"start in a kept one":         {&mesh{startErr: refused}, true, 1, codes.FailedPrecondition},
		"start in an earlier one":     {&mesh{startErr: refused, replayed: true}, true, 0, codes.FailedPrecondition},
		"events":                      {&mesh{events: []*processv1.ProcessEvent{started()}, hang: true}, false, 1, codes.DeadlineExceeded},
		"events of one that is kept":  {&mesh{events: []*processv1.ProcessEvent{started()}, hang: true}, true, 0, codes.DeadlineExceeded},
		"deletion, which is no error": {&mesh{events: ran(), deleteErr: refused}, false, 1, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			client := serve(t, c.mesh)
			in := request()
			in.Sandbox.Keep = c.keep
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			out, err := client.RunSandbox(ctx, in)
			require.Equal(t, c.code, status.Code(err), "%v", err)
			require.False(t, out.GetDeleted())
			deletes := func() int {
				c.mesh.mu.Lock()
				defer c.mesh.mu.Unlock()
				return len(c.mesh.deletes)
			}
			require.Eventually(t, func() bool { return deletes() == c.deletes }, testkit.Timeout, testkit.Tick)
		})
	}
}

// TestRepeatedCallFollows: the process of the first call is not run twice.
func TestRepeatedCallFollows(t *testing.T) {
	m := &mesh{events: ran(), replayed: true, known: true}
	out, err := serve(t, m).RunSandbox(t.Context(), request())
	require.NoError(t, err)
	require.Equal(t, int32(3), out.GetResult().GetExit().GetCode())
	require.Empty(t, m.starts)
	require.Equal(t, "run", m.connects[0].GetProcess().GetTag())

	m = &mesh{events: ran(), replayed: true}
	out, err = serve(t, m).RunSandbox(t.Context(), request())
	require.NoError(t, err)
	require.Equal(t, int32(3), out.GetResult().GetExit().GetCode())
	require.Len(t, m.starts, 1, "the first call has not come to it")
}

// TestRepeatedCallIsTheSameCreate: the time when a sandbox expires is that of the first call, or the allocator would refuse the request_id.
func TestRepeatedCallIsTheSameCreate(t *testing.T) {
	earlier := timestamppb.New(now.Add(59 * time.Minute))
	m := &mesh{events: ran(), replayed: true, known: true, expires: earlier}
	in := request()
	in.Stdin = []byte("input")
	_, err := serve(t, m).RunSandbox(t.Context(), in)
	require.NoError(t, err)
	require.Len(t, m.creates, 2)
	require.NotEmpty(t, m.creates[0].GetName())
	require.Equal(t, m.creates[0].GetName(), m.creates[1].GetName())
	require.Equal(t, earlier.AsTime(), m.creates[1].GetSpec().GetExpireTime().AsTime())
	require.Empty(t, m.input, "the first call has sent it")

	m = &mesh{events: ran(), expires: earlier, deleted: true}
	_, err = serve(t, m).RunSandbox(t.Context(), in)
	require.Equal(t, fault.RequestIDReused, fault.ReasonOf(rpc.FromStatus(err)), "its sandbox is gone")
	require.Empty(t, m.starts)
}

func TestStartSandbox(t *testing.T) {
	m := &mesh{events: ran()}
	stream, err := serve(t, m).StartSandbox(t.Context(), &runv1.StartSandboxRequest{
		Namespace: "ns", Sandbox: &runv1.NewSandbox{Spec: &sandboxv1.SandboxSpec{Image: "img"}}, Process: &processv1.ProcessSpec{Args: []string{"echo"}},
		Terminal: &processv1.TerminalSize{Rows: 24, Columns: 80},
	})
	require.NoError(t, err)
	first, err := stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "box", first.GetCreated().GetSandbox().GetName())
	for range m.events {
		e, err := stream.Recv()
		require.NoError(t, err)
		require.NotNil(t, e.GetProcess())
	}
	_, err = stream.Recv()
	require.ErrorContains(t, err, "EOF")
	require.Len(t, m.deletes, 1)
	require.Equal(t, int32(80), m.starts[0].GetTerminal().GetColumns())
}

// TestStoppingGateway: a stream that can be repeated ends early, and its sandbox is left to the call that repeats it. That of one without a request_id is
// deleted when its client leaves, as ever.
func TestStoppingGateway(t *testing.T) {
	for id, deletes := range map[string]int{"r": 0, "": 1} {
		m := &mesh{events: ran()[:1], hang: true}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := serve(t, m).StartSandbox(ctx, &runv1.StartSandboxRequest{
			Namespace: "ns", Sandbox: &runv1.NewSandbox{Spec: &sandboxv1.SandboxSpec{Image: "img"}}, Process: &processv1.ProcessSpec{Args: []string{"sleep"}}, RequestId: id,
		})
		require.NoError(t, err)
		for range 2 {
			_, err := stream.Recv()
			require.NoError(t, err)
		}
		close(m.draining)
		if id == "" {
			cancel()
		}
		_, err = stream.Recv()
		require.Equal(t, map[bool]codes.Code{true: codes.Canceled, false: codes.Unavailable}[id == ""], status.Code(err))
		m.calls.Wait()
		require.Len(t, m.deletes, deletes)
	}
}

// TestStoppedCallIsLeft: a call that was broken off because the gateway stops leaves its sandbox to the one that repeats it.
func TestStoppedCallIsLeft(t *testing.T) {
	m := &mesh{events: ran()[:1], hang: true}
	client := serve(t, m)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := client.RunSandbox(ctx, request())
		done <- err
	}()
	require.Eventually(t, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.starts) == 1
	}, testkit.Timeout, time.Millisecond)
	close(m.draining)
	cancel() // as the end of the server does
	require.Equal(t, codes.Canceled, status.Code(<-done))
	m.calls.Wait()
	require.Empty(t, m.deletes)
}
