package ctrd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
)

// taskAttempts is how often the removal of a task is attempted; each attempt takes up to some seconds.
const taskAttempts = 4

// taskRetries is the policy of the delays in between.
var taskRetries = backoff.Policy{Initial: 100 * time.Millisecond, Max: 300 * time.Millisecond}

// taskSet lists and removes containerd's tasks.
type taskSet struct {
	client    *client.Client
	processes processes
	clock     clock.Clock
	// step bounds a call to containerd.
	step func(context.Context) (context.Context, context.CancelFunc)
}

func (s *taskSet) service() tasks.TasksClient { return s.client.TaskService() }

// ids returns the ids of all tasks, including those without a record.
func (s *taskSet) ids(ctx context.Context) (map[string]bool, error) {
	step, cancel := s.step(ctx)
	defer cancel()
	resp, err := s.service().List(step, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing tasks: %w", errgrpc.ToNative(err))
	}
	ids := make(map[string]bool, len(resp.GetTasks()))
	for _, t := range resp.GetTasks() {
		ids[t.GetID()] = true
	}
	return ids, nil
}

// remove kills and deletes a container's task, and reports whether containerd knew it.
func (s *taskSet) remove(ctx context.Context, id string) (bool, error) {
	var last error
	delays := backoff.New(s.clock, taskRetries)
	for attempt := range taskAttempts {
		if attempt > 0 {
			// A task that has ended and cannot be deleted (no such device: its cgroup or mount was removed first) needs its shim
			// killed, too.
			if errdefs.IsDeadlineExceeded(last) || errors.Is(last, context.DeadlineExceeded) || isBroken(last) || IsGone(last) {
				kill(s.processes.strays(id))
			}
			if err := delays.Wait(ctx); err != nil {
				return true, fmt.Errorf("removing task %s: %w", id, errors.Join(last, err))
			}
		}
		var known bool
		if known, last = s.tryRemove(ctx, id); last == nil {
			return known || attempt > 0, nil
		}
	}
	return true, fmt.Errorf("removing task %s: %w", id, last)
}

func (s *taskSet) tryRemove(ctx context.Context, id string) (known bool, err error) {
	step, cancel := s.step(ctx)
	defer cancel()
	service := s.service()
	// A task that has not ended is not deleted: for one that was created and never started, this would block the shim for many
	// seconds.
	resp, err := service.Get(step, &tasks.GetRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil {
		if errdefs.IsNotFound(err) {
			return false, nil
		}
		return true, err
	}
	if resp.GetProcess().GetStatus() != task.Status_STOPPED {
		// It may end concurrently, for which shims have several messages: killing an ended process is not an error.
		_, err = service.Kill(step, &tasks.KillRequest{ContainerID: id, Signal: uint32(syscall.SIGKILL), All: true})
		if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) && !IsGone(err) {
			return true, err
		}
		_, err = service.Wait(step, &tasks.WaitRequest{ContainerID: id})
		if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) && !IsGone(err) {
			return true, err
		}
	}
	_, err = service.Delete(step, &tasks.DeleteTaskRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return true, err
	}
	return true, nil
}

// IsGone reports whether an error of a task's call means that the process has ended.
func IsGone(err error) bool {
	if err == nil {
		return false
	}
	for _, s := range []string{"process already finished", "no such process", "no such device", "container not running", "container is not running", "not created"} {
		if strings.Contains(err.Error(), s) {
			return true
		}
	}
	return false
}

// isBroken reports whether the shim's connection is broken: it ended, or containerd is about to clean it up.
func isBroken(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "ttrpc: closed") || strings.Contains(err.Error(), "ttrpc: server closed") ||
		strings.Contains(err.Error(), "connection refused") && strings.Contains(err.Error(), "shim"))
}
