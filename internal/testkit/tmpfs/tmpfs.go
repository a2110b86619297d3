// Package tmpfs puts directories into memory, for the state of a containerd that a test or a benchmark starts: nodes have it in
// /run, which is a tmpfs there, and containerd waits for the disk (fsync) each time that it starts a shim. It keeps nothing. The
// caller unmounts what Ensure has mounted.
package tmpfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Ensure makes a directory that is on a tmpfs: it mounts one unless the directory is on one already. The directory may exist,
// but not on a disk with contents, which the mount would hide: those are fs.ErrExist. It needs root.
func Ensure(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("making a directory in memory: %w", err)
	}
	in, err := On(dir)
	if err != nil || in {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fs.ErrExist
	}
	if err == nil {
		err = unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0711")
	}
	if err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// On reports whether a directory is on a tmpfs.
func On(dir string) (bool, error) {
	var found unix.Statfs_t
	if err := unix.Statfs(dir, &found); err != nil {
		return false, fmt.Errorf("reading the file system of %s: %w", dir, err)
	}
	return found.Type == unix.TMPFS_MAGIC, nil
}

// Release unmounts a directory if Ensure has mounted a tmpfs on it. It is safe to repeat.
func Release(dir string) error {
	err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil // not a mount
	}
	if err != nil {
		return fmt.Errorf("unmounting %s: %w", dir, err)
	}
	return nil
}
