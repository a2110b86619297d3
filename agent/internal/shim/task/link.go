package task

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// link is the shim's end of the socket to the sandbox-init of a container. That sends the confinement of a claim, and that the claim's command
// runs. What it has sent waits in the socket until it is needed: by the first process that is added, or the first signal.
type link struct {
	socket   *os.File
	received []byte
	ended    bool
	within   *wire.Claim
	running  bool
}

// errUnclaimed means that the container's process is still sandbox-init.
var errUnclaimed = fmt.Errorf("the process of the container has not started yet, wait until it runs: %w", errdefs.ErrFailedPrecondition) //nolint:gochecknoglobals // constant

// confinement returns what every process of the container is confined to, once its own process runs. It does not block.
func (l *link) confinement() (*wire.Claim, error) {
	if l.running {
		return l.within, nil
	}
	if err := l.receive(); err != nil {
		return nil, fmt.Errorf("reading the confinement of the container: %w", err)
	}
	for len(l.received) >= wire.HeaderSize {
		kind, size, err := wire.ParseHeader([wire.HeaderSize]byte(l.received))
		if err != nil {
			return nil, fmt.Errorf("sandbox-init has sent no confinement of the container: %w", errors.Join(err, errdefs.ErrFailedPrecondition))
		}
		if len(l.received) < wire.HeaderSize+size {
			break
		}
		payload := string(l.received[wire.HeaderSize : wire.HeaderSize+size])
		l.received = l.received[wire.HeaderSize+size:]
		switch kind {
		case wire.TypeConfinement:
			if l.within, err = wire.DecodeConfinement(payload); err != nil {
				return nil, err
			}
		case wire.TypeRunning:
			l.running, l.received = l.within != nil, nil
			return l.confined()
		}
	}
	if l.ended {
		return l.confined()
	}
	return nil, errUnclaimed
}

// confined is the confinement of a container whose process runs.
func (l *link) confined() (*wire.Claim, error) {
	if !l.running {
		return nil, fmt.Errorf("sandbox-init has not sent the confinement of the container: %w", errdefs.ErrFailedPrecondition)
	}
	return l.within, nil
}

// signal has sandbox-init send a signal to the container's own process. sent is false if that does not run.
func (l *link) signal(sig unix.Signal) (sent bool, err error) {
	if _, err := l.confinement(); err != nil || l.socket == nil {
		return false, nil //nolint:nilerr // there is only sandbox-init
	}
	if err := l.socket.SetWriteDeadline(time.Now().Add(signalTime)); err != nil {
		return true, err
	}
	_, err = l.socket.Write(wire.Frame(wire.TypeSignalMain, wire.EncodeRequest(&wire.Request{Signal: uint32(sig)})))
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		err = os.ErrProcessDone
	}
	return true, err
}

// signalTime is how long a frozen sandbox may not read its signals before its socket is full.
const signalTime = time.Second

// receive reads what has arrived.
func (l *link) receive() error {
	if l.socket == nil || l.ended {
		return nil
	}
	conn, err := l.socket.SyscallConn()
	if err != nil {
		return err
	}
	var readErr error
	err = conn.Control(func(fd uintptr) {
		buffer := make([]byte, 16<<10)
		for len(l.received) <= wire.MaxMessage {
			n, _, err := unix.Recvfrom(int(fd), buffer, unix.MSG_DONTWAIT)
			switch {
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				return
			case err != nil:
				readErr = err
				return
			case n == 0:
				l.ended = true
				return
			default:
				l.received = append(l.received, buffer[:n]...)
			}
		}
	})
	return errors.Join(err, readErr)
}

func (l *link) close() {
	if l.socket != nil {
		_ = l.socket.Close()
	}
}
