package task

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/output"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
)

// launch starts sandbox-init in the namespaces and the cgroup of a container, and has it execute a process. After an error nothing is left.
func (s *Service) launch(ctx context.Context, c *container, e *execution) (err error) {
	// A container is not paused, and its cgroup not removed, while a process enters it.
	c.entering.RLock()
	defer c.entering.RUnlock()
	if c.init.Ended() {
		return fmt.Errorf("the container has ended: %w", errdefs.ErrFailedPrecondition)
	}
	if _, err := c.executable(); err != nil {
		return err
	}
	streams, err := open(e)
	defer func() {
		if err != nil && streams != nil {
			streams.Close()
		}
	}()
	if err != nil {
		return err
	}
	p, conn, err := s.join(ctx, c, streams)
	if err != nil {
		return err
	}
	defer conn.Close()
	master, err := instruct(ctx, conn, e.request)
	if err != nil {
		_ = p.Signal(unix.SIGKILL)
		<-p.Done()
		p.Close()
		return err
	}
	if e.terminal {
		streams.Attach(master)
	} else {
		streams.Started()
	}
	e.started(p, streams)
	return nil
}

func open(e *execution) (*output.Streams, error) {
	if e.terminal {
		return output.OpenTerminal(e.stdin, e.stdout)
	}
	return output.Open(e.stdin, e.stdout, e.stderr)
}

// join starts sandbox-init. It waits at the other end of conn for what to do.
func (s *Service) join(ctx context.Context, c *container, streams *output.Streams) (_ *process.Process, conn *net.UnixConn, err error) {
	if err := streams.Chown(int(c.plan.FirstID)); err != nil {
		return nil, nil, err
	}
	local, remote, err := process.Socketpair()
	if err != nil {
		return nil, nil, err
	}
	defer remote.Close()
	generic, err := net.FileConn(local)
	_ = local.Close()
	if err != nil {
		return nil, nil, err
	}
	conn = generic.(*net.UnixConn) //nolint:forcetypeassert // the socket is one
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	program, err := program(c.plan.Root)
	if err != nil {
		return nil, nil, err
	}
	defer program.Close()
	entrance, err := s.cgroups.Entrance(c.plan.Cgroup)
	if err != nil {
		return nil, nil, err
	}
	defer entrance.Close()
	p, err := s.starter.Join(ctx, &process.Join{
		Target: c.init, Program: program, Args: []string{layout.InitPath}, Env: claim.Environment(), Streams: streams.Files, Control: remote,
		Cgroup: entrance,
	})
	if errors.Is(err, os.ErrProcessDone) {
		err = fmt.Errorf("the container has ended: %w", errors.Join(err, errdefs.ErrFailedPrecondition))
	}
	return p, conn, err
}

// program opens sandbox-init in a mount of its own, which is read-only and attached nowhere: a process of the container can reach the file
// while it executes, but never write to it.
func program(root string) (*os.File, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, &os.PathError{Op: "mounting", Path: root, Err: err}
	}
	defer func() { _ = unix.Close(tree) }()
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return nil, &os.PathError{Op: "mounting", Path: root, Err: err}
	}
	return programIn(tree)
}

// programIn opens sandbox-init in a mount.
func programIn(tree int) (*os.File, error) {
	name := strings.TrimPrefix(layout.InitPath, "/")
	fd, err := unix.Openat(tree, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "opening", Path: layout.InitPath, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// instruct tells sandbox-init what to execute, and waits until it has. It returns the master of the terminal, if there is to be one.
func instruct(ctx context.Context, conn *net.UnixConn, request *wire.Exec) (master *os.File, err error) {
	payload, err := wire.EncodeExec(request)
	if err != nil {
		return nil, err
	}
	stop, err := bounded(ctx, conn)
	if err != nil {
		return nil, err
	}
	defer stop()
	defer func() {
		if err != nil && master != nil {
			_ = master.Close()
		}
		if err != nil && ctx.Err() != nil {
			err = ctx.Err()
		}
	}()
	_, writeErr := conn.Write(wire.Frame(wire.TypeExec, payload)) // if init has failed, the reason follows
	master, err = awaitReady(conn)
	switch {
	case errors.Is(err, io.EOF):
		return master, fmt.Errorf("sandbox-init has ended while it joined the container: %w", errors.Join(writeErr, io.ErrUnexpectedEOF))
	case err != nil:
		return master, err
	case (master != nil) != (request.Terminal != nil):
		return master, fmt.Errorf("sandbox-init has made no terminal, or one too many: %w", errdefs.ErrInternal)
	}
	kind, answer, err := claim.ReadFrame(conn)
	if errors.Is(err, io.EOF) {
		return master, nil // the socket is closed on exec
	}
	if err == nil {
		err = failureOf(kind, answer)
	}
	return master, err
}

// bounded ends the I/O of a connection with ctx, or after some time, until stop is called.
func bounded(ctx context.Context, conn interface{ SetDeadline(t time.Time) error }) (stop func() bool, err error) {
	deadline := time.Now().Add(setupTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	return context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }), nil
}

// awaitReady reads the answer to a request, with a descriptor if one comes with it. io.EOF: there is no answer.
func awaitReady(conn *net.UnixConn) (*os.File, error) {
	kind, answer, file, err := claim.ReadFrameAndFile(conn)
	if err == nil && kind != wire.TypeReady {
		err = failureOf(kind, answer)
	}
	return file, err
}

// failureOf returns the error in an answer that is not ready.
func failureOf(kind wire.Type, answer string) error {
	if kind != wire.TypeFailure {
		return fmt.Errorf("unexpected message of type %d from sandbox-init: %w", kind, errdefs.ErrInternal)
	}
	failure, err := wire.DecodeFailure(answer)
	if err != nil {
		return err
	}
	return failure
}
