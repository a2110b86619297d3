package rpc

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	defaultOutput = 1 << 20
	// runBuffer is how much output of RunProcess the supervisor keeps: this process takes it at once.
	runBuffer = 256 << 10
	// inputChunk is how much input is passed on at once.
	inputChunk = 64 << 10
	// keepalive is after what time without an event a stream sends one.
	keepalive = 15 * time.Second
	// killTime is how long the kill of a process may take whose caller is gone.
	killTime = 5 * time.Second
)

// Inside finds the supervisor of a container.
type Inside interface {
	// Supervisor returns the supervisor of a container.
	Supervisor(id string) inside.Sandbox
}

// Processes is ProcessService. Make it with NewProcesses.
type Processes struct {
	processv1.UnimplementedProcessServiceServer

	service *Service
	inside  Inside
}

// NewProcesses returns a ProcessService for the sandboxes of a Service.
func NewProcesses(s *Service, in Inside) *Processes { return &Processes{service: s, inside: in} }

// sandbox returns the supervisor of the sandbox that a call is meant for.
func (p *Processes) sandbox(ctx context.Context) (inside.Sandbox, error) {
	s, _, err := p.running(ctx)
	return s, err
}

// running is sandbox, with a channel that is closed when the process of the sandbox has ended.
func (p *Processes) running(ctx context.Context) (inside.Sandbox, <-chan struct{}, error) {
	t, err := rpc.TargetOf(ctx)
	if err != nil {
		return inside.Sandbox{}, nil, err
	}
	id, ended, err := p.service.config.Sandboxes.Log(ctx, &agentv1.Fence{SandboxUid: t.SandboxUID, Attempt: t.Attempt, AgentUid: t.AgentUID})
	if err != nil {
		return inside.Sandbox{}, nil, err
	}
	select {
	case <-ended:
		return inside.Sandbox{}, nil, errEnded()
	default:
		return p.inside.Supervisor(id), ended, nil
	}
}

// RunProcess runs a process to its end.
func (p *Processes) RunProcess(ctx context.Context, req *processv1.RunProcessRequest) (*processv1.RunProcessResponse, error) {
	s, err := p.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	start := startOf(req.GetProcess())
	start.Input, start.Buffer, start.Kill = len(req.GetStdin()) > 0, runBuffer, true
	stream, err := s.Start(ctx, start)
	if err != nil {
		return nil, inside.Fault(err, start.Args[0])
	}
	defer stream.Close()
	stop := context.AfterFunc(ctx, func() { _ = stream.Close() })
	defer stop()
	if start.Input {
		go feed(stream, req.GetStdin())
	}
	limit := int(req.GetMaxOutputBytes())
	if limit == 0 {
		limit = defaultOutput
	}
	out := &processv1.RunProcessResponse{Pid: int32(stream.Process().Pid), StartTime: timeOf(stream.Process().Started)}
	for {
		e, err := stream.Next()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			return nil, inside.Fault(err, "")
		case e.Exit != nil:
			out.Exit = exitOf(e.Exit)
			return out, nil
		case e.Stream == wire.Stderr:
			out.Stderr, out.StderrDroppedBytes = collect(out.GetStderr(), e.Data, limit, out.GetStderrDroppedBytes())
		default:
			out.Stdout, out.StdoutDroppedBytes = collect(out.GetStdout(), e.Data, limit, out.GetStdoutDroppedBytes())
		}
	}
}

// collect appends as much of data as the limit permits, and counts the rest.
func collect(to []byte, data string, limit int, dropped int64) ([]byte, int64) {
	n := min(len(data), limit-len(to))
	return append(to, data[:n]...), dropped + int64(len(data)-n)
}

// feed passes all input on and closes it. A process that ends or closes its input before that is no error.
func feed(s *inside.Stream, input []byte) {
	for chunk := range slices.Chunk(input, inputChunk) {
		if s.Send(wire.TypeInput, &wire.Request{Data: string(chunk)}) != nil {
			return
		}
	}
	_ = s.Send(wire.TypeCloseInput, &wire.Request{})
}

// kill kills the group of a process whose caller is gone.
func kill(ctx context.Context, s inside.Sandbox, pid uint32) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	_ = s.Do(ctx, wire.TypeSignal, &wire.Request{Target: wire.Target{Pid: pid}, Signal: uint32(syscall.SIGKILL), Group: true})
}

// StartProcess starts a process and sends what it does.
func (p *Processes) StartProcess(req *processv1.StartProcessRequest, stream grpc.ServerStreamingServer[processv1.StartProcessResponse]) error {
	ctx := stream.Context()
	s, err := p.sandbox(ctx)
	if err != nil {
		return err
	}
	start := startOf(req.GetProcess())
	start.Input, start.Lossy = req.GetStdin(), req.GetLossy()
	start.Buffer = uint32(max(req.GetBufferBytes(), 0))
	if start.Buffer != 0 {
		start.Buffer = max(start.Buffer, wire.MinBuffer)
	}
	if t := req.GetTerminal(); t != nil {
		start.Terminal = sizeOf(t)
	}
	followed, err := s.Start(ctx, start)
	if err != nil {
		return inside.Fault(err, start.Args[0])
	}
	err = p.follow(ctx, followed, func(e *processv1.ProcessEvent) error { return stream.Send(&processv1.StartProcessResponse{Event: e}) })
	if err != nil && ctx.Err() != nil && req.GetKillOnDisconnect() {
		kill(ctx, s, followed.Process().Pid)
	}
	return err
}

// ConnectProcess sends what a process does.
func (p *Processes) ConnectProcess(req *processv1.ConnectProcessRequest, stream grpc.ServerStreamingServer[processv1.ConnectProcessResponse]) error {
	ctx := stream.Context()
	s, err := p.sandbox(ctx)
	if err != nil {
		return err
	}
	from := uint64(req.GetFromOffset()) // what is less than zero is after all that is kept
	followed, err := s.Follow(ctx, &wire.Follow{Target: targetOf(req.GetProcess()), From: from, Lossy: req.GetLossy()})
	if err != nil {
		return inside.Fault(err, "")
	}
	return p.follow(ctx, followed, func(e *processv1.ProcessEvent) error { return stream.Send(&processv1.ConnectProcessResponse{Event: e}) })
}

// follow sends the events of a process, until it has ended or the caller is gone.
func (p *Processes) follow(ctx context.Context, s *inside.Stream, send func(*processv1.ProcessEvent) error) error {
	defer s.Close()
	if err := send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Started{Started: processOf(s.Process())}}); err != nil {
		return err
	}
	type next struct {
		event inside.Event
		err   error
	}
	events, done := make(chan next), make(chan struct{})
	defer close(done)
	go func() {
		for {
			e, err := s.Next()
			select {
			case events <- next{e, err}:
			case <-done:
				return
			}
			if err != nil || e.Exit != nil {
				return
			}
		}
	}()
	ticker := p.service.config.Clock.NewTicker(keepalive)
	defer ticker.Stop()
	for {
		var out *processv1.ProcessEvent
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.service.closing:
			return errStopping()
		case <-ticker.C():
			out = &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Keepalive_{Keepalive: &processv1.ProcessEvent_Keepalive{}}}
		case n := <-events:
			if n.err != nil {
				return inside.Fault(n.err, "")
			}
			if n.event.Exit != nil {
				return send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Ended{Ended: exitOf(n.event.Exit)}})
			}
			out = outputOf(n.event)
		}
		if err := send(out); err != nil {
			return err
		}
	}
}

// ListProcesses returns the processes that the sandbox knows.
func (p *Processes) ListProcesses(ctx context.Context, _ *processv1.ListProcessesRequest) (*processv1.ListProcessesResponse, error) {
	s, err := p.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	list, err := s.List(ctx)
	if err != nil {
		return nil, inside.Fault(err, "")
	}
	out := &processv1.ListProcessesResponse{}
	for _, x := range list {
		out.Processes = append(out.Processes, processOf(x))
	}
	slices.SortStableFunc(out.Processes, func(a, b *processv1.Process) int {
		return a.GetStartTime().AsTime().Compare(b.GetStartTime().AsTime())
	})
	return out, nil
}

// StreamInput passes input on, one piece after another.
func (p *Processes) StreamInput(stream grpc.ClientStreamingServer[processv1.StreamInputRequest, processv1.StreamInputResponse]) error {
	ctx := stream.Context()
	s, err := p.sandbox(ctx)
	if err != nil {
		return err
	}
	var input *inside.Input
	written := int64(0)
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&processv1.StreamInputResponse{WrittenBytes: written})
		}
		if err != nil {
			return err
		}
		if input == nil {
			if req.GetProcess() == nil {
				return fault.Field("process", "the first message names the process")
			}
			if input, err = s.Input(ctx, targetOf(req.GetProcess())); err != nil {
				return inside.Fault(err, "")
			}
			defer input.Close()
		}
		for chunk := range slices.Chunk(req.GetData(), inputChunk) {
			n, err := input.Write(chunk)
			written += int64(n)
			if err != nil {
				return inside.Fault(err, "")
			}
		}
	}
}

// SendInput passes input on.
func (p *Processes) SendInput(ctx context.Context, req *processv1.SendInputRequest) (*processv1.SendInputResponse, error) {
	return &processv1.SendInputResponse{}, p.do(ctx, wire.TypeInput, &wire.Request{Target: targetOf(req.GetProcess()), Data: string(req.GetData())})
}

// CloseInput ends the input of a process.
func (p *Processes) CloseInput(ctx context.Context, req *processv1.CloseInputRequest) (*processv1.CloseInputResponse, error) {
	return &processv1.CloseInputResponse{}, p.do(ctx, wire.TypeCloseInput, &wire.Request{Target: targetOf(req.GetProcess())})
}

// SendSignal sends a signal.
func (p *Processes) SendSignal(ctx context.Context, req *processv1.SendSignalRequest) (*processv1.SendSignalResponse, error) {
	r := &wire.Request{Target: targetOf(req.GetProcess()), Signal: uint32(req.GetSignal()), Group: req.GetGroup()}
	return &processv1.SendSignalResponse{}, p.do(ctx, wire.TypeSignal, r)
}

// ResizeTerminal changes the size of a terminal.
func (p *Processes) ResizeTerminal(ctx context.Context, req *processv1.ResizeTerminalRequest) (*processv1.ResizeTerminalResponse, error) {
	return &processv1.ResizeTerminalResponse{}, p.do(ctx, wire.TypeResize, &wire.Request{Target: targetOf(req.GetProcess()), Terminal: *sizeOf(req.GetSize())})
}

func (p *Processes) do(ctx context.Context, kind wire.Type, r *wire.Request) error {
	s, err := p.sandbox(ctx)
	if err != nil {
		return err
	}
	return inside.Fault(s.Do(ctx, kind, r), "")
}

// startOf translates what to run.
func startOf(spec *processv1.ProcessSpec) *wire.Start {
	start := &wire.Start{
		Args: spec.GetArgs(), OnlyEnv: spec.GetClearEnv(), Cwd: spec.GetWorkingDir(), User: spec.GetUser(), Tag: spec.GetTag(),
	}
	if t := spec.GetTimeout(); t != nil {
		start.Timeout = uint64(max(t.AsDuration().Milliseconds(), 1))
	}
	for _, name := range slices.Sorted(maps.Keys(spec.GetEnv())) {
		start.Env = append(start.Env, name+"="+spec.GetEnv()[name])
	}
	return start
}

func targetOf(s *processv1.ProcessSelector) wire.Target {
	return wire.Target{Pid: uint32(max(s.GetPid(), 0)), Tag: s.GetTag()}
}

func sizeOf(t *processv1.TerminalSize) *wire.Terminal {
	return &wire.Terminal{Rows: uint16(t.GetRows()), Columns: uint16(t.GetColumns())}
}

func processOf(p *wire.Process) *processv1.Process {
	out := &processv1.Process{
		Pid: int32(p.Pid), Tag: valid(p.Tag), Uid: int64(p.UID), Terminal: p.Terminal, Input: p.Input, StartTime: timeOf(p.Started),
		FirstOffset: int64(p.First), EndOffset: int64(p.End),
	}
	for _, a := range p.Args {
		out.Args = append(out.Args, valid(a))
	}
	if p.Exit != nil {
		out.Exit = exitOf(p.Exit)
	}
	return out
}

// valid returns a text of a sandbox as one that a message can have.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func outputOf(e inside.Event) *processv1.ProcessEvent {
	streams := map[wire.Stream]processv1.ProcessOutput_Stream{
		wire.Stdout: processv1.ProcessOutput_STREAM_STDOUT, wire.Stderr: processv1.ProcessOutput_STREAM_STDERR, wire.Console: processv1.ProcessOutput_STREAM_TERMINAL,
	}
	return &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{Output: &processv1.ProcessOutput{
		Stream: streams[e.Stream], Offset: int64(e.Offset), Data: []byte(e.Data),
	}}}
}

func exitOf(e *wire.Exit) *processv1.ProcessExit {
	micros := func(n uint64) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Microsecond) }
	return &processv1.ProcessExit{
		Code: int32(e.Code), Signal: int32(e.Signal), TimedOut: e.TimedOut, EndTime: timeOf(e.At),
		UserTime: micros(e.User), SystemTime: micros(e.System), MaxRssBytes: int64(e.MaxRSS),
	}
}

func timeOf(nanos uint64) *timestamppb.Timestamp {
	return timestamppb.New(time.Unix(0, int64(nanos)))
}

func errStopping() error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping; connect again")
}
