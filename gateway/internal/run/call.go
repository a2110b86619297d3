package run

import (
	"context"
	"errors"
	"io"
	"slices"

	"google.golang.org/grpc"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// defaultOutput is how many bytes of each stream an answer has, unless the request says.
	defaultOutput = 1 << 20
	// maxInput is how many bytes one SendInput takes.
	maxInput = 1 << 20
)

// RunSandbox implements RunService.
func (s *Service) RunSandbox(ctx context.Context, in *runv1.RunSandboxRequest) (*runv1.RunSandboxResponse, error) {
	process := tagged(in.GetProcess())
	sb, err := s.create(ctx, in.GetNamespace(), in.GetRequestId(), in.GetSandbox(), process)
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	c := newCollector(in.GetMaxOutputBytes())
	start := &processv1.StartProcessRequest{Process: process, Stdin: len(in.GetStdin()) > 0}
	err = sb.run(ctx, start, func(e *processv1.ProcessEvent, own bool) error {
		if e.GetStarted() != nil && own && start.GetStdin() { // one that an earlier call has started had its input from that
			go sb.input(ctx, process.GetTag(), in.GetStdin())
		}
		c.add(e)
		return nil
	})
	deleted := sb.close(ctx, c.started)
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	return &runv1.RunSandboxResponse{Sandbox: sb.created.GetSandbox(), Result: c.result, Timings: sb.created.GetTimings(), Deleted: deleted}, nil
}

// StartSandbox implements RunService.
func (s *Service) StartSandbox(in *runv1.StartSandboxRequest, stream grpc.ServerStreamingServer[runv1.StartSandboxResponse]) error {
	process := tagged(in.GetProcess())
	sb, err := s.create(stream.Context(), in.GetNamespace(), in.GetRequestId(), in.GetSandbox(), process)
	if err != nil {
		return rpc.FromStatus(err)
	}
	ctx, started := stream.Context(), false
	if sb.repeatable {
		until, release := s.untilDraining(ctx)
		defer release()
		ctx = until
	}
	defer func() { sb.close(ctx, started) }()
	if err := stream.Send(&runv1.StartSandboxResponse{Event: &runv1.StartSandboxResponse_Created{Created: sb.created}}); err != nil {
		return err
	}
	start := &processv1.StartProcessRequest{Process: process, Terminal: in.GetTerminal(), Stdin: in.GetStdin()}
	err = sb.run(ctx, start, func(e *processv1.ProcessEvent, _ bool) error {
		started = started || e.GetStarted() != nil
		return stream.Send(&runv1.StartSandboxResponse{Event: &runv1.StartSandboxResponse_Process{Process: e}})
	})
	if err == nil {
		ctx = stream.Context() // nothing is left to repeat, also if this process has just begun to stop
	} else if ctx.Err() != nil && stream.Context().Err() == nil {
		return context.Cause(ctx)
	}
	return rpc.FromStatus(err)
}

// run runs the process of a call until it has ended, and passes its events to each; own says that this call has started it.
func (s *sandbox) run(ctx context.Context, in *processv1.StartProcessRequest, each func(e *processv1.ProcessEvent, own bool) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.created.GetReplayed() {
		err := s.follow(ctx, in.GetProcess().GetTag(), func(e *processv1.ProcessEvent) error { return each(e, false) })
		if fault.ReasonOf(rpc.FromStatus(err)) != fault.ProcessNotFound {
			return err
		}
	}
	in.Namespace, in.Name = s.namespace(), s.name()
	stream, err := s.service.config.Processes.StartProcess(ctx, in)
	if err != nil {
		return err
	}
	return pass(stream.Recv, func(e *processv1.ProcessEvent) error { return each(e, true) })
}

// follow passes the events of a process on that an earlier call has started.
func (s *sandbox) follow(ctx context.Context, tag string, each func(*processv1.ProcessEvent) error) error {
	stream, err := s.service.config.Processes.ConnectProcess(ctx, &processv1.ConnectProcessRequest{
		Namespace: s.namespace(), Name: s.name(), Process: byTag(tag),
	})
	if err != nil {
		return err
	}
	return pass(stream.Recv, each)
}

// pass calls each for all events that a stream has.
func pass[M interface {
	GetEvent() *processv1.ProcessEvent
}](next func() (M, error), each func(*processv1.ProcessEvent) error) error {
	for {
		m, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := each(m.GetEvent()); err != nil {
			return err
		}
	}
}

// input sends a process its input. A process that ends before it has read all is no error.
func (s *sandbox) input(ctx context.Context, tag string, data []byte) {
	for piece := range slices.Chunk(data, maxInput) {
		_, err := s.service.config.Processes.SendInput(ctx, &processv1.SendInputRequest{Namespace: s.namespace(), Name: s.name(), Process: byTag(tag), Data: piece})
		if err != nil {
			return
		}
	}
	_, _ = s.service.config.Processes.CloseInput(ctx, &processv1.CloseInputRequest{Namespace: s.namespace(), Name: s.name(), Process: byTag(tag)})
}

// collector puts the events of a process into one answer.
type collector struct {
	result  *processv1.RunProcessResponse
	limit   int
	next    int64 // offset of the output that is expected
	started bool
}

func newCollector(limit int64) *collector {
	if limit == 0 {
		limit = defaultOutput
	}
	return &collector{result: &processv1.RunProcessResponse{}, limit: int(limit)}
}

func (c *collector) add(e *processv1.ProcessEvent) {
	switch {
	case e.GetStarted() != nil:
		c.started = true
		c.result.Pid, c.result.StartTime = e.GetStarted().GetPid(), e.GetStarted().GetStartTime()
	case e.GetOutput() != nil:
		o := e.GetOutput()
		c.result.StdoutDroppedBytes += o.GetOffset() - c.next // lost before this call, of either stream
		c.next = o.GetOffset() + int64(len(o.GetData()))
		to, dropped := &c.result.Stdout, &c.result.StdoutDroppedBytes
		if o.GetStream() == processv1.ProcessOutput_STREAM_STDERR {
			to, dropped = &c.result.Stderr, &c.result.StderrDroppedBytes
		}
		n := min(len(o.GetData()), c.limit-len(*to))
		*to = append(*to, o.GetData()[:n]...)
		*dropped += int64(len(o.GetData()) - n)
	case e.GetEnded() != nil:
		c.result.Exit = e.GetEnded()
	}
}
