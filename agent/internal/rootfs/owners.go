package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"syscall"

	"github.com/containerd/containerd/v2/core/mount"
)

// CheckOwners returns a *FileError if a file of the root file system, or of a layer of it, belongs to a user or group whose id is limit or
// above. It inspects every file.
func CheckOwners(ctx context.Context, mounts []mount.Mount, limit uint32) error {
	if dirs := layersOf(mounts); dirs != nil {
		return checkOwners(ctx, dirs, limit)
	}
	return mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
		return checkOwners(ctx, []string{root}, limit)
	})
}

func checkOwners(ctx context.Context, dirs []string, limit uint32) error {
	for _, dir := range dirs {
		if err := checkLayer(ctx, dir, limit); err != nil {
			return err
		}
	}
	return nil
}

func checkLayer(ctx context.Context, dir string, limit uint32) error {
	return fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		switch {
		case !ok:
			return fmt.Errorf("reading the owner of /%s: %w", name, errors.ErrUnsupported)
		case st.Uid >= limit:
			return &FileError{Path: path.Join("/", name), Problem: fmt.Sprintf("belongs to user %d", st.Uid)}
		case st.Gid >= limit:
			return &FileError{Path: path.Join("/", name), Problem: fmt.Sprintf("belongs to group %d", st.Gid)}
		}
		return nil
	})
}
