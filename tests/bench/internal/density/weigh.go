package density

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	containerd "github.com/containerd/containerd/v2/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
)

// weigh measures an agent's containers that run, those of the sandboxes with these uids or, without any, its slots: each one's processes, and its share of the shim that keeps it. A shim that
// serves several containers is shared by all of them, whether they are ours or not.
func weigh(ctx context.Context, node *containerd.Client, agent string, uids map[string]bool) (reading, error) {
	var x reading
	list, err := node.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", v1alpha1.LabelAgentUID, agent))
	if err != nil {
		return x, fmt.Errorf("listing containers: %w", err)
	}
	ours := map[string]bool{}
	for _, c := range list {
		slot := c.Labels[v1alpha1.LabelState] == v1alpha1.StateSlot
		ours[c.ID] = slot && uids == nil || !slot && uids[c.Labels[v1alpha1.LabelSandboxUID]]
	}
	all, err := node.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return x, fmt.Errorf("listing tasks: %w", err)
	}
	kept, inside := map[int]int{}, map[int]int{} // containers of each shim: all, ours
	for _, t := range all.GetTasks() {
		if t.GetStatus() != task.Status_RUNNING {
			continue
		}
		p, err := host.ReadProcess(int(t.GetPid()))
		if err != nil {
			return x, err
		}
		kept[p.Parent]++
		if !ours[t.GetID()] {
			continue
		}
		inside[p.Parent]++
		body, err := processes(ctx, node, t.GetID())
		if err != nil {
			return x, err
		}
		x.bodies = append(x.bodies, body)
	}
	x.n, x.shims = len(x.bodies), len(inside)
	var total float64
	for pid, n := range inside {
		pss, err := host.PSS(pid)
		if err != nil {
			return x, err
		}
		total += float64(pss) * float64(n) / float64(kept[pid])
	}
	if x.n > 0 {
		x.shimPSS = int64(total / float64(x.n))
	}
	return x, nil
}

// Weigh returns the mean PSS, in MiB, of the sandboxes of an agent with these uids, with their share of their shims.
func Weigh(ctx context.Context, node *containerd.Client, agent string, uids map[string]bool) (float64, error) {
	x, err := weigh(ctx, node, agent, uids)
	if err != nil {
		return 0, err
	}
	if x.n == 0 {
		return 0, errors.New("the agent has no such container that runs")
	}
	var sum int64
	for _, b := range x.bodies {
		sum += b
	}
	return mib(sum/int64(x.n) + x.shimPSS), nil
}

// processes is the PSS of all processes of a container.
func processes(ctx context.Context, node *containerd.Client, id string) (int64, error) {
	resp, err := node.TaskService().ListPids(ctx, &tasks.ListPidsRequest{ContainerID: id})
	if err != nil {
		return 0, fmt.Errorf("listing the processes of container %s: %w", id, err)
	}
	var sum int64
	for _, p := range resp.GetProcesses() {
		pss, err := host.PSS(int(p.GetPid()))
		if err != nil {
			return 0, err
		}
		sum += pss
	}
	return sum, nil
}
