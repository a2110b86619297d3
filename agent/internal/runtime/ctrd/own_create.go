package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// pendingStart is a container whose sandbox-init has its claim, and waits for Start.
type pendingStart struct {
	slot    *slot
	command string
}

// pendingStarts has them by container.
type pendingStarts struct {
	mu   sync.Mutex
	held map[string]*pendingStart
}

func (p *pendingStarts) put(id string, s *pendingStart) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[id] = s
}

func (p *pendingStarts) take(id string) *pendingStart {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.held[id]
	delete(p.held, id)
	return s
}

// end ends a container that was not started.
func (p *pendingStarts) end(id string) {
	if s := p.take(id); s != nil {
		s.slot.close()
	}
}

// annotate adds to a spec what a shim of ours needs to start sandbox-init for it.
func (r *Runtime) annotate(spec *specs.Spec, anchor, private string) error {
	rootfs, err := r.slotRoots.get()
	if err != nil {
		return err
	}
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[shared.GroupAnnotation] = anchor
	spec.Annotations[plan.RootAnnotation] = rootfs
	spec.Annotations[plan.PrivateAnnotation] = private
	return nil
}

// ownCreate is one create of a container whose shim is ours: the start of a slot and its claim, one after the other. Start tells sandbox-init to go;
// until it has, the claim is not complete.
//
//	record -> containerd  \  then  task -> containerd -> shim -> sandbox-init  \  then  claim -> sandbox-init   then, in Start,  go
//	image's name          /        snapshot, mount                              /
type ownCreate struct {
	*Runtime
	container runtime.Container
	reached   func(runtime.Stage)

	img     *image
	spec    *specs.Spec
	request *claim.Claim
	slot    *slot
}

func (r *Runtime) createOwn(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error {
	err := errImageChanged
	for errors.Is(err, errImageChanged) && ctx.Err() == nil {
		o := &ownCreate{Runtime: r, container: c, reached: reached, slot: &slot{taken: true}}
		if err = o.run(ctx); err == nil {
			r.pending.put(c.ID, &pendingStart{slot: o.slot, command: o.request.Command()})
		}
	}
	if errors.Is(err, errImageChanged) {
		return ctx.Err()
	}
	return err
}

// run creates the container with the image that its name is presumed to have. errImageChanged: the name has another one, which is known now, and
// nothing was made.
func (o *ownCreate) run(ctx context.Context) error {
	img, confirm, err := o.presumeImage(ctx, o.container.Image)
	if err != nil {
		return err
	}
	o.img = img
	o.reached(runtime.StageImage)
	p, spec, request, err := o.describe(ctx, o.container, img)
	if err != nil {
		if changed := confirm(); errors.Is(changed, errImageChanged) {
			return changed
		}
		return err
	}
	o.spec, o.request = spec, request
	// As in Create, calls that were sent are waited for.
	held, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	if err := o.record(held, p); err != nil {
		return err
	}
	if err = confirm(); errors.Is(err, errImageChanged) {
		if failed := o.unrecord(held); failed != nil {
			return failed
		}
		return err
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	if err := o.start(held); err != nil {
		o.slot.close()
		return o.shims.explain(held, o.slot.group, o.container.ID, err)
	}
	return nil
}

// record makes the container's record. After an error the range of users is free again, unless the record may exist.
func (o *ownCreate) record(ctx context.Context, p *pod) (err error) {
	id := o.container.ID
	if o.slot.first, err = o.users.take(id); err != nil {
		return err
	}
	mapUsers(o.spec, o.slot.first)
	record, added, err := o.describeRecord(ctx, p)
	if err != nil {
		o.users.release(o.slot.first, id)
		return err
	}
	o.slot.group = record.SandboxID
	ctx, span := obs.Tracer().Start(ctx, "container")
	defer span.End()
	_, err = o.client.ContainerService().Create(ctx, record)
	if errdefs.IsAlreadyExists(err) {
		o.users.release(o.slot.first, id)
		if added {
			o.shims.leave(id) // it is another agent's
		}
	}
	return classify(err, "creating container %s", id)
}

// unrecord removes the record again, before there is anything else of the container.
func (o *ownCreate) unrecord(ctx context.Context) error {
	if err := o.client.ContainerService().Delete(ctx, o.container.ID); err != nil {
		return classify(err, "removing the record of container %s", o.container.ID)
	}
	o.users.release(o.slot.first, o.container.ID)
	return nil
}

// describeRecord returns the record. added reports whether the container has joined its shim here.
func (o *ownCreate) describeRecord(ctx context.Context, p *pod) (record containers.Container, added bool, err error) {
	c := o.container
	binary, err := o.slotRoots.memberPath()
	if err != nil {
		return record, false, err
	}
	anchor, added, err := o.shims.join(ctx, c.ID, p)
	if err != nil {
		return record, false, err
	}
	// The first shim of this process has only now found out whether there is a profile.
	o.spec.Process.ApparmorProfile = o.confinement.profile()
	o.request.AppArmorProfile = o.spec.Process.ApparmorProfile
	if err := o.annotate(o.spec, anchor, o.claimDir(c.ID)); err != nil {
		return record, added, err
	}
	raw, err := json.Marshal(o.spec)
	if err != nil {
		return record, added, fmt.Errorf("encoding the OCI spec of container %s: %w", c.ID, err)
	}
	return containers.Container{
		ID: c.ID, Labels: c.Labels, Image: o.img.name, Snapshotter: o.config.Snapshotter, SnapshotKey: c.ID, SandboxID: anchor,
		Runtime: containers.RuntimeInfo{Name: binary}, Spec: &anypb.Any{TypeUrl: specType, Value: raw},
		Extensions: map[string]typeurl.Any{shared.RecordKey: c.Record},
	}, added, nil
}

// start starts sandbox-init for the record, and sends it the claim. The record protects all that is made. sandbox-init listens before containerd
// has finished its part of the task, which the claim does not wait for.
func (o *ownCreate) start(ctx context.Context) error {
	id := o.container.ID
	private := o.claimDir(id)
	if err := os.Mkdir(private, 0o700); err != nil {
		return fmt.Errorf("creating container %s: %w", id, err)
	}
	claiming, cancel := context.WithCancel(ctx)
	defer cancel()
	task, created := make(chan struct{}), make(chan error, 1)
	go func() {
		err := o.createMember(ctx, id, o.slot.group, o.container.LogPath)
		if err == nil {
			close(task)
		} else {
			cancel()
		}
		created <- err
	}()
	claimErr := o.claimInit(claiming, filepath.Join(private, claim.SocketName), task)
	if err := <-created; err != nil {
		return err
	}
	if claimErr == nil {
		o.reached(runtime.StageTask)
	}
	return claimErr
}

// claimInit makes the root file system while sandbox-init starts, and claims it. reached is called from the goroutine of Create, in the order of
// the stages.
func (o *ownCreate) claimInit(ctx context.Context, socket string, task <-chan struct{}) error {
	id := o.container.ID
	mounts, err := o.snapshot(ctx)
	if err != nil {
		return err
	}
	o.reached(runtime.StageSnapshot)
	o.reached(runtime.StageContainer)
	if err := o.connect(ctx, o.slot, id, socket, task); err != nil {
		return err
	}
	if err := o.slot.mount(o.img.chain, mounts); err != nil {
		return classify(err, "mounting the root of container %s", id)
	}
	return ownFault(o.slot.send(ctx, o.request), id, o.request.Command())
}

func (o *ownCreate) snapshot(ctx context.Context) ([]mount.Mount, error) {
	// Also when the task could not be created, a call that was sent is waited for.
	ctx, span := obs.Tracer().Start(context.WithoutCancel(ctx), "snapshot")
	defer span.End()
	return o.prepare(ctx, o.container.ID, o.img)
}

// ownFault classifies the error of a claim that no slot stands behind: there is no other way to try.
func ownFault(err error, id, command string) error {
	if err == nil {
		return nil
	}
	err = claim.Fault(err, command)
	switch {
	case fault.ReasonOf(err) != "":
		return err
	case errdefs.IsUnavailable(err):
		return endedEarly(err, id)
	}
	return classify(err, "starting container %s", id)
}

// endedEarly is the error of a container whose sandbox-init has ended before the command.
func endedEarly(err error, id string) error {
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "container %s ended before its command was executed; create it again", id)
}

// Start starts the task's process, or lets sandbox-init become it.
func (r *Runtime) Start(ctx context.Context, id string) (err error) {
	p := r.pending.take(id)
	if p == nil {
		return r.taskSet.Start(ctx, id)
	}
	defer p.slot.close()
	defer func() { err = r.shims.explain(ctx, p.slot.group, id, err) }()
	held, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	held, span := obs.Tracer().Start(held, "go")
	defer span.End()
	err = p.slot.conn.Go(held)
	r.confinement.observe(err)
	if err := ownFault(err, id, p.command); err != nil {
		return err
	}
	return r.SlotClaimed(id)
}

// HandlesSignal asks the process only if it is the first one: in a container of our shim, sandbox-init is.
func (r *Runtime) HandlesSignal(ctx context.Context, id string, sig syscall.Signal) bool {
	return r.config.Handler.IsOwn() || r.taskSet.HandlesSignal(ctx, id, sig)
}
