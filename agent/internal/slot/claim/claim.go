// Package claim is the agent's end of a slot's socket: it sends a claim to the sandbox-init that waits in a started slot, and
// returns whether the command runs or why it does not. Package wire has the protocol. A Conn is for one goroutine at a time;
// Close may be called by any. The package starts no goroutine that outlives a call, and never closes a file descriptor of its
// caller.
package claim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
)

type (
	// Claim is what is sent; see the wire package for this and all below.
	Claim = wire.Claim
	// Capabilities are the capability sets of a claim.
	Capabilities = wire.Capabilities
	// Rlimit is a resource limit of a claim.
	Rlimit = wire.Rlimit
	// Mount is a mount of a claim.
	Mount = wire.Mount
	// Failure is the error of a claim that a slot could not carry out.
	Failure = wire.Failure //nolint:errname // as in the wire package
	// Stage is the part of a claim that failed.
	Stage = wire.Stage
)

// Attributes of a Mount.
const (
	MountReadOnly = wire.ReadOnly
	MountNoSUID   = wire.NoSUID
	MountNoDev    = wire.NoDev
	MountNoExec   = wire.NoExec
)

// SocketName is the socket's name in the directory that the slot has at /fsb.
const SocketName = "claim.sock"

const maxAddress = 107 // of a unix socket

// retries is the policy of Await.
var retries = backoff.Policy{Initial: time.Millisecond, Max: 20 * time.Millisecond}

// Environment returns the environment to start a slot's sandbox-init with: it keeps the Go runtime small while it waits. The
// claim replaces it.
func Environment() []string { return []string{"GOGC=off", "GOMAXPROCS=1", "GODEBUG=disablethp=1"} }

// Conn is a connection to one slot's init.
type Conn struct {
	conn    *net.UnixConn
	version uint32
	users   *os.File
}

// Connect connects to a slot that waits, and reads its hello. A slot takes one connection in its life: the second attempt
// finds no socket. The error is errdefs.ErrNotFound if there is no socket, or no process that listens at it.
func Connect(ctx context.Context, path string) (*Conn, error) {
	conn, err := Dial(ctx, path)
	if err != nil {
		if missing(err) {
			err = errors.Join(err, errdefs.ErrNotFound)
		}
		return nil, fmt.Errorf("connecting to a slot: %w", err)
	}
	c := &Conn{conn: conn}
	if err := c.hello(ctx); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("reading the hello of a slot: %w", err)
	}
	return c, nil
}

// Await is Connect for a slot that was just started: it retries, until ctx ends, while there is no socket.
func Await(ctx context.Context, path string) (*Conn, error) {
	var c *Conn
	err := backoff.Retry(ctx, clock.RealClock{}, retries, func(ctx context.Context) error {
		var err error
		c, err = Connect(ctx, path)
		if errdefs.IsNotFound(err) {
			return err
		}
		return backoff.Permanent(err)
	})
	return c, err
}

func missing(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED)
}

// Dial connects to a unix socket, whose path may be longer than an address.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	if len(path) > maxAddress {
		// An address is limited to 107 bytes, but may begin with the name of an open directory.
		dir, err := os.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer func() { _ = dir.Close() }()
		path = fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

func (c *Conn) hello(ctx context.Context) error {
	return c.during(ctx, func() error {
		kind, payload, users, err := ReadFrameAndFile(c.conn)
		c.users = users
		if err != nil {
			return err
		}
		if kind != wire.TypeHello {
			return unexpected(kind, payload)
		}
		c.version, err = wire.DecodeHello(payload)
		return err
	})
}

// Users returns the user namespace of the slot; nil if that is the host's. It belongs to the connection.
func (c *Conn) Users() *os.File { return c.users }

// Version returns the version of the protocol that the slot's init speaks. Version 1 understands all fields of Claim.
func (c *Conn) Version() uint32 { return c.version }

// Send sends the claim with a detached mount of the new root and those that the claim's mounts name by index. It returns when
// the root is built and nothing of the image has run yet; the caller then calls Go or Close. A *Failure says what the slot
// could not do. After any error the slot cannot be used again, and Close ends it. A claim that no slot would accept is
// refused without being sent.
func (c *Conn) Send(ctx context.Context, claim *Claim, root int, mounts ...int) error {
	if c.version < 1 {
		return fmt.Errorf("claiming a slot of version %d: %w", c.version, errdefs.ErrNotImplemented)
	}
	for _, m := range claim.Mounts {
		if m.Path == "" && int64(m.FD) >= int64(len(mounts)) {
			return fmt.Errorf("claiming a slot: mount %s is of descriptor %d, of %d: %w", m.Destination, m.FD, len(mounts), errdefs.ErrInvalidArgument)
		}
	}
	if len(mounts) > wire.MaxMounts {
		return fmt.Errorf("claiming a slot: %d mounts: %w", len(mounts), errdefs.ErrInvalidArgument)
	}
	payload, err := wire.EncodeClaim(claim)
	if err != nil {
		return err
	}
	header := wire.AppendHeader(nil, wire.TypeClaim, len(payload))
	rights := unix.UnixRights(append([]int{root}, mounts...)...)
	return c.during(ctx, func() error {
		_, _, err := c.conn.WriteMsgUnix(header, rights, nil)
		if err == nil {
			_, err = c.conn.Write(payload)
		}
		// An init that failed in between has sent the reason.
		kind, answer, readErr := c.read()
		switch {
		case readErr == nil && kind == wire.TypeReady:
			return err
		case readErr == nil:
			return unexpected(kind, answer)
		case err != nil:
			return gone(err)
		}
		return gone(readErr)
	})
}

// Go makes the slot confine itself and execute the command, and returns nil once that has happened: from then on the slot
// is the sandbox. A *Failure says why it has not; then, as after any other error, the slot is gone or about to end.
//
// A process that is killed between the two, for example by the kernel's out-of-memory killer, cannot be distinguished from a
// command that was executed and killed at once. The exit status shows both.
func (c *Conn) Go(ctx context.Context) error {
	return c.during(ctx, func() error {
		_, err := c.conn.Write(wire.Frame(wire.TypeGo, nil))
		kind, answer, readErr := c.read()
		switch {
		case readErr == nil:
			return unexpected(kind, answer)
		case err != nil:
			return gone(err)
		case errors.Is(readErr, io.EOF):
			return nil
		}
		return gone(readErr)
	})
}

// Close closes the connection. Before Go this ends the slot; after Go it has no effect on the sandbox.
func (c *Conn) Close() error {
	err := c.conn.Close()
	if c.users != nil {
		_ = c.users.Close()
	}
	return err
}

// during runs f and ends its I/O when ctx ends.
func (c *Conn) during(ctx context.Context, f func() error) error {
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := f()
	if ended := ctx.Err(); err != nil && ended != nil {
		return errors.Join(ended, err)
	}
	return err
}

func (c *Conn) read() (wire.Type, string, error) { return ReadFrame(c.conn) }

// ReadFrame reads a frame of sandbox-init. The error is io.EOF if there is none.
func ReadFrame(r io.Reader) (wire.Type, string, error) {
	var header [wire.HeaderSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, "", err
	}
	kind, n, err := wire.ParseHeader(header)
	if err != nil {
		return 0, "", err
	}
	payload := make([]byte, n)
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, "", errors.Join(io.ErrUnexpectedEOF, err)
	}
	return kind, string(payload), nil
}

// ReadFrameAndFile reads a frame of sandbox-init, and the descriptor that came with it; nil if none did. The caller closes that in any case.
func ReadFrameAndFile(conn *net.UnixConn) (wire.Type, string, *os.File, error) {
	r := withRights{conn: conn}
	kind, payload, err := ReadFrame(&r)
	return kind, payload, r.file, err
}

// withRights reads a connection, and keeps the first descriptor that comes with what it reads.
type withRights struct {
	conn *net.UnixConn
	file *os.File
}

// Read implements io.Reader.
func (r *withRights) Read(b []byte) (int, error) {
	rights := make([]byte, unix.CmsgSpace(4))
	n, length, flags, _, err := r.conn.ReadMsgUnix(b, rights)
	if err != nil {
		return n, err
	}
	if flags&unix.MSG_CTRUNC != 0 { // there was room for one; with what was read, the error would be ignored
		return 0, errors.Join(fmt.Errorf("receiving a descriptor: %w", syscall.EMFILE), closeRights(rights[:length]))
	}
	if n == 0 && len(b) > 0 {
		return 0, io.EOF
	}
	messages, err := unix.ParseSocketControlMessage(rights[:length])
	if err != nil {
		return n, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return n, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			if r.file != nil {
				_ = unix.Close(fd)
				continue
			}
			// Not blocking, so that closing a terminal ends what waits for its input.
			if err := unix.SetNonblock(fd, true); err != nil {
				return n, errors.Join(err, unix.Close(fd))
			}
			r.file = os.NewFile(uintptr(fd), "descriptor")
		}
	}
	return n, nil
}

// closeRights closes the descriptors of a message.
func closeRights(rights []byte) error {
	messages, err := unix.ParseSocketControlMessage(rights)
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	return err
}

// unexpected returns the error for a frame that is not the expected one. It is usually a failure.
func unexpected(kind wire.Type, payload string) error {
	if kind != wire.TypeFailure {
		return fmt.Errorf("unexpected message of type %d from a slot: %w", kind, errdefs.ErrFailedPrecondition)
	}
	f, err := wire.DecodeFailure(payload)
	if err != nil {
		return err
	}
	return f
}

func gone(err error) error {
	return fmt.Errorf("a slot's init is gone: %w", errors.Join(err, errdefs.ErrUnavailable))
}
