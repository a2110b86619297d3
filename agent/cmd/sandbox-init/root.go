package main

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// newRoot is the mount point of the claim's root in the slot's own.
const newRoot = "/new"

// build makes the claim's root, with all its mounts, the root of this process, and enters the working directory. entered is
// false if only the user may enter that. Nothing of the image is executed.
func build(c *channel, claim *wire.Claim, fds []int) (entered bool, failure *wire.Failure) {
	sources, failure := open(claim.Mounts, fds[1:])
	if failure != nil {
		return false, failure
	}
	if failure := pivot(fds[0]); failure != nil {
		return false, failure
	}
	for i, m := range claim.Mounts {
		if failure := attach(sources[i], m); failure != nil {
			return false, failure
		}
	}
	if claim.Hostname != "" {
		if err := unix.Sethostname([]byte(claim.Hostname)); err != nil {
			return false, failed(wire.StageHostname, err, claim.Hostname)
		}
	}
	if failure := c.closeOthers(); failure != nil {
		return false, failure
	}
	// The directory is created even if only the user may enter it.
	if err := makeAll(claim.Cwd); err != nil {
		return false, failed(wire.StageCwd, err, claim.Cwd)
	}
	failure = spawn.Enter(claim.Cwd)
	if failure != nil && failure.Errno == unix.EACCES {
		return false, nil
	}
	return failure == nil, failure
}

// open creates a detached mount of each source, with its attributes, while the slot's own files can still be reached.
func open(mounts []wire.Mount, fds []int) ([]int, *wire.Failure) {
	sources := make([]int, len(mounts))
	for i, m := range mounts {
		switch {
		case m.Path != "":
			fd, err := unix.OpenTree(unix.AT_FDCWD, m.Path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|unix.AT_SYMLINK_NOFOLLOW)
			if err != nil {
				return nil, failed(wire.StageMount, err, m.Path)
			}
			sources[i] = fd
		case int64(m.FD) < int64(len(fds)):
			sources[i] = fds[m.FD]
		default:
			return nil, &wire.Failure{Stage: wire.StageMount, Errno: unix.EBADF, Detail: m.Destination}
		}
		attr := unix.MountAttr{Attr_set: m.Attributes, Propagation: unix.MS_PRIVATE}
		if err := unix.MountSetattr(sources[i], "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
			return nil, failed(wire.StageMount, err, m.Destination)
		}
	}
	return sources, nil
}

// pivot makes the mount the root, moves the slot's /proc, /dev and /sys into it, and detaches the old root.
func pivot(mount int) *wire.Failure {
	fail := func(err error, detail string) *wire.Failure { return failed(wire.StageRoot, err, detail) }
	if err := unix.MoveMount(mount, "", unix.AT_FDCWD, newRoot, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fail(err, newRoot)
	}
	oldFD, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err, "/")
	}
	newFD, err := unix.Open(newRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err, newRoot)
	}
	for _, name := range []string{"proc", "dev", "sys"} {
		if err := moveMount(newFD, name); err != nil {
			return fail(err, "/"+name)
		}
	}
	if err := unix.Fchdir(newFD); err != nil {
		return fail(err, newRoot)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fail(err, "(pivot_root)")
	}
	// The old root is mounted over the new one. Changes to it must not propagate to the host.
	if err := unix.Fchdir(oldFD); err != nil {
		return fail(err, "(detaching the old root)")
	}
	if err := unix.Mount("", ".", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fail(err, "(detaching the old root)")
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fail(err, "(detaching the old root)")
	}
	if err := unix.Chdir("/"); err != nil {
		return fail(err, "/")
	}
	return nil
}

// moveMount moves one of the slot's own mounts into the new root. An image may lack the mount point, but may not have a
// symbolic link there.
func moveMount(root int, name string) error {
	if err := unix.Mkdirat(root, name, 0o755); err != nil && err != unix.EEXIST {
		return err
	}
	fd, err := unix.Openat2(root, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.MoveMount(unix.AT_FDCWD, "/"+name, fd, "", unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// makeAll creates a directory and its parents, as OCI runtimes create a working directory.
func makeAll(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err == nil {
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return unix.ENOTDIR
		}
		return nil
	}
	for end := 1; end <= len(path); end++ {
		if end < len(path) && path[end] != '/' {
			continue
		}
		err := unix.Mkdir(path[:end], 0o755)
		if err == nil || err == unix.EEXIST || err == unix.EISDIR {
			continue
		}
		return err
	}
	return nil
}
