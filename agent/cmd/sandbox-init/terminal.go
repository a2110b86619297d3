package main

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// multiplexer makes terminals. A process of the container may have replaced any file of /dev, but has none of the privileges that it takes to
// change what is mounted at /dev/pts, or what is in there.
const multiplexer = "/dev/pts/ptmx"

// openTerminal makes a terminal of the container. It becomes the standard streams and the controlling terminal of this process, which leads
// its session. The master is returned.
func openTerminal(t *wire.Terminal) (int, *wire.Failure) {
	fail := func(err error, detail string) (int, *wire.Failure) {
		return -1, failed(wire.StageTerminal, err, detail)
	}
	master, err := unix.Openat2(unix.AT_FDCWD, multiplexer, &unix.OpenHow{
		Flags: unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return fail(err, multiplexer)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(master, &fs); err != nil || fs.Type != unix.DEVPTS_SUPER_MAGIC {
		return fail(unix.EXDEV, multiplexer)
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return fail(err, "(unlocking)")
	}
	// Through the master, and not by its path.
	slave, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return fail(errno, "(opening)")
	}
	if err := unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, &unix.Winsize{Row: t.Rows, Col: t.Columns}); err != nil {
		return fail(err, "(size)")
	}
	for fd := range 3 {
		if err := unix.Dup3(int(slave), fd, 0); err != nil {
			return fail(err, "(standard streams)")
		}
	}
	_ = unix.Close(int(slave))
	if err := unix.IoctlSetInt(0, unix.TIOCSCTTY, 0); err != nil {
		return fail(err, "(controlling terminal)")
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
