// Package task is containerd's Task API for a group of containers, each with sandbox-init as its first process. It starts them itself: no OCI
// runtime is executed.
//
// A group begins with an anchor, a container without a process that stands for the shim: containerd finds the shim through it for all the
// others, and it stays while those come and go.
package task

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/bundle"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
)

// Config is what a Service needs.
type Config struct {
	Cgroups *cgroup.Tree
	Starter *process.Starter
	// Publish sends an event to containerd, by its topic. It must not block. Events of one container are sent in the order of the calls.
	Publish func(topic string, event any)
	// Empty is called when containerd lets the shim go, and it has no container.
	Empty func()
}

// Service is the Task API.
type Service struct {
	cgroups *cgroup.Tree
	starter *process.Starter
	publish func(topic string, event any)
	empty   func()

	mu         sync.Mutex
	containers map[string]*container // nil while one is being created
	// anchored is closed when the anchor is stopped.
	anchored chan struct{}
	anchorAt time.Time
	deleted  bool // the anchor
}

// New returns a Service without containers.
func New(cfg Config) *Service {
	return &Service{cgroups: cfg.Cgroups, starter: cfg.Starter, publish: cfg.Publish, empty: cfg.Empty, containers: map[string]*container{}, anchored: make(chan struct{})}
}

// Used reports whether it has containers.
func (s *Service) Used() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.containers) > 0
}

// RegisterTTRPC registers the API with a server.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) { taskv3.RegisterTTRPCTaskService(server, s) }

// Create implements the Task API.
func (s *Service) Create(ctx context.Context, r *taskv3.CreateTaskRequest) (*taskv3.CreateTaskResponse, error) {
	c := &container{id: r.GetID(), bundle: r.GetBundle(), stdin: r.GetStdin(), stdout: r.GetStdout(), stderr: r.GetStderr()}
	raw, err := os.ReadFile(filepath.Join(c.bundle, "config.json"))
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if c.plan, err = plan.Parse(raw); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	switch {
	case r.GetTerminal():
		err = fmt.Errorf("a container with a terminal: %w", errdefs.ErrNotImplemented)
	case r.GetCheckpoint() != "":
		err = fmt.Errorf("restoring a checkpoint: %w", errdefs.ErrNotImplemented)
	case len(r.GetRootfs()) > 0:
		err = fmt.Errorf("a root file system, which sandbox-init gets with its claim: %w", errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if err := s.reserve(c.id); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if !c.plan.Anchor {
		err = s.create(ctx, c)
	}
	s.mu.Lock()
	if err != nil {
		delete(s.containers, c.id)
	} else {
		s.containers[c.id] = c
	}
	s.mu.Unlock()
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	s.publish("/tasks/create", &eventtypes.TaskCreate{
		ContainerID: c.id, Bundle: c.bundle, Pid: c.pid(),
		IO: &eventtypes.TaskIO{Stdin: c.stdin, Stdout: c.stdout, Stderr: c.stderr},
	})
	s.publish("/tasks/start", &eventtypes.TaskStart{ContainerID: c.id, Pid: c.pid()})
	if c.init != nil {
		go s.watch(c)
	}
	return &taskv3.CreateTaskResponse{Pid: c.pid()}, nil
}

// reserve takes an id for a container that is being created.
func (s *Service) reserve(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.containers[id]; ok {
		return fmt.Errorf("container %s: %w", id, errdefs.ErrAlreadyExists)
	}
	s.containers[id] = nil
	return nil
}

// pid is that of the container's first process. An anchor has none, and shows the shim's.
func (c *container) pid() uint32 {
	if c.init == nil {
		return uint32(os.Getpid())
	}
	return uint32(c.init.Pid())
}

// watch reports the end of a container.
func (s *Service) watch(c *container) {
	<-c.init.Done()
	code, at := c.init.Exit()
	// The kernel has ended all other processes of its PID namespace. Their ends are reported first.
	s.settle(c)
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	s.publish("/tasks/exit", &eventtypes.TaskExit{ContainerID: c.id, ID: c.id, Pid: c.pid(), ExitStatus: code, ExitedAt: timestamppb.New(at)})
}

// get returns a container.
func (s *Service) get(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return nil, errgrpc.ToGRPC(fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound))
	}
	return c, nil
}

// find returns a container, and the process that was added to it with an id; nil for that of the container itself.
func (s *Service) find(id, exec string) (*container, *execution, error) {
	c, err := s.get(id)
	if err != nil || exec == "" {
		return c, nil, err
	}
	e, err := c.exec(exec)
	return c, e, err
}

// Start implements the Task API. The process runs since Create, and its claim decides what it becomes: agents do not call Start for a container.
func (s *Service) Start(ctx context.Context, r *taskv3.StartRequest) (*taskv3.StartResponse, error) {
	c, e, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	if e != nil {
		return s.startExec(ctx, c, e)
	}
	c.mu.Lock()
	again := c.started
	c.started = true
	c.mu.Unlock()
	if again {
		return nil, errgrpc.ToGRPC(fmt.Errorf("container %s has been started: %w", c.id, errdefs.ErrFailedPrecondition))
	}
	return &taskv3.StartResponse{Pid: c.pid()}, nil
}

// exit returns how a container has ended; ok is false if it has not.
func (s *Service) exit(c *container) (code uint32, at time.Time, ok bool) {
	if c.init != nil {
		if !c.init.Ended() {
			return 0, time.Time{}, false
		}
		code, at = c.init.Exit()
		return code, at, true
	}
	select {
	case <-s.anchored:
		return 0, s.anchorAt, true
	default:
		return 0, time.Time{}, false
	}
}

// State implements the Task API.
func (s *Service) State(_ context.Context, r *taskv3.StateRequest) (*taskv3.StateResponse, error) {
	c, e, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	if e != nil {
		return stateOf(c, e), nil
	}
	out := &taskv3.StateResponse{
		ID: c.id, Bundle: c.bundle, Pid: c.pid(), Stdin: c.stdin, Stdout: c.stdout, Stderr: c.stderr, Status: task.Status_RUNNING,
	}
	code, at, ended := s.exit(c)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case ended:
		out.Status, out.ExitStatus, out.ExitedAt = task.Status_STOPPED, code, timestamppb.New(at)
	case c.paused:
		out.Status = task.Status_PAUSED
	}
	return out, nil
}

// Wait implements the Task API.
func (s *Service) Wait(ctx context.Context, r *taskv3.WaitRequest) (*taskv3.WaitResponse, error) {
	c, e, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	if e != nil {
		return waitExec(ctx, e)
	}
	done := s.anchored
	var ended <-chan struct{} = done
	if c.init != nil {
		ended = c.init.Done()
	}
	select {
	case <-ended:
	case <-ctx.Done():
		return nil, errgrpc.ToGRPC(ctx.Err())
	}
	code, at, _ := s.exit(c)
	return &taskv3.WaitResponse{ExitStatus: code, ExitedAt: timestamppb.New(at)}, nil
}

// Kill implements the Task API. An anchor that is killed ends the whole group.
func (s *Service) Kill(_ context.Context, r *taskv3.KillRequest) (*emptypb.Empty, error) {
	c, e, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	if e != nil {
		return killExec(c, e, unix.Signal(r.GetSignal()))
	}
	sig := unix.Signal(r.GetSignal())
	if _, _, ended := s.exit(c); ended {
		return nil, errgrpc.ToGRPC(fmt.Errorf("the process of container %s has ended: %w", c.id, errdefs.ErrNotFound))
	}
	switch {
	case c.init == nil:
		err = s.killAnchor(c, sig)
	case sig == unix.SIGKILL: // the first process takes all others with it
		err = s.kill(c)
	case r.GetAll():
		err = s.cgroups.Signal(c.plan.Cgroup, sig)
	default:
		err = c.signal(sig)
	}
	if errors.Is(err, os.ErrProcessDone) {
		err = fmt.Errorf("the process of container %s has ended: %w", c.id, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}

func (s *Service) killAnchor(anchor *container, sig syscall.Signal) error {
	if sig != unix.SIGKILL && sig != unix.SIGTERM {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.containers {
		if c != nil && c.init != nil {
			_ = s.kill(c)
		}
	}
	select {
	case <-s.anchored:
	default:
		s.anchorAt = time.Now()
		close(s.anchored)
		s.publish("/tasks/exit", &eventtypes.TaskExit{ContainerID: anchor.id, ID: anchor.id, Pid: anchor.pid(), ExitedAt: timestamppb.New(s.anchorAt)})
	}
	return nil
}

// Delete implements the Task API.
func (s *Service) Delete(ctx context.Context, r *taskv3.DeleteRequest) (*taskv3.DeleteResponse, error) {
	c, e, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	if e != nil {
		return deleteExec(ctx, c, e)
	}
	code, at, ended := s.exit(c)
	if !ended && c.begun() {
		return nil, errgrpc.ToGRPC(fmt.Errorf("container %s runs: %w", c.id, errdefs.ErrFailedPrecondition))
	}
	if err := s.destroy(c); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if !ended {
		if code, at, ended = s.exit(c); !ended {
			at = time.Now()
		}
	}
	s.mu.Lock()
	_, there := s.containers[c.id]
	delete(s.containers, c.id)
	s.deleted = s.deleted || c.plan.Anchor
	s.mu.Unlock()
	if there {
		for _, e := range c.executions() {
			e.release()
		}
		if c.init != nil {
			c.init.Close()
		}
		s.publish("/tasks/delete", &eventtypes.TaskDelete{ContainerID: c.id, Pid: c.pid(), ExitStatus: code, ExitedAt: timestamppb.New(at)})
	}
	answer := &taskv3.DeleteResponse{Pid: c.pid(), ExitStatus: code, ExitedAt: timestamppb.New(at)}
	if raw, err := proto.Marshal(answer); err == nil && !c.plan.Anchor {
		// Without it, what containerd executes now looks for something to delete.
		_ = os.WriteFile(filepath.Join(c.bundle, bundle.Deleted), raw, 0o600)
	}
	return answer, nil
}

// CloseIO implements the Task API.
func (s *Service) CloseIO(_ context.Context, r *taskv3.CloseIORequest) (*emptypb.Empty, error) {
	c, e, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	switch {
	case !r.GetStdin():
	case e != nil:
		e.closeInput()
	case c.streams != nil:
		c.streams.CloseInput()
	}
	return &emptypb.Empty{}, nil
}

// Connect implements the Task API.
func (s *Service) Connect(_ context.Context, r *taskv3.ConnectRequest) (*taskv3.ConnectResponse, error) {
	out := &taskv3.ConnectResponse{ShimPid: uint32(os.Getpid()), Version: "v3"}
	if c, err := s.get(r.GetID()); err == nil {
		out.TaskPid = c.pid()
	}
	return out, nil
}

// Shutdown implements the Task API. containerd calls it after each container that it deletes.
func (s *Service) Shutdown(context.Context, *taskv3.ShutdownRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A container may be left that containerd does not know: it was killed while it created it. No other can come.
	if len(s.containers) == 0 || s.deleted {
		s.empty()
	}
	return &emptypb.Empty{}, nil
}

// Checkpoint implements the Task API.
func (s *Service) Checkpoint(context.Context, *taskv3.CheckpointTaskRequest) (*emptypb.Empty, error) {
	return nil, errgrpc.ToGRPC(fmt.Errorf("checkpoints: %w", errdefs.ErrNotImplemented))
}
