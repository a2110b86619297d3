package ctrd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// maxOption is the longest value that fsconfig takes.
const maxOption = 255

// detached mounts a root file system without attaching it anywhere: only the descriptor holds it, and a process that receives
// the descriptor can attach it in its own mount namespace. It takes what an overlay or native snapshotter returns; other
// mounts, and a kernel without support, are errdefs.ErrNotImplemented.
func detached(mounts []mount.Mount) (*os.File, error) {
	if len(mounts) != 1 {
		return nil, fmt.Errorf("mounting a root file system of %d mounts: %w", len(mounts), errdefs.ErrNotImplemented)
	}
	m := mounts[0]
	switch {
	case m.Type == "overlay":
		fd, err := overlay(m.Options)
		if errors.Is(err, unix.EINVAL) {
			// Before Linux 6.8 only mount(2) takes long lists of layers.
			return mountAndClone(m)
		}
		return asFile(fd, err, "overlay")
	case m.Type == "bind" && !slices.Contains(m.Options, "ro"):
		fd, err := unix.OpenTree(unix.AT_FDCWD, m.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		return asFile(fd, err, "bind")
	}
	return nil, fmt.Errorf("mounting a root file system of type %s: %w", m.Type, errdefs.ErrNotImplemented)
}

// mapped is detached for a container in a user namespace whose first id is the host's first: the files of the image appear as those of its users,
// and what it writes belongs to them. The layers of an overlay are mapped, and the upper one is given to the namespace's root: the kernel
// could not write to an upper layer that is mapped, because the ids of the agent are not.
func mapped(mounts []mount.Mount, users *os.File, first uint32) (*os.File, error) {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())}
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		root, err := detached(mounts)
		if err != nil {
			return nil, err
		}
		if err := unix.MountSetattr(int(root.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
			_ = root.Close()
			return nil, unmappable(err)
		}
		return root, nil
	}
	m := mounts[0]
	m.Options = slices.Clone(m.Options)
	for i, o := range m.Options {
		key, value, _ := strings.Cut(o, "=")
		switch key {
		case "upperdir":
			if err := give(value, first); err != nil {
				return nil, err
			}
		case "lowerdir":
			var layers []string
			for dir := range strings.SplitSeq(value, ":") {
				fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
				if err != nil {
					return nil, &os.PathError{Op: "mounting", Path: dir, Err: err}
				}
				defer unix.Close(fd)
				if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
					return nil, unmappable(err)
				}
				layers = append(layers, fmt.Sprintf("/proc/self/fd/%d", fd))
			}
			m.Options[i] = "lowerdir=" + strings.Join(layers, ":")
		}
	}
	return detached([]mount.Mount{m})
}

// unmappable says why a layer's owners cannot be mapped.
func unmappable(err error) error {
	return fmt.Errorf("the snapshotter's file system has no id-mapped mounts, which user namespaces need: %w: %w", errdefs.ErrNotImplemented, err)
}

// give makes the root of a user namespace the owner of a directory of the host's root.
func give(dir string, first uint32) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &os.PathError{Op: "reading", Path: dir, Err: err}
	}
	if st.Uid >= idrange.Size || st.Gid >= idrange.Size {
		return nil // given already
	}
	if err := os.Lchown(dir, int(first+st.Uid), int(first+st.Gid)); err != nil {
		return fmt.Errorf("giving the files of a sandbox to its user namespace: %w", err)
	}
	return nil
}

func asFile(fd int, err error, kind string) (*os.File, error) {
	switch {
	case err == nil:
		return os.NewFile(uintptr(fd), "rootfs"), nil
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENODEV):
		err = errors.Join(errdefs.ErrNotImplemented, err)
	}
	return nil, fmt.Errorf("mounting a root file system (%s): %w", kind, err)
}

func overlay(options []string) (int, error) {
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fd)
	if err := unix.FsconfigSetString(fd, "source", "overlay"); err != nil {
		return -1, err
	}
	for _, o := range options {
		if err := configure(fd, o); err != nil {
			return -1, err
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return -1, err
	}
	return unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, 0)
}

func configure(fd int, option string) error {
	key, value, ok := strings.Cut(option, "=")
	switch {
	case !ok:
		return unix.FsconfigSetFlag(fd, key)
	case key == "lowerdir" && len(value) > maxOption:
		for dir := range strings.SplitSeq(value, ":") {
			if err := unix.FsconfigSetString(fd, "lowerdir+", dir); err != nil {
				return err
			}
		}
		return nil
	}
	return unix.FsconfigSetString(fd, key, value)
}

// mountAndClone attaches the mount temporarily, in a directory that no other process uses.
func mountAndClone(m mount.Mount) (*os.File, error) {
	dir, err := os.MkdirTemp("", "fsb-root-")
	if err != nil {
		return nil, fmt.Errorf("mounting a root file system: %w", err)
	}
	defer os.Remove(dir)
	if err := m.Mount(dir); err != nil {
		return nil, fmt.Errorf("mounting a root file system: %w", err)
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if gone := unix.Unmount(dir, unix.MNT_DETACH); err == nil && gone != nil {
		_ = unix.Close(fd)
		err = gone
	}
	return asFile(fd, err, "clone")
}
