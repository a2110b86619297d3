package janitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/tmpfs"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/process"
)

const (
	shimName = "containerd-shim-runc-v2"
	// busybox is what sandboxes run, a program that needs no library.
	busybox = "/bin/busybox"
	// baseSnapshot is the only layer of the image that all sandboxes have.
	baseSnapshot = "bench-base"
	// gcRoot is the label of what containerd's garbage collector leaves alone.
	gcRoot = "containerd.io/gc.root"
	// nodeTime is how long containerd may take to start.
	nodeTime = time.Minute
)

// node is a containerd with sandboxes.
type node struct {
	*process.Process

	workspace       *workspace
	client          *containerd.Client
	socket, metrics string
}

func (n *node) path(name string) string { return filepath.Join(n.workspace.dir, name) }

// startNode starts a containerd with one layer of an image.
func startNode(ctx context.Context, bin string, p *workspace) (*node, error) {
	n := &node{workspace: p, socket: filepath.Join(p.dir, "c.sock")}
	var err error
	if n.metrics, err = process.FreeAddress("127.0.0.1"); err != nil {
		return nil, err
	}
	if err := errors.Join(os.MkdirAll(n.path("log"), 0o700), os.MkdirAll(n.path("fifo"), 0o700), n.rootfs()); err != nil {
		return nil, fmt.Errorf("making directories: %w", err)
	}
	if err := tmpfs.Ensure(n.state()); err != nil { // the workspace unmounts it
		return nil, err
	}
	config := n.path("containerd.toml")
	if err := os.WriteFile(config, []byte(n.config()), 0o600); err != nil {
		return nil, fmt.Errorf("configuring containerd: %w", err)
	}
	dir := filepath.Join(bin, "containerd")
	n.Process, err = process.Start(process.Config{
		Name: "containerd", Dir: p.dir, Path: filepath.Join(dir, "containerd"), Args: []string{"--config", config},
		Env: []string{"PATH=" + dir + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	})
	if err != nil {
		return nil, err
	}
	if n.client, err = ctrd.Dial(n.socket, ctrd.DefaultNamespace); err != nil {
		return nil, err
	}
	if err := mesh.Poll(ctx, 50*time.Millisecond, nodeTime, func(ctx context.Context) error {
		if err := n.Alive(); err != nil {
			return err
		}
		_, err := n.client.Version(ctx)
		return err
	}); err != nil {
		return nil, fmt.Errorf("starting containerd: %w\n%s", err, n.Tail())
	}
	return n, n.base(ctx)
}

// state is containerd's state directory.
func (n *node) state() string { return n.path("s") }

// config returns containerd's configuration. What only Kubernetes uses is off, and so are the metrics of every container, which
// would cost more to read than what is measured.
func (n *node) config() string {
	return fmt.Sprintf(`version = 4
root = %q
state = %q
imports = []
disabled_plugins = [
  'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.grpc.v1.cri', 'io.containerd.nri.v1.nri',
  'io.containerd.snapshotter.v1.blockfile', 'io.containerd.snapshotter.v1.erofs', 'io.containerd.differ.v1.erofs',
  'io.containerd.monitor.task.v1.cgroups', 'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.devmapper',
]

[plugins.'io.containerd.server.v1.grpc']
  address = %q

[plugins.'io.containerd.server.v1.ttrpc']
  address = %q

[plugins.'io.containerd.server.v1.metrics']
  address = %q

[plugins.'io.containerd.shim.v1.manager']
  socket_dir = %q

[plugins.'io.containerd.internal.v1.opt']
  path = %q
`, filepath.Join(n.workspace.content, "root"), n.state(), n.socket, n.socket+".ttrpc", n.metrics, n.path("shims"), n.path("opt"))
}

// rootfs makes the root of all sandboxes, which is read-only to them.
func (n *node) rootfs() error {
	root := n.path("rootfs")
	for _, dir := range []string{"proc", "dev"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	raw, err := os.ReadFile(busybox)
	if err != nil {
		return fmt.Errorf("sandboxes run busybox (apt-get install busybox-static): %w", err)
	}
	return os.WriteFile(filepath.Join(root, "busybox"), raw, 0o755)
}

// base creates the layer that is the parent of all sandboxes' snapshots.
func (n *node) base(ctx context.Context) error {
	service, keep := n.client.SnapshotService(ctrd.DefaultSnapshotter), snapshots.WithLabels(map[string]string{gcRoot: "bench"})
	_, err := service.Prepare(ctx, baseSnapshot+"-new", "", keep)
	if err == nil {
		err = service.Commit(ctx, baseSnapshot, baseSnapshot+"-new", keep)
	}
	if err != nil {
		return fmt.Errorf("making a layer: %w", err)
	}
	return nil
}

// check returns an error unless exactly that many containers exist and all of them run.
func (n *node) check(ctx context.Context, want int) error {
	if err := n.Alive(); err != nil {
		return err
	}
	list, err := n.client.ContainerService().List(ctx)
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	resp, err := n.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return fmt.Errorf("listing tasks: %w", errgrpc.ToNative(err))
	}
	running := 0
	for _, t := range resp.GetTasks() {
		if t.GetStatus() == task.Status_RUNNING {
			running++
		}
	}
	if len(list) != want || running != want {
		return fmt.Errorf("%d containers exist and %d run, want %d", len(list), running, want)
	}
	return nil
}

// shims are the processes of the node's shims.
func (n *node) shims() []int {
	var out []int
	for _, pid := range n.workspace.processes() {
		// One that has ended meanwhile executes nothing.
		if exe, _ := os.Readlink(filepath.Join("/proc", fmt.Sprint(pid), "exe")); filepath.Base(exe) == shimName {
			out = append(out, pid)
		}
	}
	return out
}

// cpuOf is the CPU time of processes in seconds.
func cpuOf(pids ...int) (float64, error) {
	sum := 0.0
	for _, pid := range pids {
		used, err := host.CPUTime(pid)
		if err != nil {
			return 0, err
		}
		sum += used.Seconds()
	}
	return sum, nil
}
