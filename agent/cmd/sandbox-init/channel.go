package main

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

const (
	// keptFD is the connection's descriptor after all others are closed.
	keptFD = 3
	// shimFD is that of the socket to the shim, if a shim has started this process. The others follow if it is to supervise a sandbox: the socket
	// that agents connect to, those of its reaper, and the program of its helpers.
	shimFD     = keptFD + 1
	listenerFD = keptFD + 2
	endedFD    = keptFD + 3
	moreFD     = keptFD + 4
	helperFD   = keptFD + 5
	noShim     = -1
)

// errAbandoned means that the agent has closed the connection: no process is left to receive a failure.
var errAbandoned = &wire.Failure{Stage: wire.StageClaim, Detail: "abandoned"}

// channel is the connection to the agent, or to the shim.
type channel struct {
	fd int
	// shim is the socket to the shim, beside the connection to the agent; noShim if there is none.
	shim int
	// users is the user namespace of this process, for the hello to the agent; below zero if it is the host's.
	users int
}

// listen listens for agents.
func listen(path string) (int, error) {
	listener, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	unix.Umask(0o077)
	err = unix.Bind(listener, &unix.SockaddrUnix{Name: path})
	unix.Umask(0o022)
	if err == nil {
		err = unix.Listen(listener, backlog)
	}
	return listener, err
}

// move gives a descriptor another number.
func move(fd, to int) (int, error) {
	if fd == to {
		return fd, nil
	}
	err := unix.Dup3(fd, to, unix.O_CLOEXEC)
	_ = unix.Close(fd)
	return to, err
}

// backlog is how many calls may wait while a sandbox has no processor time.
const backlog = 128

// accept waits for the agent and refuses other processes: the agent is root, outside the slot.
// All calls here are blocking system calls that the Go runtime knows of, so that its other threads can sleep.
func accept(listener int, mapped bool) (int, error) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		case err != nil:
			return -1, err
		case !trusted(fd, mapped):
			_ = unix.Close(fd)
		default:
			return fd, nil
		}
	}
}

// overflowID is what the kernel reports for a user who has no id in this user namespace (/proc/sys/kernel/overflowuid, whose value is not
// changed in practice).
const overflowID = 65534

// trusted reports whether the peer is the host's root and not a process of this slot: the kernel reports pid 0 for a process outside the PID
// namespace. mapped: the host's root has no id here.
func trusted(fd int, mapped bool) bool {
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	root := uint32(0)
	if mapped {
		root = overflowID
	}
	return err == nil && peer.Uid == root && peer.Pid == 0
}

// claim sends hello and reads the claim. The file descriptors are the root's and those of the claim's mounts.
func (c *channel) claim() (*wire.Claim, []int, *wire.Failure) {
	if !c.hello() {
		return nil, nil, errAbandoned
	}
	rights := make([]byte, unix.CmsgSpace((wire.MaxMounts+1)*4))
	payload, rights, failure := c.read(wire.TypeClaim, rights)
	if failure != nil {
		return nil, nil, failure
	}
	claim, err := wire.DecodeClaim(payload)
	if err != nil {
		return nil, nil, err.(*wire.Failure) //nolint:errorlint // DecodeClaim returns nothing else
	}
	fds, err := descriptors(rights)
	if err != nil {
		return nil, nil, failed(wire.StageClaim, err, "(file descriptors)")
	}
	if len(fds) == 0 {
		return nil, nil, &wire.Failure{Stage: wire.StageClaim, Detail: "(no root file system)"}
	}
	return claim, fds, nil
}

// ready reports to the agent that the root is built, and waits for go. It returns false if that does not come.
func (c *channel) ready() bool {
	if !c.write(wire.TypeReady, nil) {
		return false
	}
	_, _, failure := c.read(wire.TypeGo, nil)
	return failure == nil
}

// fail reports to the agent why there will be no sandbox.
func (c *channel) fail(f *wire.Failure) { c.write(wire.TypeFailure, wire.EncodeFailure(f)) }

// hello sends the version of the protocol, with the user namespace if there is one: the agent shows the image's files as this one's.
func (c *channel) hello() bool {
	var rights []byte
	if c.users >= 0 {
		rights = unix.UnixRights(c.users)
		defer func() { _ = unix.Close(c.users) }()
	}
	return c.send(wire.Frame(wire.TypeHello, wire.EncodeHello(wire.Version)), rights)
}

func (c *channel) write(t wire.Type, payload []byte) bool { return c.send(wire.Frame(t, payload), nil) }

func (c *channel) send(b, rights []byte) bool {
	for len(b) > 0 {
		n, err := unix.SendmsgN(c.fd, b, rights, nil, unix.MSG_NOSIGNAL)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false
		}
		b, rights = b[n:], nil
	}
	return true
}

// read waits for the one frame that is expected now. space receives the rights that come with it.
func (c *channel) read(want wire.Type, space []byte) (string, []byte, *wire.Failure) {
	var header [wire.HeaderSize]byte
	var rights []byte
	for have := 0; have < len(header); {
		n, rightsLen, flags, _, err := unix.Recvmsg(c.fd, header[have:], space, unix.MSG_CMSG_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil || n == 0:
			return "", nil, errAbandoned
		case flags&unix.MSG_CTRUNC != 0:
			return "", nil, &wire.Failure{Stage: wire.StageClaim, Detail: "(file descriptors truncated)"}
		}
		if rightsLen > 0 {
			rights, space = space[:rightsLen], nil
		}
		have += n
	}
	got, size, err := wire.ParseHeader(header)
	if err != nil {
		return "", nil, err.(*wire.Failure) //nolint:errorlint // ParseHeader returns nothing else
	}
	if got != want {
		return "", nil, &wire.Failure{Stage: wire.StageClaim, Detail: "(unexpected message)"}
	}
	payload := make([]byte, size)
	for have := 0; have < size; {
		n, err := unix.Read(c.fd, payload[have:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return "", nil, errAbandoned
		}
		have += n
	}
	return string(payload), rights, nil
}

func descriptors(rights []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range messages {
		more, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return nil, err
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

// informShim tells the shim that the sandbox runs, and what every process of it is confined to. If it cannot, the shim executes no further
// process.
func (c *channel) informShim(claim *wire.Claim) {
	shim := &channel{fd: c.shim}
	if shim.write(wire.TypeConfinement, wire.EncodeConfinement(claim)) {
		shim.write(wire.TypeRunning, nil)
	}
}

// closeOthers closes every file descriptor except the standard streams and the connections, so that no path of the image leads
// to one, and sets close-on-exec on those.
func (c *channel) closeOthers() *wire.Failure {
	if c.fd != keptFD {
		if err := unix.Dup3(c.fd, keptFD, unix.O_CLOEXEC); err != nil {
			return failed(wire.StageRoot, err, "(keeping the connection)")
		}
		c.fd = keptFD
	}
	if _, err := unix.FcntlInt(keptFD, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return failed(wire.StageRoot, err, "(keeping the connection)")
	}
	if err := unix.CloseRange(uint(c.last()+1), ^uint(0)>>32, 0); err != nil {
		return failed(wire.StageRoot, err, "(closing other file descriptors)")
	}
	return nil
}

// last is the last descriptor that is kept.
func (c *channel) last() int {
	if c.shim != noShim {
		return helperFD
	}
	return keptFD
}
