package truth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/typeurl/v2"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// containerID is the form of our containers' ids: the sandbox's uid and the attempt, or the id of its slot.
var containerID = regexp.MustCompile(`^(?:([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-[0-9]+|slot\.[0-9a-f]{20})$`)

// containers lists the pool's containers, and the ids of all containers of ours.
func (o *Observer) containers(ctx context.Context) ([]audit.Container, map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	list, err := o.Node.ContainerService().List(ctx, fmt.Sprintf("labels.%q==true", v1alpha1.LabelManaged))
	if err != nil {
		return nil, nil, fmt.Errorf("listing containers: %w", err)
	}
	running, err := o.Node.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, nil, fmt.Errorf("listing tasks: %w", err)
	}
	alive := map[string]bool{}
	for _, t := range running.GetTasks() {
		alive[t.GetID()] = t.GetStatus() != task.Status_STOPPED
	}
	var out []audit.Container
	ids := map[string]bool{}
	for _, c := range list {
		ids[c.ID] = true
		if pool := c.Labels[v1alpha1.LabelPool]; pool == o.Pool || pool == "" {
			out = append(out, container(c, alive[c.ID]))
		}
	}
	return out, ids, nil
}

func container(c containers.Container, running bool) audit.Container {
	out := audit.Container{ID: c.ID, AgentUID: c.Labels[v1alpha1.LabelAgentUID], Running: running, Dump: fmt.Sprintf("labels: %v", c.Labels)}
	i, err := identity.Parse(c.Labels)
	if err != nil {
		out.Broken = err.Error()
		return out
	}
	out.Name, out.UID, out.Attempt, out.Slot = i.Name, i.SandboxUID, i.Attempt, i.State == identity.StateSlot
	if raw, ok := c.Extensions[ctrd.RecordKey]; ok {
		if decoded, err := typeurl.UnmarshalAny(raw); err == nil {
			if record, ok := decoded.(*agentv1.SandboxRecord); ok {
				out.RequestID = record.GetRequestId()
			}
		}
	}
	return out
}

// remnants lists objects that have the name of a container of ours that does not exist.
func (o *Observer) remnants(ctx context.Context, containers map[string]bool) ([]audit.Remnant, error) {
	var out []audit.Remnant
	add := func(kind, dir, name string) {
		m := containerID.FindStringSubmatch(name)
		if m != nil && !containers[name] && !o.baseline[kind+" "+name] {
			out = append(out, audit.Remnant{Kind: kind, ID: name, UID: m[1], AgentUID: agentOf(filepath.Join(dir, name))})
		}
	}
	err := o.Node.SnapshotService(o.Snapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		add("snapshot", "/nowhere", info.Name)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing snapshots: %w", err)
	}
	for kind, dir := range o.Dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("reading %s: %w", dir, err)
		}
		for _, e := range entries {
			add(kind, dir, e.Name())
		}
	}
	return out, nil
}

// podCgroup is the Pod in the path of a cgroup.
var podCgroup = regexp.MustCompile(`/pod([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/`)

// agentOf returns the uid of the agent that made a directory: a log has it in a file, a bundle in the path of its cgroup. It
// is empty if neither exists.
func agentOf(dir string) string {
	if raw, err := os.ReadFile(filepath.Join(dir, "owner")); err == nil {
		return string(raw)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return ""
	}
	var spec struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if json.Unmarshal(raw, &spec) != nil {
		return ""
	}
	if m := podCgroup.FindStringSubmatch(spec.Linux.CgroupsPath); m != nil {
		return m[1]
	}
	return ""
}
