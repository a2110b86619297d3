package ctrd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

// snapshotLabel begins the labels by which a record references further snapshots: it is followed by the snapshotter's name,
// and optionally a slash and a word. The label's value is a snapshot's key.
const snapshotLabel = "containerd.io/gc.ref.snapshot."

// snapshotsOf returns the snapshots that a record references, that of the root file system first.
func snapshotsOf(info containers.Container) []snapshotRef {
	var out []snapshotRef
	if info.SnapshotKey != "" {
		out = append(out, snapshotRef{info.Snapshotter, info.SnapshotKey})
	}
	for label, key := range info.Labels {
		rest, ok := strings.CutPrefix(label, snapshotLabel)
		if !ok || key == "" {
			continue
		}
		name, _, _ := strings.Cut(rest, "/")
		if ref := (snapshotRef{name, key}); !slices.Contains(out, ref) {
			out = append(out, ref)
		}
	}
	return out
}

// removeSnapshots removes a container's snapshots, except the layers of images, which other containers may use.
func (r *Remover) removeSnapshots(ctx context.Context, h holdings) error {
	step, cancel := r.step(ctx)
	defer cancel()
	for i, ref := range h.snapshots {
		service := r.Client.SnapshotService(ref.snapshotter)
		if i > 0 {
			info, err := service.Stat(step, ref.key)
			if errdefs.IsNotFound(err) || (err == nil && info.Kind == snapshots.KindCommitted) {
				continue
			}
		}
		if err := service.Remove(step, ref.key); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("removing snapshot %s: %w", ref.key, err)
		}
	}
	return nil
}
