package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/console"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
)

// signalTime bounds a signal that is sent because the user has ended fsb-ctl.
const signalTime = 5 * time.Second

// session is a process whose output the user sees, and that gets the user's input.
type session struct {
	cli    *cli
	client processv1.ProcessServiceClient
	name   string
	// stdin passes input on. terminal: the process has a terminal. kill: the process ends when the user interrupts fsb-ctl.
	stdin, terminal, kill bool

	process *processv1.Process
	next    int64 // offset of the next byte of output
	lost    int64
	left    bool // the user has detached
}

// events receives the events of a process.
type events func() (*processv1.ProcessEvent, error)

// run starts the process, or follows it, and stays with it until its end. detached: it returns once the process has started.
func (s *session) run(ctx context.Context, start func(context.Context) (grpc.ServerStreamingClient[processv1.StartProcessResponse], error), detached bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := openOnce(ctx, s.cli, "starting the command", start)
	if err != nil {
		return err
	}
	first := stream.first.GetEvent().GetStarted()
	if first == nil {
		return errors.New("the server has not said which process it started")
	}
	s.process = first
	if detached {
		fmt.Fprintln(s.cli.Out, first.GetPid())
		return nil
	}
	return s.stay(ctx, func() (*processv1.ProcessEvent, error) {
		m, err := stream.stream.Recv()
		return m.GetEvent(), err
	})
}

// follow connects to a process.
func (s *session) follow(ctx context.Context, which *processv1.ProcessSelector, from int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	next, err := s.connect(ctx, which, from)
	if err != nil {
		return err
	}
	return s.stay(ctx, next)
}

// connect opens a stream of a process's output.
func (s *session) connect(ctx context.Context, which *processv1.ProcessSelector, from int64) (events, error) {
	in := &processv1.ConnectProcessRequest{Namespace: s.cli.settings.Namespace, Name: s.name, Process: which, FromOffset: from}
	stream, err := openStream(ctx, s.cli, "connecting to the command", func(ctx context.Context) (grpc.ServerStreamingClient[processv1.ConnectProcessResponse], error) {
		return s.client.ConnectProcess(ctx, in)
	})
	if err != nil {
		return nil, err
	}
	if s.process = stream.first.GetEvent().GetStarted(); s.process == nil {
		return nil, errors.New("the server has not said which process it is")
	}
	return func() (*processv1.ProcessEvent, error) {
		m, err := stream.stream.Recv()
		return m.GetEvent(), err
	}, nil
}

func (s *session) selector() *processv1.ProcessSelector {
	return &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: s.process.GetPid()}}
}

// stay copies input and output until the process has ended, and returns its exit code as an error if that is not 0.
func (s *session) stay(ctx context.Context, next events) error {
	c := s.cli
	c.progress.stop()
	detached, stop, err := s.attend(ctx)
	if err != nil {
		return err
	}
	defer stop()
	type result struct {
		exit *processv1.ProcessExit
		err  error
	}
	done := make(chan result, 1)
	go func() {
		exit, err := s.copyAll(ctx, next)
		done <- result{exit, err}
	}()
	select {
	case r := <-done:
		stop()
		if s.lost > 0 {
			c.infof("%d bytes of output are lost", s.lost)
		}
		if r.err != nil || r.exit == nil {
			if ctx.Err() != nil {
				s.interrupt(ctx)
			}
			return r.err
		}
		if r.exit.GetTimedOut() {
			c.infof("the command was killed because its time was over")
		}
		if r.exit.GetCode() == 0 {
			return nil
		}
		return exitError{int(r.exit.GetCode())}
	case <-detached:
		stop()
		s.left = true
		c.infof("detached; the command runs on with pid %d: %s attach %s %d", s.process.GetPid(), c.program(), s.name, s.process.GetPid())
		return nil
	}
}

// interrupt ends the process of a user who has interrupted fsb-ctl.
func (s *session) interrupt(ctx context.Context) {
	if !s.kill {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), signalTime)
	defer cancel()
	_, err := s.client.SendSignal(ctx, &processv1.SendSignalRequest{
		Namespace: s.cli.settings.Namespace, Name: s.name, Process: s.selector(), Signal: int32(syscall.SIGINT), Group: true,
	})
	if err != nil && !errdefs.IsFailedPrecondition(s.cli.classify(err)) {
		s.cli.infof("the command with pid %d may run on: %v", s.process.GetPid(), s.cli.classify(err))
	}
}

// copyAll copies output until the process ends. When the connection breaks it connects again, and goes on where it was.
func (s *session) copyAll(ctx context.Context, next events) (*processv1.ProcessExit, error) {
	for {
		exit, err := s.copy(next)
		if err == nil {
			return exit, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err = s.cli.classify(ended(err)); !errdefs.IsUnavailable(err) {
			return nil, err
		}
		if next, err = s.connect(ctx, s.selector(), s.next); err != nil {
			return nil, err
		}
	}
}

// copy copies output until the end of a stream.
func (s *session) copy(next events) (*processv1.ProcessExit, error) {
	for {
		e, err := next()
		if err != nil {
			return nil, err
		}
		if exit := e.GetEnded(); exit != nil {
			return exit, nil
		}
		out := e.GetOutput()
		if out == nil {
			continue
		}
		data := out.GetData()
		if s.next > out.GetOffset() { // it is known
			data = data[min(int64(len(data)), s.next-out.GetOffset()):]
		} else {
			s.lost += out.GetOffset() - s.next
		}
		s.next = out.GetOffset() + int64(len(out.GetData()))
		to := s.cli.Out
		if out.GetStream() == processv1.ProcessOutput_STREAM_STDERR {
			to = s.cli.Err
		}
		if _, err := to.Write(data); err != nil {
			return nil, err
		}
	}
}

// attend passes input and sizes on until stop is called. detached is closed when the user has typed the keys for that.
func (s *session) attend(ctx context.Context) (detached <-chan struct{}, stop func(), err error) {
	left := make(chan struct{})
	stop = func() {}
	in := s.cli.In
	if s.terminal && s.stdin && console.Is(in) {
		tty, err := console.Open(in, s.cli.Out)
		if err != nil {
			return nil, nil, err
		}
		stop = tty.Restore
		in = console.NewDetacher(in)
	}
	if s.terminal && console.Is(s.cli.Out) {
		go s.resize(ctx)
	}
	if s.stdin {
		go s.feed(ctx, in, left)
	}
	return left, stop, nil
}

// resize passes the size of the user's terminal on.
func (s *session) resize(ctx context.Context) {
	changed, stop := console.Resized()
	defer stop()
	for {
		_, _ = s.client.ResizeTerminal(ctx, &processv1.ResizeTerminalRequest{
			Namespace: s.cli.settings.Namespace, Name: s.name, Process: s.selector(), Size: sizeNow(s.cli),
		})
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// feed passes input on, and closes it after its end. Input that is already read when a connection breaks may be lost.
func (s *session) feed(ctx context.Context, in io.Reader, left chan<- struct{}) {
	stream, err := s.client.StreamInput(ctx)
	if err != nil {
		return // the output says why
	}
	buffer := make([]byte, 32<<10)
	for fresh := true; ; {
		n, readErr := in.Read(buffer)
		named := &processv1.StreamInputRequest{Namespace: s.cli.settings.Namespace, Name: s.name, Process: s.selector(), Data: buffer[:n]}
		if !fresh && n > 0 && stream.Send(&processv1.StreamInputRequest{Data: buffer[:n]}) != nil {
			if stream, err = s.client.StreamInput(ctx); err != nil {
				return
			}
			fresh = true
		}
		if fresh && stream.Send(named) != nil {
			return
		}
		fresh = false
		if readErr == nil {
			continue
		}
		_, _ = stream.CloseAndRecv()
		if errors.Is(readErr, console.ErrDetached) {
			close(left)
			return
		}
		_, _ = s.client.CloseInput(ctx, &processv1.CloseInputRequest{Namespace: s.cli.settings.Namespace, Name: s.name, Process: s.selector()})
		return
	}
}
