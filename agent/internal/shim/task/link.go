package task

import (
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// link is the shim's end of the socket to the sandbox-init of a container. That sends the confinement of a claim, and closes its end when it
// executes the claim's command. What it has sent waits in the socket until the first process is added: most containers never have another.
type link struct {
	socket   *os.File
	received []byte
	ended    bool
	within   *wire.Claim
}

// errUnclaimed means that the container's process is still sandbox-init.
var errUnclaimed = fmt.Errorf("the process of the container has not started yet, wait until it runs: %w", errdefs.ErrFailedPrecondition) //nolint:gochecknoglobals // constant

// confinement returns what every process of the container is confined to, once its own process runs. It does not block.
func (l *link) confinement() (*wire.Claim, error) {
	if l.within != nil {
		return l.within, nil
	}
	if err := l.receive(); err != nil {
		return nil, fmt.Errorf("reading the confinement of the container: %w", err)
	}
	if !l.ended {
		return nil, errUnclaimed
	}
	if len(l.received) < wire.HeaderSize {
		return nil, fmt.Errorf("sandbox-init has not sent the confinement of the container: %w", errdefs.ErrFailedPrecondition)
	}
	kind, size, err := wire.ParseHeader([wire.HeaderSize]byte(l.received))
	payload := l.received[wire.HeaderSize:]
	if err != nil || kind != wire.TypeConfinement || size != len(payload) {
		return nil, fmt.Errorf("sandbox-init has sent no confinement of the container: %w", errors.Join(err, errdefs.ErrFailedPrecondition))
	}
	if l.within, err = wire.DecodeConfinement(string(payload)); err != nil {
		return nil, err
	}
	l.received = nil
	l.close()
	return l.within, nil
}

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
