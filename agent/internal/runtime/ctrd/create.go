package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// callTimeout bounds the calls to containerd that are waited for even when the caller has left.
const callTimeout = 30 * time.Second

const specType = "types.containerd.io/opencontainers/runtime-spec/1/Spec"

// Create creates a container up to its task. The snapshot and the record, which do not depend on each other, are created
// concurrently; the package comment says what protects them.
func (r *Runtime) Create(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error {
	if r.config.Handler.IsOwn() {
		return r.createOwn(ctx, c, reached)
	}
	pod, img, spec, err := r.prepareSpec(ctx, c, reached)
	if err != nil {
		return err
	}
	if err := r.specs.makeDoor(filepath.Join(filepath.Dir(c.LogPath), shared.ClaimedDir)); err != nil {
		return err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encoding the OCI spec of container %s: %w", c.ID, err)
	}
	options, err := r.config.Handler.Options(pod.systemd(), pod.shims)
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
	// From here on a call that was sent is waited for, even if the caller leaves: a call that containerd carries out after
	// the container was deleted would leave something behind. ctx is checked between the calls.
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

// prepareSpec makes sure that the image is on the node and builds the container's spec.
func (r *Runtime) prepareSpec(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) (*pod, *image, *specs.Spec, error) {
	img, err := r.ensureImage(ctx, c.Image)
	if err != nil {
		return nil, nil, nil, err
	}
	reached(runtime.StageImage)
	p, spec, err := r.buildSpec(ctx, c, img)
	return p, img, spec, err
}

// buildSpec builds the spec of a container, whichever way it is started.
func (r *Runtime) buildSpec(ctx context.Context, c runtime.Container, img *image) (*pod, *specs.Spec, error) {
	if c.KeepAlive && !r.config.Handler.IsOwn() {
		return nil, nil, fault.Field("spec.keep_alive", "the runtime handler %s of the pool's agents has no sandboxes without a process", r.config.Handler.Name)
	}
	p, err := r.pods.find(ctx)
	if err != nil {
		return nil, nil, err
	}
	c.Limits.CPUMillis = r.boundCPU(c.Limits.CPUMillis, p.cgroup(c.ID))
	spec, err := r.specs.sandbox(ctx, c, img, p)
	return p, spec, err
}

// describe returns the spec of a container, and the claim that makes a slot it.
func (r *Runtime) describe(ctx context.Context, c runtime.Container, img *image) (p *pod, spec *specs.Spec, request *claim.Claim, err error) {
	if p, spec, err = r.buildSpec(ctx, c, img); err == nil {
		request, err = r.specs.claim(spec)
	}
	return p, spec, request, err
}

// rootfs creates the snapshot and the record. If a record of this id exists, the error is AlreadyExists, and the snapshot,
// which then belongs to that container, is left alone.
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
		return nil // the record's error takes precedence
	})
	g.Go(func() error {
		ctx, span := obs.Tracer().Start(ctx, "container")
		defer span.End()
		if _, err := r.client.ContainerService().Create(ctx, record); err != nil {
			return classify(err, "creating container %s", record.ID)
		}
		return nil
	})
	// reached is called from this goroutine, in the order of the stages.
	if <-prepared; prepareErr == nil {
		reached(runtime.StageSnapshot)
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	if prepareErr != nil {
		return nil, prepareErr
	}
	// In whatever order the answers came, a garbage collection may have run after the snapshot was created and before the
	// record was. From here on the record holds the snapshot.
	_, err := r.client.SnapshotService(record.Snapshotter).Stat(ctx, record.SnapshotKey)
	if errdefs.IsNotFound(err) {
		mounts, err = r.prepare(ctx, record.SnapshotKey, img)
	}
	if err != nil {
		return nil, classify(err, "checking snapshot %s", record.SnapshotKey)
	}
	reached(runtime.StageContainer)
	return mounts, nil
}

// errLeftBehind means that the snapshot exists already.
var errLeftBehind = errors.New("it was left behind by another create")

// prepare creates the snapshot. If the image's layers were removed since they were found, it unpacks them again.
func (r *imageStore) prepare(ctx context.Context, key string, img *image) ([]mount.Mount, error) {
	snapshotter := r.client.SnapshotService(r.config.Snapshotter)
	// The janitor removes a snapshot that has no container at once if its agent is gone; without the label, after a grace period.
	owner := snapshots.WithLabels(map[string]string{identity.KeyAgentUID: r.config.PodUID})
	mounts, err := snapshotter.Prepare(ctx, key, img.chain, owner)
	if errdefs.IsNotFound(err) {
		if err := r.unpack(ctx, img); err != nil {
			return nil, err
		}
		mounts, err = snapshotter.Prepare(ctx, key, img.chain, owner)
	}
	if errdefs.IsAlreadyExists(err) {
		// The class is dropped: only an existing record means an existing container.
		return nil, fmt.Errorf("preparing snapshot %s: %w: %s", key, errLeftBehind, err.Error())
	}
	if err != nil && strings.Contains(err.Error(), "failed to rename") && strings.Contains(err.Error(), "file exists") {
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "a containerd that was killed has left a directory where "+
			"the next snapshot is to be; it removes that when any snapshot is deleted: delete a container or an image that nothing uses on the node")
	}
	if err != nil {
		return nil, classify(err, "preparing snapshot %s", key)
	}
	return mounts, nil
}
