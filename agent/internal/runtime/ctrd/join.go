package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// joinTimeout bounds the start of a supervisor in a container that runs.
	joinTimeout = 15 * time.Second
	// abandonTimeout bounds the removal of one that could not be started.
	abandonTimeout = 3 * time.Second
	// supervisorExec names the supervisor among the further processes of a container. There is one at a time, whichever agent has started it.
	supervisorExec = "fsb-supervisor"
	// doorDir is the directory, in a container's private one, that the container has at layout.DoorDir.
	doorDir = "door"

	processType = "types.containerd.io/opencontainers/runtime-spec/1/Process"
)

// Supervisor returns the supervisor of a container: that which has been pid 1 since its claim was complete, in a shim of ours, and otherwise the one
// that the first call starts.
func (r *Runtime) Supervisor(id string) inside.Sandbox {
	return inside.Sandbox{Socket: filepath.Join(r.config.LogRoot, id, shared.ClaimedDir, claim.SocketName), Container: joined{r, id}}
}

// joined is inside.Container for one container.
type joined struct {
	r  *Runtime
	id string
}

// Paused implements inside.Container.
func (j joined) Paused(ctx context.Context) bool {
	resp, err := j.r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: j.id})
	return err == nil && isPaused(resp.GetProcess().GetStatus())
}

func isPaused(s task.Status) bool { return s == task.Status_PAUSED || s == task.Status_PAUSING }

// SignalMain implements inside.Container: the kernel discards what pid 1 does not handle, if it comes from within.
func (j joined) SignalMain(ctx context.Context, r *wire.Request) (handled bool, err error) {
	switch {
	case j.r.config.Handler.IsOwn():
		return false, nil
	case r.Group:
		return true, fault.New(errdefs.ErrFailedPrecondition, fault.CallUnsupported,
			"the process group of the sandbox's own process cannot be signaled with its runtime handler; signal the process").With("handler", j.r.config.Handler.Name)
	case r.Signal == 0:
		return true, nil // the caller has seen that it runs
	}
	return true, j.r.Signal(ctx, j.id, syscall.Signal(r.Signal), false)
}

// Join implements inside.Container.
func (j joined) Join(ctx context.Context) error {
	h := j.r.config.Handler
	switch {
	case h.IsOwn():
		return fmt.Errorf("container %s has no supervisor: %w", j.id, errdefs.ErrNotFound)
	case !h.IsRunc():
		return unsupported(h, "the runtime handler of the sandbox does not permit calls into it")
	}
	done := j.r.joins.DoChan(j.id, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), joinTimeout)
		defer cancel()
		return nil, j.join(ctx)
	})
	select {
	case <-ctx.Done():
		return ctx.Err()
	case result := <-done:
		return result.Err
	}
}

func unsupported(h shared.Handler, why string) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.CallUnsupported, "%s", why).With("handler", h.Name)
}

func (j joined) join(ctx context.Context) error {
	private := filepath.Join(j.r.config.LogRoot, j.id, shared.ClaimedDir)
	socket := filepath.Join(private, claim.SocketName)
	if conn, err := claim.Dial(ctx, socket); err == nil {
		return conn.Close() // another call has started it
	}
	process, request, err := j.describe(ctx)
	if err != nil {
		return err
	}
	_, statErr := os.Lstat(socket)
	again := statErr == nil
	if err := j.clear(ctx); err != nil {
		return err
	}
	door, err := listenIn(filepath.Join(private, doorDir), layout.DoorSocket)
	if err != nil {
		return err
	}
	defer door.Close()
	err = j.admit(ctx, process, door, private, &wire.Join{Claim: request, Again: again})
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonTimeout)
	defer cancel()
	if why := j.callable(ctx); fault.ReasonOf(why) != "" { // it has ended, or was paused, meanwhile
		err = why
	}
	if !again {
		_ = os.Remove(socket) // nothing was lost
	}
	_ = j.clear(ctx) // the next call does, if this cannot
	return err
}

// admit starts the supervisor and hands over to it.
func (j joined) admit(ctx context.Context, process *specs.Process, door *net.UnixListener, private string, request *wire.Join) error {
	conn, err := j.start(ctx, process, door)
	if err != nil {
		return err
	}
	defer conn.Close()
	return handOver(ctx, conn, private, request)
}

// callable returns why no process of the container can answer a call.
func (j joined) callable(ctx context.Context) error {
	resp, err := j.r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: j.id})
	err = errgrpc.ToNative(err)
	switch status := resp.GetProcess().GetStatus(); {
	case errdefs.IsNotFound(err), err == nil && status == task.Status_STOPPED:
		return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the process of the sandbox has ended")
	case err == nil && isPaused(status):
		return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxPaused, "the sandbox is paused")
	}
	return classify(err, "looking at container %s", j.id)
}

// describe returns the process that becomes the supervisor, and the container's own one.
func (j joined) describe(ctx context.Context) (*specs.Process, *wire.Claim, error) {
	if err := j.callable(ctx); err != nil {
		return nil, nil, err
	}
	record, err := j.r.client.ContainerService().Get(ctx, j.id)
	if err != nil {
		return nil, nil, classify(err, "reading container %s", j.id)
	}
	spec := &specs.Spec{}
	if err := json.Unmarshal(record.Spec.GetValue(), spec); err != nil {
		return nil, nil, fmt.Errorf("reading the OCI spec of container %s: %w", j.id, err)
	}
	if spec.Process == nil || !slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == layout.DoorDir }) {
		return nil, nil, unsupported(j.r.config.Handler, "the sandbox was made by an agent that did not prepare it for calls, because of its version or its --slot-root")
	}
	request, err := claim.FromSpec(spec)
	if err != nil {
		return nil, nil, err
	}
	request.Hostname = ""
	request.Seccomp, err = j.r.specs.filter()
	return supervisorOf(spec.Process), request, err
}

// supervisorOf returns the process that is confined as the container's own one, and root of the container: it starts processes of any user.
func supervisorOf(own *specs.Process) *specs.Process {
	p := *own
	p.Terminal, p.ConsoleSize, p.User = false, nil, specs.User{}
	p.Args, p.Cwd = []string{layout.ProgramsDir + layout.InitPath}, "/"
	p.Env = append(claim.Environment(), layout.DoorVariable+"="+layout.Door())
	if own.Capabilities != nil {
		all := own.Capabilities.Bounding
		p.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
	}
	return &p
}

// clear removes what is left of a supervisor, and ends it if it runs.
func (j joined) clear(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	service := j.r.client.TaskService()
	remove := func() error {
		_, err := service.DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: j.id, ExecID: supervisorExec})
		return errgrpc.ToNative(err)
	}
	err := remove()
	if err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	if _, killErr := service.Kill(ctx, &tasks.KillRequest{ContainerID: j.id, ExecID: supervisorExec, Signal: uint32(syscall.SIGKILL)}); killErr == nil {
		_, _ = service.Wait(ctx, &tasks.WaitRequest{ContainerID: j.id, ExecID: supervisorExec})
	}
	if err = remove(); err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	return classify(err, "removing the supervisor of container %s", j.id)
}

// start has the OCI runtime execute the supervisor, and waits until it comes through the door.
func (j joined) start(ctx context.Context, process *specs.Process, door *net.UnixListener) (*net.UnixConn, error) {
	raw, err := json.Marshal(process)
	if err != nil {
		return nil, fmt.Errorf("encoding the supervisor of container %s: %w", j.id, err)
	}
	service := j.r.client.TaskService()
	if _, err := service.Exec(ctx, &tasks.ExecProcessRequest{ContainerID: j.id, ExecID: supervisorExec, Spec: &anypb.Any{TypeUrl: processType, Value: raw}}); err != nil {
		return nil, classify(errgrpc.ToNative(err), "adding a supervisor to container %s", j.id)
	}
	started, err := service.Start(ctx, &tasks.StartRequest{ContainerID: j.id, ExecID: supervisorExec})
	if err != nil {
		return nil, j.notStarted(errgrpc.ToNative(err))
	}
	awaiting, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // it may end before it comes
		_, _ = service.Wait(awaiting, &tasks.WaitRequest{ContainerID: j.id, ExecID: supervisorExec})
		_ = door.SetDeadline(time.Unix(1, 0))
	}()
	for {
		conn, err := door.AcceptUnix()
		if err != nil {
			return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.SandboxUnresponsive, "the supervisor of the sandbox has not started")
		}
		if isProcess(conn, started.GetPid()) {
			return conn, nil
		}
		_ = conn.Close()
	}
}

// notStarted classifies the error of the OCI runtime.
func (j joined) notStarted(err error) error {
	if containsAny(err.Error(), "resource temporarily unavailable", "pids limit") {
		return fault.Wrap(err, errdefs.ErrResourceExhausted, fault.SandboxLimitExceeded, "the sandbox has reached its limit of processes").With("limit", "processes")
	}
	return classify(err, "starting a supervisor in container %s", j.id)
}

// isProcess reports whether the other side of a connection is a process. One that cannot be seen from here is root of its container at least.
func isProcess(conn *net.UnixConn, pid uint32) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil || peerErr != nil {
		return false
	}
	return peer.Uid == 0 && (peer.Pid == 0 || uint32(peer.Pid) == pid)
}

// handOver sends the supervisor what it needs, with the socket that agents will connect to, and waits until it listens there.
func handOver(ctx context.Context, conn *net.UnixConn, private string, request *wire.Join) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	payload, err := wire.EncodeJoin(request)
	if err != nil {
		return err
	}
	listener, err := listenIn(private, claim.SocketName)
	if err != nil {
		return err
	}
	defer listener.Close()
	file, err := listener.File()
	if err != nil {
		return fmt.Errorf("making the socket of a supervisor: %w", err)
	}
	defer file.Close()
	if err := expect(conn, wire.TypeHello); err != nil {
		return err
	}
	if _, _, err := conn.WriteMsgUnix(wire.AppendHeader(nil, wire.TypeJoin, len(payload)), unix.UnixRights(int(file.Fd())), nil); err != nil {
		return fmt.Errorf("sending to a supervisor: %w", err)
	}
	if _, err := conn.Write(payload); err != nil {
		return fmt.Errorf("sending to a supervisor: %w", err)
	}
	return expect(conn, wire.TypeReady)
}

// expect reads a message. A *wire.Failure is the error.
func expect(conn *net.UnixConn, want wire.Type) error {
	kind, payload, err := claim.ReadFrame(conn)
	switch {
	case err != nil:
		return fmt.Errorf("reading from a supervisor: %w: %v", errdefs.ErrUnavailable, err) //nolint:errorlint // it is none of ours
	case kind == wire.TypeFailure:
		failure, err := wire.DecodeFailure(payload)
		if err != nil {
			return err
		}
		return failure
	case kind != want:
		return fmt.Errorf("unexpected message of type %d from a supervisor: %w", kind, errdefs.ErrInternal)
	}
	return nil
}

// listenIn listens at a socket in a directory, in place of what is there. Only root may connect to it. It stays when the listener is closed.
func listenIn(dir, name string) (*net.UnixListener, error) {
	fail := func(err error) (*net.UnixListener, error) {
		return nil, fmt.Errorf("making the socket of a supervisor: %w", err)
	}
	opened, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	defer opened.Close()
	if err := ignoreMissing(os.Remove(filepath.Join(dir, name))); err != nil {
		return fail(err)
	}
	// The path may be longer than an address.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", opened.Fd(), name), Net: "unix"})
	if err != nil {
		return fail(err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(filepath.Join(dir, name), 0o600); err != nil {
		_ = l.Close()
		return fail(err)
	}
	return l, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// joinMounts returns the mounts that a supervisor needs to join the container later. private is the container's private directory on the host.
func (b *specBuilder) joinMounts(private string) []specs.Mount {
	programs := b.programs()
	if programs == "" {
		return nil
	}
	bind := func(destination, source string, more ...string) specs.Mount {
		return specs.Mount{Destination: destination, Type: "bind", Source: source, Options: append([]string{"bind", "rprivate", "ro", "nosuid", "nodev"}, more...)}
	}
	return []specs.Mount{bind(layout.ProgramsDir, programs), bind(layout.DoorDir, filepath.Join(private, doorDir), "noexec")}
}

func isJoinMount(m specs.Mount) bool {
	return strings.HasPrefix(m.Destination, filepath.Dir(layout.DoorDir)+"/")
}

// programsOf returns a function that returns the path of the programs of supervisors on the host; empty if containers cannot have them.
func programsOf(cfg Config, roots *slotRoots) func() string {
	return func() string {
		if !cfg.Handler.IsRunc() || cfg.SlotRoot == "" || cfg.SandboxInit == "" {
			return ""
		}
		dir, err := roots.get()
		if err != nil {
			return "" // as for slots, which say so
		}
		return dir
	}
}

// makeDoor makes the directory through which a supervisor joins a container.
func (b *specBuilder) makeDoor(private string) error {
	if b.programs() == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Join(private, doorDir), 0o700); err != nil {
		return fmt.Errorf("making the private directory of a container: %w", err)
	}
	return nil
}
