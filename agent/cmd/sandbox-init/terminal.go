package main

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// openTerminal makes a terminal of the container. It becomes the standard streams and the controlling terminal of this process, which leads
// its session. The master is returned.
func openTerminal(t *wire.Terminal) (int, *wire.Failure) {
	master, slave, failure := spawn.OpenTerminal(t)
	if failure != nil {
		return -1, failure
	}
	for fd := range 3 {
		if err := unix.Dup3(slave, fd, 0); err != nil {
			return -1, failed(wire.StageTerminal, err, "(standard streams)")
		}
	}
	_ = unix.Close(slave)
	if err := unix.IoctlSetInt(0, unix.TIOCSCTTY, 0); err != nil {
		return -1, failed(wire.StageTerminal, err, "(controlling terminal)")
	}
	return master, nil
}

// readyWith reports that the process is ready, with the master of its terminal if that is not negative.
func (c *channel) readyWith(master int) bool {
	if master < 0 {
		return c.write(wire.TypeReady, nil)
	}
	frame := wire.Frame(wire.TypeReady, nil)
	for {
		n, err := unix.SendmsgN(c.fd, frame, unix.UnixRights(master), nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		return err == nil && n == len(frame)
	}
}
