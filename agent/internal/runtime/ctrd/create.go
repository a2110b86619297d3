package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// callTimeout bounds the calls to containerd that are waited for whoever leaves.
const callTimeout = 30 * time.Second

const specType = "types.containerd.io/opencontainers/runtime-spec/1/Spec"

// Create makes a container up to its task. The snapshot and the record, which do not need each other, are made side by
// side; see the package comment for what keeps them.
func (r *Runtime) Create(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error {
	pod, img, spec, err := r.prescribe(ctx, c, reached)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encoding the OCI spec of container %s: %w", c.ID, err)
	}
	options, err := r.config.Handler.Options(pod.systemd())
	if err != nil {
		return err
	}
	record := containers.Container{
		ID: c.ID, Labels: c.Labels, Image: img.name, Snapshotter: r.config.Snapshotter, SnapshotKey: c.ID,
		Runtime:    containers.RuntimeInfo{Name: r.config.Handler.Name},
		Spec:       &anypb.Any{TypeUrl: specType, Value: raw},
		Extensions: map[string]typeurl.Any{shared.RecordKey: c.Record},
	}
	if options != nil {
		record.Runtime.Options = options
	}
	// From here on a call that has been sent is waited for, whoever leaves: a call that containerd carried out after its
	// container was deleted would leave something behind. The caller's leaving counts between the calls.
	held, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	mounts, err := r.rootfs(held, record, img, reached)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	ctx = held
	if err := r.createTask(ctx, c.ID, c.LogPath, mounts, options, spec.Process.Args[0]); err != nil {
		return err
	}
	reached(runtime.StageTask)
	return nil
}

// prescribe brings the image and says what a container is to be, whichever way it is started.
func (r *Runtime) prescribe(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) (*pod, *image, *specs.Spec, error) {
	p, err := r.findPod(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	img, err := r.ensureImage(ctx, c.Image)
	if err != nil {
		return nil, nil, nil, err
	}
	reached(runtime.StageImage)
	spec, err := r.spec(ctx, c, img, p)
	return p, img, spec, err
}

// rootfs makes the snapshot and the record. A record of this id that exists is AlreadyExists, and the snapshot, which
// is then that container's, is left alone.
func (r *Runtime) rootfs(ctx context.Context, record containers.Container, img *image, reached func(runtime.Stage)) ([]mount.Mount, error) {
	var mounts []mount.Mount
	var prepareErr error
	prepared := make(chan struct{})
	var g errgroup.Group
	g.Go(func() error {
		defer close(prepared)
		ctx, span := obs.Tracer().Start(ctx, "snapshot")
		defer span.End()
		mounts, prepareErr = r.prepare(ctx, record.SnapshotKey, img)
		return nil // the record's error, if there is one, is the one to tell
	})
	g.Go(func() error {
		ctx, span := obs.Tracer().Start(ctx, "container")
		defer span.End()
		if _, err := r.client.ContainerService().Create(ctx, record); err != nil {
			return classify(err, "creating container %s", record.ID)
		}
		return nil
	})
	// The stages are told from this goroutine and in their order.
	if <-prepared; prepareErr == nil {
		reached(runtime.StageSnapshot)
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	if prepareErr != nil {
		return nil, prepareErr
	}
	// Whatever order the answers came in, a garbage collection may have run after the snapshot was made and before the record
	// was. From here on the record holds it.
	_, err := r.client.SnapshotService(record.Snapshotter).Stat(ctx, record.SnapshotKey)
	if errdefs.IsNotFound(err) {
		mounts, err = r.prepare(ctx, record.SnapshotKey, img)
	}
	if err != nil {
		return nil, classify(err, "making sure of snapshot %s", record.SnapshotKey)
	}
	reached(runtime.StageContainer)
	return mounts, nil
}

// errLeftBehind says that a snapshot is there already.
var errLeftBehind = errors.New("it was left behind by another create")

// prepare makes the snapshot; if the image's layers went since they were looked for, it unpacks them again.
func (r *Runtime) prepare(ctx context.Context, key string, img *image) ([]mount.Mount, error) {
	snapshotter := r.client.SnapshotService(r.config.Snapshotter)
	mounts, err := snapshotter.Prepare(ctx, key, img.chain)
	if errdefs.IsNotFound(err) {
		if err := r.unpack(ctx, img); err != nil {
			return nil, err
		}
		mounts, err = snapshotter.Prepare(ctx, key, img.chain)
	}
	if errdefs.IsAlreadyExists(err) {
		// Not passed on as such: only an existing record means an existing container.
		return nil, fmt.Errorf("preparing snapshot %s: %w: %s", key, errLeftBehind, err.Error())
	}
	if err != nil {
		return nil, classify(err, "preparing snapshot %s", key)
	}
	return mounts, nil
}

// outputs names one file twice, differently, so that the shim opens it once for each stream. With a file:// URI, or one
// name for both, containerd's shim (1.6 to 2.4) writes both streams through one descriptor, which it closes as soon as
// stdout has ended: what the process writes to stderr after that, often its last words, would be lost.
func outputs(path string) (stdout, stderr string) {
	return path, filepath.Dir(path) + "/./" + filepath.Base(path)
}

func (r *Runtime) createTask(ctx context.Context, id, logPath string, mounts []mount.Mount, options *anypb.Any, command string) error {
	ctx, span := obs.Tracer().Start(ctx, "task")
	defer span.End()
	stdout, stderr := outputs(logPath)
	req := &tasks.CreateTaskRequest{ContainerID: id, Stdout: stdout, Stderr: stderr, Options: options}
	for _, m := range mounts {
		req.Rootfs = append(req.Rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	_, err := r.client.TaskService().Create(ctx, req)
	if err = errgrpc.ToNative(err); err == nil {
		return nil
	}
	if ctx.Err() == nil {
		if f := startFault(err, command); f != nil {
			return f
		}
		if errdefs.IsNotFound(err) {
			return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd could not create the task of %s", id)
		}
	}
	return classify(err, "creating the task of container %s", id)
}
