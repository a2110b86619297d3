package ctrd_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/sandbox"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// host is a fake containerd with one container. It records every call that changes something, and lists of tasks.
type host struct {
	status task.Status // unknown: there is no task
	fail   map[string][]error
	calls  []string

	labels  map[string]string // of the container
	groups  map[string]string // of slots, which have a record, by id
	removed []string          // keys of snapshots
	// anchors and records are the owners of shims, by id: of their containers, and of their records in the sandbox store.
	anchors, records map[string]string
	sandboxOf        map[string]string // the SandboxID of containers, by id
}

// call records a call and returns its next error.
func (h *host) call(name string) error {
	h.calls = append(h.calls, name)
	if len(h.fail[name]) == 0 {
		return nil
	}
	err := h.fail[name][0]
	h.fail[name] = h.fail[name][1:]
	return err
}

func (h *host) remover(t *testing.T) *ctrd.Remover {
	t.Helper()
	c, err := client.New("", client.WithDefaultNamespace("k8s.io"), client.WithServices(
		client.WithTaskClient(service{h: h}), client.WithContainerStore(store{h: h}), client.WithSandboxStore(sandboxStore{h: h}), client.WithSnapshotters(map[string]snapshots.Snapshotter{"overlayfs": snapshotter{h: h}})))
	require.NoError(t, err)
	return &ctrd.Remover{Client: c, Snapshotter: "overlayfs", ProcRoot: t.TempDir(), CgroupRoot: t.TempDir(), StepTimeout: 10 * time.Second}
}

type service struct {
	tasks.TasksClient

	h *host
}

func (s service) Get(context.Context, *tasks.GetRequest, ...grpc.CallOption) (*tasks.GetResponse, error) {
	if s.h.status == task.Status_UNKNOWN {
		return nil, status.Error(codes.NotFound, "no task")
	}
	return &tasks.GetResponse{Process: &task.Process{Status: s.h.status}}, nil
}

func (s service) List(context.Context, *tasks.ListTasksRequest, ...grpc.CallOption) (*tasks.ListTasksResponse, error) {
	return &tasks.ListTasksResponse{}, s.h.call("list")
}

func (s service) Kill(_ context.Context, r *tasks.KillRequest, _ ...grpc.CallOption) (*emptypb.Empty, error) {
	if r.GetSignal() != 9 || !r.GetAll() {
		return nil, errors.New("the signal does not go to all processes")
	}
	s.h.status = task.Status_STOPPED
	return &emptypb.Empty{}, s.h.call("kill")
}

func (s service) Wait(context.Context, *tasks.WaitRequest, ...grpc.CallOption) (*tasks.WaitResponse, error) {
	return &tasks.WaitResponse{}, s.h.call("wait")
}

func (s service) Delete(context.Context, *tasks.DeleteTaskRequest, ...grpc.CallOption) (*tasks.DeleteResponse, error) {
	if s.h.status == task.Status_CREATED {
		return nil, errors.New("this would block the shim for seconds")
	}
	err := s.h.call("delete task")
	if err == nil {
		s.h.status = task.Status_UNKNOWN
	}
	return &tasks.DeleteResponse{}, err
}

type store struct {
	containers.Store

	h *host
}

func (s store) Get(_ context.Context, id string) (containers.Container, error) {
	c := containers.Container{ID: id, Snapshotter: "overlayfs", SnapshotKey: id, Labels: s.h.labels}
	if group, ok := s.h.groups[id]; ok {
		c.Spec = &anypb.Any{Value: fmt.Appendf(nil, `{"annotations":{%q:%q}}`, ctrd.GroupAnnotation, group)}
	}
	return c, nil
}

func (s store) List(ctx context.Context, _ ...string) ([]containers.Container, error) {
	var out []containers.Container
	for id := range s.h.groups {
		c, err := s.Get(ctx, id)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	for id, owner := range s.h.anchors {
		out = append(out, containers.Container{ID: id, Labels: map[string]string{identity.KeyShim: owner}})
	}
	for id, shim := range s.h.sandboxOf {
		out = append(out, containers.Container{ID: id, SandboxID: shim})
	}
	return out, s.h.call("list containers")
}

func (s store) Delete(_ context.Context, id string) error {
	err := s.h.call("delete container")
	if err == nil {
		delete(s.h.groups, id)
		delete(s.h.anchors, id)
	}
	return err
}

// sandboxStore has the records of shims.
type sandboxStore struct {
	sandbox.Store

	h *host
}

func (s sandboxStore) List(context.Context, ...string) ([]sandbox.Sandbox, error) {
	var out []sandbox.Sandbox
	for id, owner := range s.h.records {
		out = append(out, sandbox.Sandbox{ID: id, Labels: map[string]string{identity.KeyShim: owner}})
	}
	return out, s.h.call("list records")
}

func (s sandboxStore) Delete(_ context.Context, id string) error {
	err := s.h.call("delete record")
	if err == nil {
		delete(s.h.records, id)
	}
	return err
}

type snapshotter struct {
	snapshots.Snapshotter

	h *host
}

func (s snapshotter) Remove(_ context.Context, key string) error {
	s.h.removed = append(s.h.removed, key)
	return s.h.call("remove snapshot")
}

// TestRemoveByTaskState: a task that has not ended is killed before it is deleted; no call is made twice.
func TestRemoveByTaskState(t *testing.T) {
	rest := []string{"delete task", "remove snapshot", "delete container"}
	kill := slices.Concat([]string{"kill", "wait"}, rest)
	for state, want := range map[task.Status][]string{
		task.Status_UNKNOWN: rest[1:], task.Status_CREATED: kill, task.Status_RUNNING: kill, task.Status_PAUSED: kill, task.Status_STOPPED: rest,
	} {
		h := &host{status: state}
		require.NoError(t, h.remover(t).Remove(t.Context(), "u-1"))
		require.Equal(t, want, h.calls, state)
	}
}

// TestRemoveHandlesMissingParts has the errors of a cgroup, a mount or a process that was removed before.
func TestRemoveHandlesMissingParts(t *testing.T) {
	enodev := status.Error(codes.Unknown, "failed to delete cgroup: /sys/fs/cgroup/fsb-u-1: no such device: unknown")
	finished := status.Error(codes.Unknown, "process already finished")
	gone := status.Error(codes.NotFound, "not found")
	closed := status.Error(codes.Unknown, "failed to delete task: ttrpc: closed")
	for name, fail := range map[string]map[string][]error{
		"kill":                {"kill": {enodev}},
		"kill, finished":      {"kill": {finished}},
		"wait":                {"wait": {enodev}},
		"delete":              {"delete task": {enodev, enodev, enodev}},
		"delete, then gone":   {"delete task": {enodev, gone}},
		"delete, shim closed": {"delete task": {closed, gone}},
		"all is gone":         {"kill": {gone}, "wait": {gone}, "delete task": {gone}, "remove snapshot": {errdefs.ErrNotFound}, "delete container": {errdefs.ErrNotFound}},
	} {
		t.Run(name, func(t *testing.T) {
			h := &host{status: task.Status_RUNNING, fail: fail}
			require.NoError(t, h.remover(t).Remove(t.Context(), "u-1"))
			require.Equal(t, "delete container", h.calls[len(h.calls)-1])
		})
	}
}

// TestRecordIsRemovedLast: a removal that fails leaves the evidence for the next one.
func TestRecordIsRemovedLast(t *testing.T) {
	busy := errors.New("device or resource busy")
	for name, fail := range map[string]map[string][]error{
		"task":     {"delete task": {busy, busy, busy, busy}},
		"snapshot": {"remove snapshot": {busy}},
	} {
		t.Run(name, func(t *testing.T) {
			h := &host{status: task.Status_STOPPED, fail: fail}
			r := h.remover(t)
			require.ErrorContains(t, r.Remove(t.Context(), "u-1"), "busy")
			require.NotContains(t, h.calls, "delete container")
			require.NoError(t, r.Remove(t.Context(), "u-1"))
			require.Contains(t, h.calls, "delete container")
		})
	}
}
