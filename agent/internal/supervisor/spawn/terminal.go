package spawn

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// multiplexer makes terminals. A process of the container may have replaced any file of /dev, but has none of the privileges that it takes to
// change what is mounted at /dev/pts, or what is in there.
const multiplexer = "/dev/pts/ptmx"

// OpenTerminal makes a terminal of the container, and returns both ends of it.
func OpenTerminal(t *wire.Terminal) (master, slave int, failure *wire.Failure) {
	master, err := unix.Openat2(unix.AT_FDCWD, multiplexer, &unix.OpenHow{
		Flags: unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return -1, -1, Failed(wire.StageTerminal, err, multiplexer)
	}
	fail := func(err error, detail string) (int, int, *wire.Failure) {
		_ = unix.Close(master)
		return -1, -1, Failed(wire.StageTerminal, err, detail)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(master, &fs); err != nil || fs.Type != unix.DEVPTS_SUPER_MAGIC {
		return fail(unix.EXDEV, multiplexer)
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return fail(err, "(unlocking)")
	}
	// Through the master, and not by its path.
	fd, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return fail(errno, "(opening)")
	}
	if err := unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, &unix.Winsize{Row: t.Rows, Col: t.Columns}); err != nil {
		_ = unix.Close(int(fd))
		return fail(err, "(size)")
	}
	return master, int(fd), nil
}

// OpenNull opens the sandbox's /dev/null, which a process of the sandbox may have replaced.
func OpenNull() (int, error) {
	fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(1, 3)) {
		err = unix.ENODEV
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_RDWR)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
