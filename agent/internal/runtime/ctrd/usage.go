package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tree"
)

// DiskUsage walks the directory of an overlay or native snapshot. The snapshotter's own measurement fails if a file disappears
// meanwhile, or has too long a path, so that a sandbox could avoid it; only of other snapshotters is it used.
func (r *Runtime) DiskUsage(ctx context.Context, id string, limit runtime.DiskUsage) (runtime.DiskUsage, error) {
	snapshots := r.client.SnapshotService(r.config.Snapshotter)
	mounts, err := snapshots.Mounts(ctx, id)
	if err != nil {
		return runtime.DiskUsage{}, classify(err, "measuring container %s", id)
	}
	dir := writable(mounts)
	if dir == "" {
		used, err := snapshots.Usage(ctx, id)
		return runtime.DiskUsage{Bytes: used.Size, Inodes: used.Inodes}, classify(err, "measuring container %s", id)
	}
	used, err := tree.Measure(ctx, dir, limit)
	if errors.Is(err, fs.ErrNotExist) {
		return runtime.DiskUsage{}, fmt.Errorf("measuring container %s: %w", id, errors.Join(errdefs.ErrNotFound, err))
	}
	return used, err
}

// writable returns the directory that a container with these mounts writes to; empty if it is not known.
func writable(mounts []mount.Mount) string {
	if len(mounts) != 1 {
		return ""
	}
	switch m := mounts[0]; {
	case m.Type == "overlay":
		for _, o := range m.Options {
			if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
				return dir
			}
		}
	case m.Type == "bind" && !slices.Contains(m.Options, "ro"):
		return m.Source
	}
	return ""
}
