// Package raw starts containers with containerd's own client and nothing else: the baseline of the create suite. It makes
// them like a given sandbox's, of the same image and snapshotter, with the same OCI spec and runtime, and, as containerd
// does by default, with a shim of their own. A Runner may be used concurrently.
package raw

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	// prefix of the ids of raw containers.
	prefix = "fsb-bench-raw-"
	// removeTime bounds the removal of one container.
	removeTime = 30 * time.Second
)

// groupings are the annotations by which containerd puts containers into one shim.
func groupings() []string {
	return []string{"io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"}
}

// Runner starts containers that are like one sandbox's.
type Runner struct {
	client *containerd.Client
	image  containerd.Image
	info   containers.Container
	spec   []byte
	logs   string
}

// Like returns a runner of containers like that with the id; their output goes to files in logs.
func Like(ctx context.Context, client *containerd.Client, id, logs string) (*Runner, error) {
	info, err := client.ContainerService().Get(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("reading container %s: %w", id, err)
	}
	image, err := client.GetImage(ctx, info.Image)
	if err != nil {
		return nil, fmt.Errorf("finding image %s: %w", info.Image, err)
	}
	if path.IsAbs(info.Runtime.Name) { // our own shim, which starts nothing but sandboxes
		info.Runtime = containers.RuntimeInfo{Name: "io.containerd.runc.v2"}
	}
	spec, err := Ungrouped(info.Spec.GetValue())
	if err != nil {
		return nil, fmt.Errorf("reading the spec of container %s: %w", id, err)
	}
	return &Runner{client: client, image: image, info: info, spec: spec, logs: logs}, nil
}

// Ungrouped is an OCI spec without the annotations that would put its container into another's shim, and without the user namespace, whose
// mapped root file system only an agent makes.
func Ungrouped(raw []byte) ([]byte, error) {
	var s oci.Spec
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, fmt.Errorf("decoding an OCI spec: %w", err)
	}
	if s.Linux == nil || s.Process == nil {
		return nil, errors.New("decoding an OCI spec: it is of no Linux process")
	}
	for _, key := range groupings() {
		delete(s.Annotations, key)
	}
	s.Linux.UIDMappings, s.Linux.GIDMappings = nil, nil
	s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace })
	return json.Marshal(&s)
}

// Renamed is an OCI spec with a cgroup of its own, beside that of the spec that it was made of.
func Renamed(raw []byte, id string) (*oci.Spec, error) {
	var s oci.Spec
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, fmt.Errorf("decoding an OCI spec: %w", err)
	}
	switch i := strings.LastIndex(s.Linux.CgroupsPath, ":"); {
	case i >= 0: // slice:prefix:name, for systemd
		s.Linux.CgroupsPath = s.Linux.CgroupsPath[:i+1] + id
	case s.Linux.CgroupsPath != "":
		s.Linux.CgroupsPath = path.Join(path.Dir(s.Linux.CgroupsPath), id)
	}
	return &s, nil
}

// Took is where the time of one create and start went.
type Took struct{ Container, Task, Start time.Duration }

// Total is all of it.
func (t Took) Total() time.Duration { return t.Container + t.Task + t.Start }

// Run creates and starts one container. The function that it returns removes it again, and must be called.
func (r *Runner) Run(ctx context.Context) (Took, func(context.Context) error, error) {
	t, _, remove, err := r.run(ctx)
	return t, remove, err
}

func (r *Runner) run(ctx context.Context) (t Took, id string, removed func(context.Context) error, err error) {
	id = prefix + uuid.NewString()
	spec, err := Renamed(r.spec, id)
	if err != nil {
		return Took{}, id, nil, err
	}
	remove := func(ctx context.Context) error { return r.remove(ctx, id) }
	began := time.Now()
	container, err := r.client.NewContainer(ctx, id,
		containerd.WithImage(r.image), containerd.WithSnapshotter(r.info.Snapshotter), containerd.WithNewSnapshot(id, r.image),
		containerd.WithRuntime(r.info.Runtime.Name, r.info.Runtime.Options), containerd.WithSpec(spec))
	t.Container = time.Since(began)
	if err != nil {
		return t, id, nil, errors.Join(fmt.Errorf("creating a container: %w", err), remove(context.WithoutCancel(ctx)))
	}
	began = time.Now()
	task, err := container.NewTask(ctx, cio.LogFile(path.Join(r.logs, id+".log")))
	t.Task = time.Since(began)
	if err != nil {
		return t, id, nil, errors.Join(fmt.Errorf("creating a task: %w", err), remove(context.WithoutCancel(ctx)))
	}
	began = time.Now()
	err = task.Start(ctx)
	t.Start = time.Since(began)
	if err != nil {
		return t, id, nil, errors.Join(fmt.Errorf("starting a task: %w", err), remove(context.WithoutCancel(ctx)))
	}
	return t, id, remove, nil
}

// Exec starts a process in a container that Run has started, waits for its end, and removes it: what `ctr tasks exec` does.
func (r *Runner) Exec(ctx context.Context, container containerd.Container, args ...string) (time.Duration, error) {
	began := time.Now()
	task, err := container.Task(ctx, nil)
	if err != nil {
		return 0, fmt.Errorf("finding the task: %w", err)
	}
	spec, err := container.Spec(ctx)
	if err != nil {
		return 0, fmt.Errorf("reading the spec: %w", err)
	}
	process := *spec.Process
	process.Args, process.Terminal = args, false
	p, err := task.Exec(ctx, "exec-"+uuid.NewString()[:13], &process, cio.NewCreator(cio.WithStreams(nil, io.Discard, io.Discard)))
	if err != nil {
		return 0, fmt.Errorf("making a process: %w", err)
	}
	defer func() { _, _ = p.Delete(context.WithoutCancel(ctx), containerd.WithProcessKill) }()
	exited, err := p.Wait(ctx)
	if err != nil {
		return 0, fmt.Errorf("waiting for a process: %w", err)
	}
	if err := p.Start(ctx); err != nil {
		return 0, fmt.Errorf("starting a process: %w", err)
	}
	status := <-exited
	p.IO().Wait()
	took := time.Since(began)
	code, _, err := status.Result()
	if err == nil && code != 0 {
		err = fmt.Errorf("%v exited with %d", args, code)
	}
	return took, err
}

// Container returns a new container that runs, and the function that removes it.
func (r *Runner) Container(ctx context.Context) (containerd.Container, func(context.Context) error, error) {
	_, id, remove, err := r.run(ctx)
	if err != nil {
		return nil, nil, err
	}
	container, err := r.client.LoadContainer(ctx, id)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("loading container %s: %w", id, err), remove(context.WithoutCancel(ctx)))
	}
	return container, remove, nil
}

func (r *Runner) remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, removeTime)
	defer cancel()
	container, err := r.client.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	task, err := container.Task(ctx, nil)
	if err == nil {
		err = end(ctx, task)
	}
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	if err := container.Delete(ctx, containerd.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	return nil
}

func end(ctx context.Context, task containerd.Task) error {
	exited, err := task.Wait(ctx)
	if err != nil {
		return err
	}
	if err := task.Kill(ctx, unix.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case <-exited:
	case <-ctx.Done():
		return ctx.Err()
	}
	_, err = task.Delete(ctx)
	return err
}

// Sweep removes all raw containers that a run which was killed has left.
func (r *Runner) Sweep(ctx context.Context) error {
	list, err := r.client.ContainerService().List(ctx, fmt.Sprintf("id~=^%s", prefix))
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	var errs []error
	for _, c := range list {
		errs = append(errs, r.remove(ctx, c.ID))
	}
	return errors.Join(errs...)
}
