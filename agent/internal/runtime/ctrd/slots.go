package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// claimDir is a slot's private directory beside its log. It exists until the slot's claim is complete, and so it is also
// the evidence that the claim is not.
const claimDir = shared.ClaimDir

const warmTimeout = 10 * time.Second

// slots holds the slots that this process has started. A slot's init waits at the other end of its connection, and ends
// when this process does.
type slots struct {
	mu   sync.Mutex
	held map[string]*slot
}

type slot struct {
	conn  *claim.Conn
	group string
	first uint32 // id of its user namespace; zero for none

	mu    sync.Mutex // held over the I/O of warming, which a claim of the slot waits for
	taken bool
	// chain names the layers that the slot is warm for; empty if it is not warm. root is their mount, not attached anywhere.
	// The caller that has taken the slot needs no lock.
	chain string
	root  *os.File
}

// close releases the connection and the root. A slot that was not claimed ends.
func (s *slot) close() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
	s.setRoot("", nil)
}

// setRoot replaces the root that the slot holds.
func (s *slot) setRoot(chain string, root *os.File) {
	if s.root != nil {
		_ = s.root.Close() // nothing was written
	}
	s.chain, s.root = chain, root
}

// take removes a slot for the caller to claim or end; nil if there is none.
func (s *slots) take(id string) *slot {
	s.mu.Lock()
	held := s.held[id]
	delete(s.held, id)
	s.mu.Unlock()
	if held != nil {
		held.mu.Lock()
		defer held.mu.Unlock()
		held.taken = true
	}
	return held
}

func (s *slots) put(id string, held *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[id] = held
}

// end ends a slot that is not claimed.
func (s *slots) end(id string) {
	if held := s.take(id); held != nil {
		held.close()
	}
}

func (s *slots) endAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, held := range s.held {
		_ = held.conn.Close()
		delete(s.held, id)
	}
}

// Unsupported tries what a claim needs of the kernel and of the agent's privileges, on an empty overlay.
func (r *Runtime) Unsupported(context.Context) error {
	refuse := func(err error, format string, args ...any) error {
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable, format, args...)
	}
	switch {
	case r.config.SlotRoot == "":
		return refuse(nil, "slots are switched off on this agent")
	case !r.config.Handler.IsRunc() && !r.config.Handler.IsOwn():
		return refuse(nil, "slots need an OCI runtime that shares the host's kernel, %s does not", r.config.Handler.Name)
	}
	if err := claim.Supported(); err != nil {
		return refuse(err, "slots need Linux 5.12 and the privilege to mount: %s", err.Error())
	}
	if _, err := r.slotRoots.get(); err != nil {
		return refuse(err, "slots need a directory on the host that the agent can write to: %s", err.Error())
	}
	if err := r.slotRoots.tryMount(); err != nil {
		return refuse(err, "slots need to mount an overlay detached: %s", err.Error())
	}
	return nil
}

// StartSlot starts a container whose first process is sandbox-init, and connects to it. Its record names the snapshot that
// a claim will create, so that the collector never removes it.
func (r *Runtime) StartSlot(ctx context.Context, s runtime.Slot) error {
	pod, err := r.pods.find(ctx)
	if err != nil {
		return err
	}
	rootfs, err := r.slotRoots.get()
	if err != nil {
		return err
	}
	dir := filepath.Join(filepath.Dir(s.LogPath), claimDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("starting slot %s: %w", s.ID, err)
	}
	if err := r.specs.makeDoor(dir); err != nil {
		return err
	}
	first, err := r.users.take(s.ID)
	if err != nil {
		return err
	}
	record, err := r.slotRecord(ctx, &s, pod, rootfs, dir, first)
	if err != nil {
		r.users.release(first, s.ID)
		return err
	}
	// As in Create, calls that were sent are waited for.
	held, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	if _, err := r.client.ContainerService().Create(held, record); err != nil {
		return classify(err, "creating slot %s", s.ID)
	}
	var options *anypb.Any
	if record.Runtime.Options != nil {
		options = &anypb.Any{TypeUrl: record.Runtime.Options.GetTypeUrl(), Value: record.Runtime.Options.GetValue()}
	}
	started := &slot{group: s.Group, first: first}
	if err = r.startInit(held, &s, options); err == nil {
		err = r.connect(ctx, started, s.ID, filepath.Join(dir, claim.SocketName), exists)
	}
	if err != nil {
		return r.shims.explain(ctx, s.Group, s.ID, err)
	}
	r.slots.put(s.ID, started)
	return nil
}

// startInit starts the sandbox-init of a slot. A shim of ours needs no Start for that.
func (r *Runtime) startInit(ctx context.Context, s *runtime.Slot, options *anypb.Any) error {
	if r.config.Handler.IsOwn() {
		return r.createMember(ctx, s.ID, s.Group, s.LogPath)
	}
	if err := r.createTask(ctx, s.ID, s.LogPath, nil, options, layout.InitPath); err != nil {
		return err
	}
	_, err := r.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: s.ID})
	return classify(errgrpc.ToNative(err), "starting slot %s", s.ID)
}

// connectDelay is how long sandbox-init usually takes at most until it listens.
const connectDelay = 200 * time.Millisecond

// exists is the task of a container that has one.
var exists = func() <-chan struct{} { //nolint:gochecknoglobals // constant
	c := make(chan struct{})
	close(c)
	return c
}()

// connect connects to the sandbox-init of a container, which was just started. If that takes long, it waits for the end of the task as well, from
// when there is one, which closes task: a process that has ended never listens.
func (r *Runtime) connect(ctx context.Context, s *slot, id, path string, task <-chan struct{}) error {
	awaiting, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		select {
		case <-awaiting.Done():
			return
		case <-task:
		}
		select {
		case <-awaiting.Done():
			return
		case <-r.clock.After(connectDelay):
		}
		if _, err := r.Wait(awaiting, id); err == nil || errdefs.IsNotFound(err) {
			cancel()
		}
	})
	err := s.connect(awaiting, path)
	if err != nil && ctx.Err() == nil && (awaiting.Err() != nil || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) {
		return endedEarly(err, id)
	}
	return classify(err, "connecting to container %s", id)
}

// connect connects to the slot's sandbox-init.
func (s *slot) connect(ctx context.Context, path string) error {
	conn, err := claim.Await(ctx, path)
	if err != nil {
		return err
	}
	if mapped := conn.Users() != nil; mapped != (s.first != 0) {
		_ = conn.Close()
		return fmt.Errorf("it has a user namespace: %t: %w", mapped, errdefs.ErrInternal)
	}
	s.conn = conn
	return nil
}

// mount makes the slot hold its root file system, mounted but not attached anywhere.
func (s *slot) mount(chain string, mounts []mount.Mount) error {
	var root *os.File
	var err error
	if s.first == 0 {
		root, err = detached(mounts)
	} else {
		root, err = mapped(mounts, s.conn.Users(), s.first)
	}
	if err != nil {
		return err
	}
	s.setRoot(chain, root)
	return nil
}

// send sends the claim, and waits until sandbox-init has all that it needs.
func (s *slot) send(ctx context.Context, request *claim.Claim) error {
	ctx, span := obs.Tracer().Start(ctx, "claim")
	defer span.End()
	return s.conn.Send(ctx, request, int(s.root.Fd()))
}

// slotRecord returns the record of a slot, whose group it has joined.
func (r *Runtime) slotRecord(ctx context.Context, s *runtime.Slot, p *pod, rootfs, dir string, first uint32) (containers.Container, error) {
	record := containers.Container{ID: s.ID, Labels: s.Labels, Snapshotter: r.config.Snapshotter, SnapshotKey: s.ID}
	var err error
	if r.config.Handler.IsOwn() {
		s.Group, _, err = r.shims.join(ctx, s.ID, p)
		record.SandboxID = s.Group
	} else {
		s.Group = r.groups.join(s.ID, s.Group)
	}
	if err != nil {
		return record, err
	}
	spec := r.specs.slot(*s, p, rootfs, dir)
	mapUsers(spec, first)
	if r.config.Handler.IsOwn() {
		if err := r.annotate(spec, s.Group, ""); err != nil {
			return record, err
		}
		record.Runtime.Name, err = r.slotRoots.memberPath()
	} else {
		record.Runtime.Name = r.config.Handler.Name
		var options *anypb.Any
		if options, err = r.config.Handler.Options(p.systemd(), p.shims); options != nil {
			record.Runtime.Options = options
		}
	}
	if err != nil {
		return record, err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return record, fmt.Errorf("encoding the OCI spec of slot %s: %w", s.ID, err)
	}
	record.Spec = &anypb.Any{TypeUrl: specType, Value: raw}
	return record, nil
}

// WarmSlot creates and mounts the root for a claim with the image. A slot is warmed once.
func (r *Runtime) WarmSlot(ctx context.Context, id, image string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), warmTimeout)
	defer cancel()
	name, err := runtime.NormalizeImage(image)
	if err != nil {
		return err
	}
	img, err := r.localImage(ctx, name)
	if err != nil {
		return err
	}
	r.slots.mu.Lock()
	held := r.slots.held[id]
	r.slots.mu.Unlock()
	if held == nil {
		return nil
	}
	held.mu.Lock()
	defer held.mu.Unlock()
	if held.taken || held.chain != "" {
		return nil
	}
	mounts, err := r.prepare(ctx, id, img)
	if err != nil {
		return err
	}
	if err := held.mount(img.chain, mounts); err != nil {
		return err
	}
	prepareMountpoints(held.root, int(held.first))
	return nil
}

// SlotClaimed removes the evidence that the claim is not complete.
func (r *Runtime) SlotClaimed(id string) error {
	dir := r.claimDir(id)
	err := os.Rename(dir, filepath.Join(filepath.Dir(dir), shared.ClaimedDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) { // it was complete before
		return fmt.Errorf("completing the claim of slot %s: %w", id, err)
	}
	return nil
}

func (r *Runtime) claimDir(id string) string { return filepath.Join(r.config.LogRoot, id, claimDir) }

// claiming reports whether a container has a claim that is not complete, or waits for its start.
func (r *Runtime) claiming(c containers.Container) bool {
	if c.Labels[identity.KeyState] == identity.StateSlot {
		return false
	}
	_, err := os.Stat(r.claimDir(c.ID))
	return err == nil
}
