package main

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

const maxLinks = 40 // as the kernel has it

// attach attaches a detached mount at its destination in the root. The image's symbolic links are followed, but never out of
// the root, through the magic links of /proc, or onto the root, /proc and /sys themselves.
func attach(source int, m wire.Mount) *wire.Failure {
	target, err := mountpoint(m.Destination, m.Dir)
	if err != nil {
		return failed(wire.StageMount, err, m.Destination)
	}
	if err := allowed(target); err != nil {
		return failed(wire.StageMount, err, m.Destination)
	}
	err = unix.MoveMount(source, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	_ = unix.Close(target)
	_ = unix.Close(source)
	if err != nil {
		return failed(wire.StageMount, err, m.Destination)
	}
	return nil
}

// allowed refuses mount points that a mount must not cover.
func allowed(target int) error {
	var fs unix.Statfs_t
	var root, st unix.Stat_t
	if err := errors.Join(unix.Fstatfs(target, &fs), unix.Stat("/", &root), unix.Fstat(target, &st)); err != nil {
		return err
	}
	if fs.Type == unix.PROC_SUPER_MAGIC || fs.Type == unix.SYSFS_MAGIC || (st.Dev == root.Dev && st.Ino == root.Ino) {
		return unix.EPERM
	}
	return nil
}

// mountpoint opens the path in the root, and creates its missing parts, as runc does for its mounts.
func mountpoint(path string, dir bool) (int, error) {
	fd, err := inRoot(path, 0)
	// EAGAIN: a file anywhere on the node was renamed, or a file system mounted, while the kernel resolved "..". A sandbox that renames
	// files all the time must not make the mounts of others fail.
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAGAIN) {
		return fd, err
	}
	// Component by component, each looked up below a path that has neither a link nor ".." in it.
	resolved, rest := "", path
	for links := 0; ; {
		name, tail := component(rest)
		if name == "" {
			return inRoot("/"+resolved, unix.O_NOFOLLOW)
		}
		if name == ".." {
			resolved, rest = parent(resolved), tail
			continue
		}
		next := resolved + "/" + name
		last, _ := component(tail)
		target, err := step(next, last != "" || dir)
		if err != nil {
			return -1, err
		}
		if target == "" {
			resolved, rest = next, tail
			continue
		}
		if links++; links > maxLinks {
			return -1, unix.ELOOP
		}
		if target[0] == '/' {
			resolved = ""
		}
		rest = target + "/" + tail
	}
}

// step creates the path if it is missing, and returns its target if it is a symbolic link.
func step(path string, dir bool) (link string, err error) {
	fd, err := inRoot(path, unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT) && dir:
		return "", unix.Mkdir(path, 0o755)
	case errors.Is(err, unix.ENOENT):
		file, err := unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o755)
		if err == nil {
			_ = unix.Close(file)
		}
		return "", err
	case err != nil:
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", err
	}
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", target)
	if err == nil && (n == 0 || n == len(target)) {
		err = unix.ENAMETOOLONG
	}
	return string(target[:max(n, 0)]), err
}

// inRoot opens a path as O_PATH.
func inRoot(path string, flags uint64) (int, error) {
	return unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: flags | unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
}

// component returns the first name in a path that is not ".", and what follows it; "" if there is none.
func component(path string) (name, rest string) {
	for start := 0; start < len(path); {
		end := start
		for end < len(path) && path[end] != '/' {
			end++
		}
		if name := path[start:end]; name != "" && name != "." {
			return name, path[end:]
		}
		start = end + 1
	}
	return "", ""
}

func parent(path string) string {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[:i]
		}
	}
	return ""
}
