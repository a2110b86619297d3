package ctrd

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/usage"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

// Figures reads what containers use, with every runtime handler: all of them put a container into the cgroup that its spec names. It may be used
// concurrently.
type Figures struct {
	runtime *Runtime
	root    fs.FS
}

// NewFigures returns Figures of the containers of a Runtime.
func NewFigures(r *Runtime) *Figures {
	return &Figures{runtime: r, root: os.DirFS(r.config.CgroupRoot)}
}

// Usage reads what a container uses; its network only if it is said to have one of its own. NotFound: it has ended.
func (f *Figures) Usage(ctx context.Context, id string, network bool) (usage.Usage, error) {
	p, err := f.runtime.pods.find(ctx)
	if err != nil {
		return usage.Usage{}, err
	}
	group := node.CgroupPath(p.cgroup(id))
	u, err := usage.Read(f.root, group)
	if err != nil || !network {
		return u, err
	}
	u.Network, err = f.network(ctx, id, group)
	return u, err
}

// network reads the counters of a container's network namespace; nil if the container has none of its own, or has ended. The pid of a process
// may be that of another one meanwhile, so that the process has to be in the cgroup after its counters were read.
func (f *Figures) network(ctx context.Context, id, group string) (*usage.Network, error) {
	resp, err := f.runtime.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err != nil {
		if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) {
			return nil, nil //nolint:nilnil // it has no counters
		}
		return nil, classify(err, "finding the process of container %s", id)
	}
	pid := int(resp.GetProcess().GetPid())
	proc := "/proc/" + strconv.Itoa(pid)
	namespace, err := os.Readlink(proc + "/ns/net")
	if err != nil {
		return nil, nil //nolint:nilnil,nilerr // it has ended
	}
	if own, err := os.Readlink("/proc/self/ns/net"); err != nil || own == namespace {
		return nil, err
	}
	raw, err := os.ReadFile(proc + "/net/dev")
	if err != nil {
		return nil, nil //nolint:nilnil,nilerr // it has ended
	}
	tree, err := f.runtime.cgroups()
	if err != nil {
		return nil, err
	}
	pids, err := tree.Pids(group)
	if err != nil || !slices.Contains(pids, pid) {
		return nil, err
	}
	n, err := usage.ReadNetwork(string(raw))
	if err != nil {
		return nil, fmt.Errorf("reading the network of container %s: %w", id, err)
	}
	return &n, nil
}
