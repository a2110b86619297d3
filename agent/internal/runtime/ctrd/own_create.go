package ctrd

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
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

// createOwn creates a container whose shim is ours: the start of a slot and its claim, one after the other. The claim is sent here, and the
// process starts with Start.
func (r *Runtime) createOwn(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error {
	p, img, spec, err := r.prepareSpec(ctx, c, reached)
	if err != nil {
		return err
	}
	request, err := r.specs.claim(spec)
	if err != nil {
		return err
	}
	first, err := r.users.take(c.ID)
	if err != nil {
		return err
	}
	mapUsers(spec, first)
	record, added, err := r.ownRecord(ctx, c, p, img, spec, request)
	if err != nil {
		r.users.release(first, c.ID)
		return err
	}
	// As in Create, calls that were sent are waited for.
	held, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	mounts, err := r.rootfs(held, record, img, reached)
	if errdefs.IsAlreadyExists(err) {
		r.users.release(first, c.ID)
		if added {
			r.shims.leave(c.ID) // it is another agent's
		}
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	s := &slot{taken: true, group: record.SandboxID, first: first}
	if err := r.startClaimed(held, c, s, img.chain, mounts, request, reached); err != nil {
		s.close()
		return r.shims.explain(held, s.group, c.ID, err)
	}
	r.pending.put(c.ID, &pendingStart{slot: s, command: request.Args[0]})
	return nil
}

// ownRecord returns the record of a container whose shim is ours. added reports whether the container has joined its shim here.
func (r *Runtime) ownRecord(ctx context.Context, c runtime.Container, p *pod, img *image, spec *specs.Spec, request *claim.Claim) (record containers.Container, added bool, err error) {
	binary, err := r.shimBinary()
	if err != nil {
		return record, false, err
	}
	anchor, added, err := r.shims.join(ctx, c.ID, p)
	if err != nil {
		return record, false, err
	}
	// The first shim of this process has only now found out whether there is a profile.
	spec.Process.ApparmorProfile = r.confinement.profile()
	request.AppArmorProfile = spec.Process.ApparmorProfile
	if err := r.annotate(spec, anchor, r.claimDir(c.ID)); err != nil {
		return record, added, err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return record, added, fmt.Errorf("encoding the OCI spec of container %s: %w", c.ID, err)
	}
	return containers.Container{
		ID: c.ID, Labels: c.Labels, Image: img.name, Snapshotter: r.config.Snapshotter, SnapshotKey: c.ID, SandboxID: anchor,
		Runtime: containers.RuntimeInfo{Name: binary}, Spec: &anypb.Any{TypeUrl: specType, Value: raw},
		Extensions: map[string]typeurl.Any{shared.RecordKey: c.Record},
	}, added, nil
}

// startClaimed starts sandbox-init for the record of c, and sends it the claim. The caller closes the slot.
func (r *Runtime) startClaimed(ctx context.Context, c runtime.Container, s *slot, chain string, mounts []mount.Mount, request *claim.Claim, reached func(runtime.Stage)) error {
	private := r.claimDir(c.ID)
	if err := os.Mkdir(private, 0o700); err != nil {
		return fmt.Errorf("creating container %s: %w", c.ID, err)
	}
	if err := r.createTask(ctx, c.ID, c.LogPath, nil, nil, layout.InitPath); err != nil {
		return err
	}
	reached(runtime.StageTask)
	if err := r.connect(ctx, s, c.ID, filepath.Join(private, claim.SocketName)); err != nil {
		return err
	}
	if err := s.mount(chain, mounts); err != nil {
		return classify(err, "mounting the root of container %s", c.ID)
	}
	return ownFault(r.sendClaim(ctx, s, request), c.ID, request.Args[0])
}

func (r *Runtime) sendClaim(ctx context.Context, s *slot, request *claim.Claim) error {
	ctx, span := obs.Tracer().Start(ctx, "claim")
	defer span.End()
	return s.conn.Send(ctx, request, int(s.root.Fd()))
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
	held, span := obs.Tracer().Start(held, "start")
	defer span.End()
	if _, err := r.client.TaskService().Start(held, &tasks.StartRequest{ContainerID: id}); err != nil {
		return classify(errgrpc.ToNative(err), "starting container %s", id)
	}
	err = p.slot.conn.Go(held)
	r.confinement.observe(err)
	if err := ownFault(err, id, p.command); err != nil {
		return err
	}
	return r.SlotClaimed(id)
}
