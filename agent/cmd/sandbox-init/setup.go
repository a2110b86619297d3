package main

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// setup makes a container of the namespaces that a shim has cloned this process into: root, mounts, host name. Before it, the process sees the
// host's files; after it, only those of the slot. It returns the user namespace, or -1 if that is the host's, and the exit code if it failed.
func setup() (users, code int) {
	shim := &channel{fd: wire.SetupFD, shim: noShim, users: -1}
	defer func() {
		if r := recover(); r != nil {
			shim.fail(&wire.Failure{Stage: wire.StageRoot, Detail: "panic"})
			code = exitFailed
		}
	}()
	s, failure := prepareSlot(shim)
	if failure != nil {
		if failure != errAbandoned {
			shim.fail(failure)
		}
		return -1, exitFailed
	}
	if !shim.write(wire.TypeReady, nil) {
		return -1, exitAbandoned
	}
	// The socket stays open for the confinement of the claim.
	if err := unix.CloseRange(shimFD, ^uint(0)>>32, 0); err != nil {
		return -1, exitFailed
	}
	if err := unix.Dup3(wire.SetupFD, shimFD, unix.O_CLOEXEC); err != nil {
		return -1, exitFailed
	}
	if err := unix.Close(wire.SetupFD); err != nil {
		return -1, exitFailed
	}
	if !s.UserNamespace {
		return -1, 0
	}
	users, err := unix.Open("/proc/self/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, exitFailed
	}
	return users, 0
}

func prepareSlot(shim *channel) (*wire.Setup, *wire.Failure) {
	payload, _, failure := shim.read(wire.TypeSetup, nil)
	if failure != nil {
		return nil, failure
	}
	s, err := wire.DecodeSetup(payload)
	if err != nil {
		return nil, err.(*wire.Failure) //nolint:errorlint // DecodeSetup returns nothing else
	}
	if failure := dropKeys(); failure != nil {
		return nil, failure
	}
	if failure := makeRoot(s); failure != nil {
		return nil, failure
	}
	if failure := ownNull(); failure != nil {
		return nil, failure
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return nil, failed(wire.StageHostname, err, s.Hostname)
	}
	if s.Loopback {
		if err := loopbackUp(); err != nil {
			return nil, failed(wire.StageRoot, err, "(loopback interface)")
		}
	}
	if failure := limit(s.Rlimits); failure != nil {
		return nil, failure
	}
	if failure := bound(s.Capabilities.Bounding); failure != nil {
		return nil, failure
	}
	return s, capabilities(&s.Capabilities)
}

// descriptor returns the descriptor with an index in a Setup.
func descriptor(index uint32) int { return wire.SetupFD + 1 + int(index) }

// makeRoot makes the mount with index 0 the root, with all others in it.
func makeRoot(s *wire.Setup) *wire.Failure {
	fail := func(err error, detail string) *wire.Failure { return failed(wire.StageRoot, err, detail) }
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fail(err, "(propagation of mounts)")
	}
	root := descriptor(0)
	// It is mounted over the host's root, where every process finds a directory.
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fail(err, "(attaching the root)")
	}
	if err := unix.Fchdir(root); err != nil {
		return fail(err, "(entering the root)")
	}
	// The host's /proc is still there: in a user namespace the kernel permits a new one only beside it.
	for _, m := range s.Mounts {
		if failure := mountSlot(m); failure != nil {
			return failure
		}
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fail(err, "(pivot_root)")
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fail(err, "(detaching the host's root)")
	}
	if err := unix.Chdir("/"); err != nil {
		return fail(err, "/")
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fail(err, "(propagation of mounts)")
	}
	for _, path := range s.Readonly {
		if err := makeReadonly(path); err != nil {
			return failed(wire.StageMount, err, path)
		}
	}
	for _, path := range s.Masked {
		if err := mask(path); err != nil {
			return failed(wire.StageMount, err, path)
		}
	}
	return nil
}

// mountSlot makes one mount of a Setup. The working directory is the root.
func mountSlot(m wire.SetupMount) *wire.Failure {
	target := m.Destination[1:]
	if m.Type == "" {
		if err := unix.MoveMount(descriptor(m.FD), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return failed(wire.StageMount, err, m.Destination)
		}
		return nil
	}
	if m.Destination != "/dev" && hasPrefix(m.Destination, "/dev/") {
		if err := unix.Mkdir(target, 0o755); err != nil && err != unix.EEXIST {
			return failed(wire.StageMount, err, m.Destination)
		}
	}
	if err := unix.Mount(m.Type, target, m.Type, uintptr(m.Flags), m.Data); err != nil {
		return failed(wire.StageMount, err, m.Destination)
	}
	return nil
}

// makeReadonly mounts a path, if it exists, over itself, read-only.
func makeReadonly(path string) error {
	if err := unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		if err == unix.ENOENT {
			return nil
		}
		return err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	return unix.MountSetattr(unix.AT_FDCWD, path, unix.AT_RECURSIVE, &attr)
}

// mask hides a path, if it exists: a file behind /dev/null, a directory behind an empty one.
func mask(path string) error {
	err := unix.Mount("/dev/null", path, "", unix.MS_BIND, "")
	switch err {
	case unix.ENOENT:
		return nil
	case unix.ENOTDIR:
		return unix.Mount("tmpfs", path, "tmpfs", unix.MS_RDONLY, "size=0k,nr_inodes=2")
	}
	return err
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

func hasPrefix(s, prefix string) bool { return len(s) >= len(prefix) && s[:len(prefix)] == prefix }
