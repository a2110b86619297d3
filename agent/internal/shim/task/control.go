package task

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	eventtypes "github.com/containerd/containerd/api/events"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
)

// Pids implements the Task API.
func (s *Service) Pids(_ context.Context, r *taskv3.PidsRequest) (*taskv3.PidsResponse, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	pids := []int{os.Getpid()}
	if c.init != nil {
		if pids, err = s.cgroups.Pids(c.plan.Cgroup); err != nil {
			return nil, errgrpc.ToGRPC(err)
		}
	}
	added := map[uint32]string{}
	for _, e := range c.executions() {
		added[e.pid()] = e.id
	}
	out := &taskv3.PidsResponse{}
	for _, pid := range pids {
		info := &task.ProcessInfo{Pid: uint32(pid)}
		if id, ok := added[info.GetPid()]; ok {
			if info.Info, err = typeurl.MarshalAnyToProto(&options.ProcessDetails{ExecID: id}); err != nil {
				return nil, errgrpc.ToGRPC(err)
			}
		}
		out.Processes = append(out.Processes, info)
	}
	return out, nil
}

// Pause implements the Task API.
func (s *Service) Pause(ctx context.Context, r *taskv3.PauseRequest) (*emptypb.Empty, error) {
	return s.freeze(ctx, r.GetID(), true)
}

// Resume implements the Task API.
func (s *Service) Resume(ctx context.Context, r *taskv3.ResumeRequest) (*emptypb.Empty, error) {
	return s.freeze(ctx, r.GetID(), false)
}

func (s *Service) freeze(ctx context.Context, id string, stop bool) (*emptypb.Empty, error) {
	c, err := s.running(id)
	if err != nil {
		return nil, err
	}
	c.entering.Lock()
	defer c.entering.Unlock()
	if err := s.cgroups.Freeze(ctx, c.plan.Cgroup, stop); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	c.mu.Lock()
	c.paused = stop
	c.mu.Unlock()
	if stop {
		s.publish("/tasks/paused", &eventtypes.TaskPaused{ContainerID: c.id})
	} else {
		s.publish("/tasks/resumed", &eventtypes.TaskResumed{ContainerID: c.id})
	}
	return &emptypb.Empty{}, nil
}

// running returns a container whose process runs.
func (s *Service) running(id string) (*container, error) {
	c, err := s.get(id)
	if err != nil {
		return nil, err
	}
	if c.init == nil || c.init.Ended() {
		return nil, errgrpc.ToGRPC(fmt.Errorf("container %s has no process that runs: %w", id, errdefs.ErrFailedPrecondition))
	}
	return c, nil
}

// Update implements the Task API.
func (s *Service) Update(_ context.Context, r *taskv3.UpdateTaskRequest) (*emptypb.Empty, error) {
	c, err := s.running(r.GetID())
	if err != nil {
		return nil, err
	}
	var limits specs.LinuxResources
	if err := json.Unmarshal(r.GetResources().GetValue(), &limits); err != nil { // containerd sends no other form
		return nil, errgrpc.ToGRPC(fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err))
	}
	err = plan.Supported(&limits)
	if err == nil {
		err = s.cgroups.Limit(c.plan.Cgroup, &limits)
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}

// Stats implements the Task API.
func (s *Service) Stats(_ context.Context, r *taskv3.StatsRequest) (*taskv3.StatsResponse, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	if c.init == nil {
		return nil, errgrpc.ToGRPC(fmt.Errorf("the figures of an anchor: %w", errdefs.ErrNotImplemented))
	}
	stats, err := s.cgroups.Stats(c.plan.Cgroup)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &taskv3.StatsResponse{Stats: stats}, nil
}
