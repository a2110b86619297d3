package inside

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/image"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

const (
	// openNamespace is the containerd namespace of the open container, of which no component knows.
	openNamespace = "fast-sandbox-escape"
	openName      = "open"
	openTime      = 3 * time.Minute
)

// Open is an open container: privileged, in the namespaces of the node. Every attack must succeed in it that can succeed on this
// machine: one that does not could not be noticed in a sandbox either.
type Open struct {
	// Socket is containerd's, CgroupParent the cgroup below which the container is.
	Socket, CgroupParent string
	// Images are those of the hostile program for root and for an ordinary user.
	Images []image.Image
	// CanaryDir is the directory of the canary, and Env what the attacks know.
	CanaryDir string
	Env       attack.Env
}

// Prove runs the attacks and adds each that does not succeed as unproven.
func (p Open) Prove(ctx context.Context, log *suite.Log) error {
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(ctx, openNamespace), openTime)
	defer cancel()
	c, err := containerd.New(p.Socket, containerd.WithDefaultNamespace(openNamespace))
	if err != nil {
		return fmt.Errorf("connecting to containerd: %w", err)
	}
	defer func() { _ = c.Close() }()
	release, err := p.offer()
	if err != nil {
		return err
	}
	defer release()
	succeeded := map[string]bool{}
	for i, user := range []attack.User{attack.Root, attack.Mere} {
		outcomes, err := p.run(ctx, c, p.Images[i])
		if err != nil {
			return errors.Join(fmt.Errorf("running the open container: %w", err), p.remove(context.WithoutCancel(ctx), c))
		}
		for _, o := range outcomes {
			succeeded[o.Name] = succeeded[o.Name] || o.Evidence != ""
		}
		for _, a := range attack.For(user, true) {
			mine := user == attack.Root && a.By != attack.Mere || a.By == attack.Mere && user == attack.Mere
			if mine && !succeeded[a.Name] {
				log.Unproven(a.Name, a.Unprovable)
			}
		}
	}
	return p.remove(context.WithoutCancel(ctx), c)
}

// offer makes what attacks look for: an abstract socket, and shared memory. What it returns removes them.
func (p Open) offer() (func(), error) {
	var listen net.ListenConfig
	l, err := listen.Listen(context.Background(), "unix", fmt.Sprintf("@escape-open-%d", os.Getpid()))
	if err != nil {
		return nil, fmt.Errorf("offering a socket: %w", err)
	}
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, 0o600)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("offering shared memory: %w", err), l.Close())
	}
	return func() {
		_ = l.Close()
		_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	}, nil
}

// run runs the program in the open container.
func (p Open) run(ctx context.Context, c *containerd.Client, i image.Image) ([]suite.Outcome, error) {
	if err := p.remove(ctx, c); err != nil { // of a run that was killed
		return nil, err
	}
	if err := i.Import(ctx, c); err != nil {
		return nil, err
	}
	img, err := image.Unpack(ctx, c, i.Ref)
	if err != nil {
		return nil, err
	}
	container, err := c.NewContainer(ctx, openName, containerd.WithSnapshotter(ctrd.DefaultSnapshotter),
		containerd.WithNewSnapshot(openName, img), containerd.WithRuntime("io.containerd.runc.v2", nil), containerd.WithNewSpec(p.spec(img)...))
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "escape-open-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	output := filepath.Join(dir, "output")
	task, err := container.NewTask(ctx, cio.LogFile(output))
	if err != nil {
		return nil, err
	}
	exited, err := task.Wait(ctx)
	if err != nil {
		return nil, err
	}
	if err := task.Start(ctx); err != nil {
		return nil, err
	}
	select {
	case <-exited:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	raw, err := os.ReadFile(output)
	if err != nil {
		return nil, err
	}
	var outcomes []suite.Outcome
	for line := range bytes.Lines(raw) {
		var o suite.Outcome
		if json.Unmarshal(line, &o) == nil && o.Name != "" {
			outcomes = append(outcomes, o)
		}
	}
	if len(outcomes) == 0 {
		return nil, fmt.Errorf("the program has printed %.500q", raw)
	}
	return outcomes, nil
}

func (p Open) spec(img containerd.Image) []oci.SpecOpts {
	return []oci.SpecOpts{
		oci.WithImageConfigArgs(img, []string{"run", "first"}),
		oci.WithEnv([]string{attack.EnvName + "=" + p.Env.String()}),
		oci.WithPrivileged, oci.WithAllDevicesAllowed, oci.WithHostDevices, oci.WithNewPrivileges,
		oci.WithWriteableSysfs, oci.WithWriteableCgroupfs,
		oci.WithHostNamespace(specs.PIDNamespace), oci.WithHostNamespace(specs.IPCNamespace), oci.WithHostNamespace(specs.UTSNamespace),
		oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: fmt.Sprintf("/proc/%d/ns/net", os.Getpid())}),
		oci.WithMounts([]specs.Mount{
			{Destination: p.CanaryDir, Type: "bind", Source: p.CanaryDir, Options: []string{"rbind", "ro"}},
			{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"rw"}},
		}),
		oci.WithCgroup(p.CgroupParent + "/" + openName),
	}
}

// remove removes the container and the images of its namespace, whatever state they are in.
func (p Open) remove(ctx context.Context, c *containerd.Client) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var failed []error
	if container, err := c.LoadContainer(ctx, openName); err == nil {
		if task, err := container.Task(ctx, nil); err == nil {
			if _, err := task.Delete(ctx, containerd.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
				failed = append(failed, err)
			}
		}
		if err := container.Delete(ctx, containerd.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
			failed = append(failed, err)
		}
	}
	for _, i := range p.Images {
		if err := c.ImageService().Delete(ctx, i.Ref); err != nil && !errdefs.IsNotFound(err) {
			failed = append(failed, err)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("removing the open container: %w", errors.Join(failed...))
	}
	return nil
}
