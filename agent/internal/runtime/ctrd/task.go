package ctrd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	v1stats "github.com/containerd/cgroups/v3/cgroup1/stats"
	v2stats "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// taskSet is the part of a Runtime that knows processes.
type taskSet struct {
	client *client.Client
	clock  clock.Clock
	// lost reports whether a container is in a shim of ours that has ended.
	lost func(ctx context.Context, id string) bool
	// deleting has the ids of the containers that this process is deleting.
	deleting sync.Map
}

// outputs returns two different names of one file, so that the shim opens it once for each stream. With a file:// URI, or
// one name for both, containerd's shim (1.6 to 2.4) writes both streams through one descriptor, which it closes as soon as
// stdout has ended: what the process writes to stderr after that, often its last error, would be lost.
func outputs(path string) (stdout, stderr string) {
	return path, filepath.Dir(path) + "/./" + filepath.Base(path)
}

// createTask creates a task whose process is not started yet. command names it in errors.
func (s *taskSet) createTask(ctx context.Context, id, logPath string, mounts []mount.Mount, options *anypb.Any, command string) error {
	ctx, span := obs.Tracer().Start(ctx, "task")
	defer span.End()
	stdout, stderr := outputs(logPath)
	req := &tasks.CreateTaskRequest{ContainerID: id, Stdout: stdout, Stderr: stderr, Options: options}
	for _, m := range mounts {
		req.Rootfs = append(req.Rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	_, err := s.client.TaskService().Create(ctx, req)
	if err = errgrpc.ToNative(err); err == nil {
		return nil
	}
	if ctx.Err() == nil {
		if f := startFault(err, command); f != nil {
			return f
		}
		if strings.Contains(err.Error(), plan.InitEnded) {
			return endedEarly(err, id)
		}
		if errdefs.IsNotFound(err) {
			return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd could not create the task of %s", id)
		}
	}
	return classify(err, "creating the task of container %s", id)
}

// createMember is createTask for a container of a shim of ours, whose record containerd may have lost.
func (r *Runtime) createMember(ctx context.Context, id, shim, logPath string) error {
	err := r.createTask(ctx, id, logPath, nil, nil, layout.InitPath)
	if err == nil || !strings.Contains(err.Error(), plan.NoShim) {
		return err
	}
	if err := r.shims.restore(ctx, shim); err != nil {
		return err
	}
	return r.createTask(ctx, id, logPath, nil, nil, layout.InitPath)
}

// Start starts the task's process. As in Create, the call is waited for even if the caller leaves.
func (s *taskSet) Start(ctx context.Context, id string) error {
	ctx, span := obs.Tracer().Start(context.WithoutCancel(ctx), "start")
	defer span.End()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := s.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err == nil {
		return nil
	}
	if f := startFault(err, ""); f != nil {
		return f
	}
	return classify(err, "starting container %s", id)
}

// Wait waits for the task's process; containerd holds the call until it has ended. It is not part of the create's trace: its
// spans would end with the sandbox.
func (s *taskSet) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	ctx = trace.ContextWithSpanContext(ctx, trace.SpanContext{})
	resp, err := s.client.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil {
		if errdefs.IsNotFound(err) {
			return runtime.Exit{}, fmt.Errorf("waiting for container %s: %w", id, err)
		}
		return runtime.Exit{}, classify(err, "waiting for container %s", id)
	}
	exit := runtime.Exit{Code: int32(resp.GetExitStatus()), At: resp.GetExitedAt().AsTime()}
	// A process that is being deleted was killed by that: to find out about other reasons would take several calls.
	if _, deleting := s.deleting.Load(id); exit.Code == 128+int32(syscall.SIGKILL) && !deleting {
		exit.OOMKilled = s.oomKilled(ctx, id)
		exit.RuntimeLost = !exit.OOMKilled && s.lost(ctx, id)
	}
	return exit, nil
}

// oomKilled reports whether the kernel killed a process in the container's cgroup, which exists until the task is deleted.
func (s *taskSet) oomKilled(ctx context.Context, id string) bool {
	resp, err := s.client.TaskService().Metrics(ctx, &tasks.MetricsRequest{Filters: []string{"id==" + id}})
	if err != nil || len(resp.GetMetrics()) != 1 {
		return false
	}
	data := resp.GetMetrics()[0].GetData()
	var v1 v1stats.Metrics
	if typeurl.Is(data, &v1) {
		return proto.Unmarshal(data.GetValue(), &v1) == nil && v1.GetMemoryOomControl().GetOomKill() > 0
	}
	var v2 v2stats.Metrics
	if typeurl.Is(data, &v2) {
		return proto.Unmarshal(data.GetValue(), &v2) == nil && v2.GetMemoryEvents().GetOomKill() > 0
	}
	return false
}

// Signal sends a signal to the task.
func (s *taskSet) Signal(ctx context.Context, id string, sig syscall.Signal, all bool) error {
	_, err := s.client.TaskService().Kill(ctx, &tasks.KillRequest{ContainerID: id, Signal: uint32(sig), All: all})
	err = errgrpc.ToNative(err)
	switch {
	case err == nil || shared.IsGone(err):
		return nil
	case errdefs.IsNotFound(err):
		// containerd returns this for a task that does not exist and for one whose process has ended.
		if states, listErr := s.states(ctx); listErr == nil && states[id] == runtime.TaskStopped {
			return nil
		}
		return fmt.Errorf("signaling container %s: %w", id, err)
	}
	return classify(err, "signaling container %s", id)
}

// HandlesSignal reads the process's signal masks. It needs the host's processes in /proc (hostPID), and returns true without
// them. containerd reports a task as started when runc has released it, which can be just before runc executes the user's
// program. Until then the masks are those of runc, which catches every signal, so it waits for the exec.
func (s *taskSet) HandlesSignal(ctx context.Context, id string, sig syscall.Signal) bool {
	resp, err := s.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err != nil {
		return true
	}
	path := filepath.Join("/proc", strconv.FormatUint(uint64(resp.GetProcess().GetPid()), 10), "status")
	for range execTimeout / execPoll {
		raw, err := os.ReadFile(path)
		if err != nil {
			return true
		}
		status := string(raw)
		if !strings.HasPrefix(status, runcInit) {
			return handlesSignal(status, sig)
		}
		select {
		case <-s.clock.After(execPoll):
		case <-ctx.Done():
			return true
		}
	}
	return true
}

const (
	// runcInit begins the /proc/PID/status of a process that is still runc: the name that it gives itself.
	runcInit = "Name:\trunc:["
	// execPoll is the interval at which such a process is checked, which does not grow: the exec takes about as long. After execTimeout it is taken for a user's process of the
	// same name.
	execPoll    = time.Millisecond
	execTimeout = time.Second
)

// handlesSignal reads the masks of caught and blocked signals from a /proc/PID/status.
func handlesSignal(status string, sig syscall.Signal) bool {
	masks := 0
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		if key != "SigCgt" && key != "SigBlk" {
			continue
		}
		mask, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err != nil || mask&(1<<(uint(sig)-1)) != 0 {
			return true
		}
		masks++
	}
	return masks < 2
}

// states returns the state of every task.
func (s *taskSet) states(ctx context.Context) (map[string]runtime.TaskState, error) {
	resp, err := s.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, classify(errgrpc.ToNative(err), "listing tasks")
	}
	states := make(map[string]runtime.TaskState, len(resp.GetTasks()))
	for _, t := range resp.GetTasks() {
		states[t.GetID()] = taskState(t.GetStatus())
	}
	return states, nil
}

// taskState translates a status. An unknown one counts as running: Wait then finds out.
func taskState(s task.Status) runtime.TaskState {
	switch s {
	case task.Status_CREATED:
		return runtime.TaskCreated
	case task.Status_STOPPED:
		return runtime.TaskStopped
	default:
		return runtime.TaskRunning
	}
}
