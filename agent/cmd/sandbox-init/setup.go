package main

import (
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// setup makes a container of the namespaces that a shim has cloned this process into: root, mounts, devices, host name, limits. Before it,
// the process sees the host's files; after it, only those of the slot. It returns the exit code if that failed.
func setup() (code int) {
	shim := &channel{fd: wire.SetupFD, shim: noShim}
	defer func() {
		if r := recover(); r != nil {
			shim.fail(&wire.Failure{Stage: wire.StageRoot, Detail: "panic"})
			code = exitFailed
		}
	}()
	if failure := prepareSlot(shim); failure != nil {
		if failure != errAbandoned {
			shim.fail(failure)
		}
		return exitFailed
	}
	if !shim.write(wire.TypeReady, nil) {
		return exitAbandoned
	}
	// The socket stays open for the confinement of the claim.
	if err := unix.CloseRange(shimFD, ^uint(0)>>32, 0); err != nil {
		return exitFailed
	}
	if err := unix.Dup3(wire.SetupFD, shimFD, unix.O_CLOEXEC); err != nil {
		return exitFailed
	}
	if err := unix.Close(wire.SetupFD); err != nil {
		return exitFailed
	}
	return 0
}

func prepareSlot(shim *channel) *wire.Failure {
	payload, _, failure := shim.read(wire.TypeSetup, nil)
	if failure != nil {
		return failure
	}
	s, err := wire.DecodeSetup(payload)
	if err != nil {
		return err.(*wire.Failure) //nolint:errorlint // DecodeSetup returns nothing else
	}
	if failure := dropKeys(); failure != nil {
		return failure
	}
	if s.OOMScoreAdj != nil { // while /proc is the host's, in which this process is
		if failure := adjustOOMScore(int(*s.OOMScoreAdj)); failure != nil {
			return failure
		}
	}
	if failure := makeRoot(s); failure != nil {
		return failure
	}
	if failure := ownNull(); failure != nil {
		return failure
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return failed(wire.StageHostname, err, s.Hostname)
	}
	if s.Loopback {
		if err := loopbackUp(); err != nil {
			return failed(wire.StageRoot, err, "(loopback interface)")
		}
	}
	if failure := limit(s.Rlimits); failure != nil {
		return failure
	}
	if failure := bound(s.Capabilities.Bounding); failure != nil {
		return failure
	}
	return capabilities(&s.Capabilities)
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
	if m.Destination == "/dev" {
		return fillDev()
	}
	return nil
}

// fillDev makes the nodes and links of a container's /dev.
func fillDev() *wire.Failure {
	unix.Umask(0)
	defer unix.Umask(0o022)
	for _, d := range [...]struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}} {
		if err := unix.Mknod("dev/"+d.name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return failed(wire.StageMount, err, "/dev/"+d.name)
		}
	}
	for _, link := range [...][2]string{
		{"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"}, {"/proc/self/fd/2", "dev/stderr"},
		{"pts/ptmx", "dev/ptmx"}, {"/proc/kcore", "dev/core"},
	} {
		if err := unix.Symlink(link[0], link[1]); err != nil {
			return failed(wire.StageMount, err, "/"+link[1])
		}
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

func adjustOOMScore(score int) *wire.Failure {
	const path = "/proc/self/oom_score_adj"
	value := strconv.Itoa(score)
	// An unchanged value is not written: even that may need a capability that the host does not grant.
	if now, err := read(path); err == nil && now == value+"\n" {
		return nil
	}
	if err := write(path, value); err != nil {
		return failed(wire.StageOOM, err, value)
	}
	return nil
}

func hasPrefix(s, prefix string) bool { return len(s) >= len(prefix) && s[:len(prefix)] == prefix }
