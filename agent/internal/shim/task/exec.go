package task

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// Exec implements the Task API: it adds a process, which Start starts.
func (s *Service) Exec(_ context.Context, r *taskv3.ExecProcessRequest) (*emptypb.Empty, error) {
	c, err := s.running(r.GetID())
	if err != nil {
		return nil, err
	}
	e := &execution{
		id: r.GetExecID(), stdin: r.GetStdin(), stdout: r.GetStdout(), stderr: r.GetStderr(), terminal: r.GetTerminal(), done: make(chan struct{}),
	}
	within, err := c.executable()
	if err == nil {
		e.request, err = plan.ParseExec(r.GetSpec().GetValue(), e.terminal, within)
	}
	if err == nil {
		err = c.add(e)
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	s.publish("/tasks/exec-added", &eventtypes.TaskExecAdded{ContainerID: c.id, ExecID: e.id})
	return &emptypb.Empty{}, nil
}

// executable returns the confinement of the container's processes. The error is errdefs.ErrFailedPrecondition if none can be added now.
func (c *container) executable() (*wire.Claim, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused {
		return nil, fmt.Errorf("container %s is paused, resume it before adding a process: %w", c.id, errdefs.ErrFailedPrecondition)
	}
	within, err := c.link.confinement()
	if err != nil {
		return nil, fmt.Errorf("adding a process to container %s: %w", c.id, err)
	}
	return within, nil
}

func (c *container) add(e *execution) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.id == "" {
		return fmt.Errorf("a process without an id: %w", errdefs.ErrInvalidArgument)
	}
	if _, ok := c.execs[e.id]; ok {
		return fmt.Errorf("process %s of container %s: %w", e.id, c.id, errdefs.ErrAlreadyExists)
	}
	if c.execs == nil {
		c.execs = map[string]*execution{}
	}
	c.execs[e.id] = e
	return nil
}

// exec returns a process that was added to a container.
func (c *container) exec(id string) (*execution, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.execs[id]; e != nil {
		return e, nil
	}
	return nil, errgrpc.ToGRPC(fmt.Errorf("process %s of container %s: %w", id, c.id, errdefs.ErrNotFound))
}

func (c *container) executions() []*execution {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]*execution, 0, len(c.execs))
	for _, e := range c.execs {
		list = append(list, e)
	}
	return list
}

func (s *Service) startExec(ctx context.Context, c *container, e *execution) (*taskv3.StartResponse, error) {
	if err := e.begin(); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if err := s.launch(ctx, c, e); err != nil {
		e.stop(exitCode(err), time.Now(), func() {})
		return nil, errgrpc.ToGRPC(fmt.Errorf("starting process %s of container %s: %w", e.id, c.id, err))
	}
	s.publish("/tasks/exec-started", &eventtypes.TaskExecStarted{ContainerID: c.id, ExecID: e.id, Pid: e.pid()})
	go s.watchExec(c, e)
	return &taskv3.StartResponse{Pid: e.pid()}, nil
}

// exitCode is what a shell returns for a command that it cannot execute.
func exitCode(err error) uint32 {
	if errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}

// watchExec reports the end of a process that was added.
func (s *Service) watchExec(c *container, e *execution) {
	<-e.process.Done()
	code, at := e.process.Exit()
	e.stop(code, at, func() {
		s.publish("/tasks/exit", &eventtypes.TaskExit{ContainerID: c.id, ID: e.id, Pid: e.pid(), ExitStatus: code, ExitedAt: timestamppb.New(at)})
	})
}

func stateOf(c *container, e *execution) *taskv3.StateResponse {
	state, code, at := e.status()
	out := &taskv3.StateResponse{
		ID: e.id, Bundle: c.bundle, Pid: e.pid(), Stdin: e.stdin, Stdout: e.stdout, Stderr: e.stderr, Terminal: e.terminal,
		Status: state, ExitStatus: code,
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case state == task.Status_STOPPED:
		out.ExitedAt = timestamppb.New(at)
	case c.paused:
		out.Status = task.Status_PAUSED
	}
	return out
}

func waitExec(ctx context.Context, e *execution) (*taskv3.WaitResponse, error) {
	select {
	case <-e.done:
	case <-ctx.Done():
		return nil, errgrpc.ToGRPC(ctx.Err())
	}
	_, code, at := e.status()
	return &taskv3.WaitResponse{ExitStatus: code, ExitedAt: timestamppb.New(at)}, nil
}

func killExec(c *container, e *execution, sig unix.Signal) (*emptypb.Empty, error) {
	err := e.signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		err = fmt.Errorf("process %s of container %s has ended: %w", e.id, c.id, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}

func deleteExec(ctx context.Context, c *container, e *execution) (*taskv3.DeleteResponse, error) {
	state, code, at := e.status()
	out := &taskv3.DeleteResponse{Pid: e.pid(), ExitStatus: code}
	e.mu.Lock()
	busy := e.phase == starting || state == task.Status_RUNNING
	if e.phase == added {
		e.phase = stopped // it can no longer be started
		close(e.done)
	}
	e.mu.Unlock()
	if busy {
		return nil, errgrpc.ToGRPC(fmt.Errorf("process %s of container %s runs: %w", e.id, c.id, errdefs.ErrFailedPrecondition))
	}
	if state == task.Status_STOPPED {
		out.ExitedAt = timestamppb.New(at)
		if _, err := waitExec(ctx, e); err != nil { // for the event
			return nil, err
		}
	}
	e.release()
	c.mu.Lock()
	delete(c.execs, e.id)
	c.mu.Unlock()
	return out, nil
}

// ResizePty implements the Task API.
func (s *Service) ResizePty(_ context.Context, r *taskv3.ResizePtyRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	if r.GetExecID() == "" { // no container has a terminal
		return &emptypb.Empty{}, nil
	}
	e, err := c.exec(r.GetExecID())
	if err != nil {
		return nil, err
	}
	state, _, _ := e.status()
	streams := e.output()
	switch {
	case state == task.Status_STOPPED:
		err = fmt.Errorf("process %s of container %s has ended: %w", e.id, c.id, errdefs.ErrFailedPrecondition)
	case streams != nil:
		err = streams.Resize(uint16(r.GetHeight()), uint16(r.GetWidth()))
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}
