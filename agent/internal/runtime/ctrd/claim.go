package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Claim makes a slot the container c. The spec is the one that Create would have given to the OCI runtime, so that both
// ways end in the same confinement:
//
//	labels, record, spec, image -> containerd   \  concurrently; with both, and the limits in the slot's cgroup, the claim
//	root file system            -> slot's init  /  is durable, and only then does the slot start the process
func (r *Runtime) Claim(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) (err error) {
	held := r.slots.take(c.ID)
	if held == nil {
		return fmt.Errorf("claiming slot %s, which this process did not start: %w", c.ID, runtime.ErrSlotLost)
	}
	// Closing the connection ends the slot, unless the claim has succeeded.
	defer held.close()
	defer func() {
		if errors.Is(err, runtime.ErrSlotLost) && r.config.Handler.IsOwn() {
			r.shims.check(ctx, held.group) // so that a create does not join a shim that has ended
		}
	}()
	if held.first == 0 && r.users.on() {
		return fmt.Errorf("claiming slot %s, which was started before the node could make user namespaces: %w", c.ID, runtime.ErrSlotLost)
	}
	img, confirm, err := r.presumeImage(ctx, c.Image)
	if err != nil {
		return err
	}
	reached(runtime.StageImage)
	// As in Create, calls that were sent are waited for.
	sent, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	command, err := r.offer(ctx, sent, c, held, img, reached)
	if changed := confirm(); changed != nil && ctx.Err() == nil {
		return errors.Join(runtime.ErrSlotLost, changed, err) // the cold path finds out which image the name has now
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	_, span := obs.Tracer().Start(ctx, "go")
	defer span.End()
	err = held.conn.Go(sent)
	r.confinement.observe(err)
	return claimFault(err, c.ID, command)
}

// offer builds the claim of a container with an image, and hands it over. It returns the command that the slot is to execute.
func (r *Runtime) offer(ctx, sent context.Context, c runtime.Container, held *slot, img *image, reached func(runtime.Stage)) (command string, err error) {
	_, spec, request, err := r.describe(ctx, c, img)
	if err != nil {
		return "", err
	}
	mapUsers(spec, held.first)
	return request.Command(), r.handOver(sent, c, held, img, spec, request, reached)
}

// handOver makes the claim durable and passes it, with the root file system, to the slot.
func (r *Runtime) handOver(ctx context.Context, c runtime.Container, held *slot, img *image, spec *specs.Spec, request *claim.Claim, reached func(runtime.Stage)) error {
	var built error
	mounted, ready := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ready)
		built = r.slotRoot(ctx, held, c.ID, img)
		close(mounted)
		if built != nil {
			return
		}
		built = held.send(ctx, request)
	}()
	var g errgroup.Group
	g.Go(func() error { return r.recordClaim(ctx, c, held.group, img, spec) })
	g.Go(func() error {
		if err := r.limit(spec); err != nil {
			return errors.Join(runtime.ErrSlotLost, err)
		}
		if err := os.WriteFile(c.HostnamePath, []byte(c.Hostname+"\n"), 0o644); err != nil { //nolint:gosec // any user of the sandbox reads it
			return fmt.Errorf("writing the host name of container %s: %w", c.ID, err)
		}
		return nil
	})
	// reached is called from this goroutine, in the order of the stages.
	<-mounted
	if held.root != nil {
		reached(runtime.StageSnapshot)
	}
	recorded := g.Wait()
	if recorded == nil {
		reached(runtime.StageContainer)
	}
	<-ready
	if recorded != nil {
		return recorded
	}
	if err := claimFault(built, c.ID, request.Command()); err != nil {
		return err
	}
	reached(runtime.StageClaim)
	return nil
}

// slotRoot makes the slot hold its root file system, mounted but not attached anywhere.
func (r *Runtime) slotRoot(ctx context.Context, held *slot, id string, img *image) error {
	ctx, span := obs.Tracer().Start(ctx, "snapshot")
	defer span.End()
	if held.chain == img.chain {
		return nil
	}
	other := held.chain != ""
	held.setRoot("", nil)
	mounts, err := r.replaceSnapshot(ctx, id, img, other)
	if err != nil {
		return err
	}
	return held.mount(img.chain, mounts)
}

// replaceSnapshot prepares the snapshot of a slot that is, as far as is known, not warm, or warm for another image.
func (r *imageStore) replaceSnapshot(ctx context.Context, id string, img *image, other bool) ([]mount.Mount, error) {
	if !other {
		if mounts, err := r.prepare(ctx, id, img); !errors.Is(err, errLeftBehind) {
			return mounts, err
		}
	}
	if err := r.client.SnapshotService(r.config.Snapshotter).Remove(ctx, id); err != nil && !errdefs.IsNotFound(err) {
		return nil, classify(err, "removing the snapshot that slot %s was warm with", id)
	}
	return r.prepare(ctx, id, img)
}

// recordClaim turns the slot's record into that of c, in one write.
func (r *Runtime) recordClaim(ctx context.Context, c runtime.Container, group string, img *image, spec *specs.Spec) error {
	ctx, span := obs.Tracer().Start(ctx, "container")
	defer span.End()
	spec.Annotations = map[string]string{shared.GroupAnnotation: group} // it stays in its shim
	if r.config.Handler.IsOwn() {
		if err := r.annotate(spec, group, ""); err != nil {
			return err
		}
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encoding the OCI spec of container %s: %w", c.ID, err)
	}
	_, err = r.client.ContainerService().Update(ctx, containers.Container{
		ID: c.ID, Labels: c.Labels, Image: img.name,
		Spec:       &anypb.Any{TypeUrl: specType, Value: raw},
		Extensions: map[string]typeurl.Any{shared.RecordKey: c.Record},
	}, "labels", "image", "spec", "extensions")
	if errdefs.IsNotFound(err) {
		return errors.Join(runtime.ErrSlotLost, err)
	}
	return classify(err, "recording the claim of slot %s", c.ID)
}

// claimFault classifies the error of a claim as the cold path would, if the request is at fault. Any other error means that
// the slot is lost, and the cold path finds out whether anything else is wrong.
func claimFault(err error, id, command string) error {
	if err == nil {
		return nil
	}
	err = claim.Fault(err, command)
	if fault.ReasonOf(err) != "" || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("claiming slot %s: %w", id, errors.Join(runtime.ErrSlotLost, err))
}

// attributes translates mount options for the kernel. All mounts of a slot are private already.
func attributes(options []string) uint64 {
	known := map[string]uint64{
		"ro": claim.MountReadOnly, "nosuid": claim.MountNoSUID, "nodev": claim.MountNoDev, "noexec": claim.MountNoExec,
	}
	var set uint64
	for _, o := range options {
		set |= known[o]
	}
	return set
}
