package ctrd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Part is a kind of resource that a container has besides its record.
type Part string

// The parts.
const (
	PartSnapshot Part = "snapshot"
	PartFIFOs    Part = "fifos"
	PartMount    Part = "mount"
	PartCgroup   Part = "cgroup"
	PartLog      Part = "log"
	PartBundle   Part = "bundle"
	// PartRange is a range of user ids.
	PartRange Part = "range"
	// PartShim is a shim of ours without a container: its anchor, its record in containerd's sandbox store, and its process.
	PartShim Part = "shim"
)

// Piece is a resource on the node that is named after one of our containers.
type Piece struct {
	// ID is the container that it is named after; of a shim, its anchor.
	ID   string
	Part Part
	// Path is a log's directory, or a cgroup's path below the roots of the hierarchies.
	Path string
	// Owner is the uid of the agent's Pod that it belongs to: of a log by the file in it, of a cgroup and a bundle by the cgroup's
	// path, of a snapshot and a shim by its label, of a range by its file. Empty if it cannot be read, as of a log whose removal was
	// interrupted.
	Owner string
	// Deleted is, for a log, when MarkDeleted was called; zero if it was not. Written is when the log was last written.
	Deleted, Written time.Time
}

// ours reports whether an id is that of one of our containers.
func ours(id string) bool { return identity.IsContainerID(id) }

// Inventory returns every resource on the node that is named after one of our containers, whether that has a record or not:
// snapshots in the Remover's snapshotter, mounts in containerd's own bundles, cgroups within the parents, ranges of user ids. A cgroup
// with processes that containerd does not know belongs to another containerd and is skipped. Of shims of ours it returns those without a
// container. The error joins what could not be read; the rest is returned with it.
func (r *Remover) Inventory(ctx context.Context) ([]Piece, error) { return r.InventoryExcept(ctx, nil) }

// InventoryExcept is Inventory without the resources of the containers in skip. The caller skips those that have a record,
// which are nearly all, so that nothing of them is read.
func (r *Remover) InventoryExcept(ctx context.Context, skip map[string]bool) ([]Piece, error) {
	wanted := func(id string) bool { return ours(id) && !skip[id] }
	var out []Piece
	var errs []error
	err := r.Client.SnapshotService(r.Snapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if wanted(info.Name) && info.Kind != snapshots.KindCommitted {
			out = append(out, Piece{ID: info.Name, Part: PartSnapshot, Owner: info.Labels[identity.KeyAgentUID]})
		}
		return nil
	})
	if err != nil {
		errs = append(errs, fmt.Errorf("listing snapshots: %w", err))
	}
	streams, err := fifoDir(r.FIFORoot).list()
	if err != nil {
		errs = append(errs, fmt.Errorf("listing FIFOs: %w", err))
	}
	for _, f := range streams {
		if wanted(f.id) {
			out = append(out, Piece{ID: f.id, Part: PartFIFOs})
		}
	}
	bundles, err := r.bundles(ctx)
	if err != nil {
		errs = append(errs, fmt.Errorf("listing mounts: %w", err))
	}
	points, err := bundles.mountPoints(wanted)
	if err != nil {
		errs = append(errs, fmt.Errorf("listing mounts: %w", err))
	}
	for _, p := range points {
		out = append(out, Piece{ID: p.id, Part: PartMount})
	}
	shims, err := r.idleShims(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	out = append(out, shims...)
	left, err := bundles.list(wanted)
	if err != nil {
		errs = append(errs, fmt.Errorf("listing bundles: %w", err))
	}
	out = append(out, left...)
	groups, err := r.cgroups().free(wanted, func() (map[string]bool, error) { return r.tasks().ids(ctx) })
	if err != nil {
		errs = append(errs, err)
	}
	out = append(out, groups...)
	ranges, err := r.ranges(wanted)
	if err != nil {
		errs = append(errs, err)
	}
	out = append(out, ranges...)
	logs, err := r.logs().list(wanted)
	if err != nil {
		errs = append(errs, fmt.Errorf("listing logs: %w", err))
	}
	return append(out, logs...), errors.Join(errs...)
}

// ranges returns the ranges of user ids.
func (r *Remover) ranges(wanted func(string) bool) ([]Piece, error) {
	if r.Ranges.Dir == "" {
		return nil, nil
	}
	held, err := r.Ranges.List()
	if err != nil {
		return nil, err
	}
	var out []Piece
	for _, h := range held {
		if wanted(h.ID) {
			out = append(out, Piece{ID: h.ID, Part: PartRange, Path: strconv.FormatUint(uint64(h.First), 10), Owner: h.Owner})
		}
	}
	return out, nil
}

// MarkDeleted marks a container's log directory, if there is one, as that of a deleted container.
func (r *Remover) MarkDeleted(id string) error { return r.logs().markDeleted(id) }

// RemovePiece removes a resource whose container has no record, and ends the container's task if containerd still runs one. The
// caller has verified that there is no record. Safe to repeat.
func (r *Remover) RemovePiece(ctx context.Context, p Piece) error {
	if p.Part == PartShim && identity.IsShimID(p.ID) {
		return r.removeShim(ctx, p.ID)
	}
	if !ours(p.ID) {
		return fmt.Errorf("container id %q: %w", p.ID, errdefs.ErrInvalidArgument)
	}
	if p.Part != PartLog {
		if err := r.endLost(ctx, p.ID); err != nil {
			return err
		}
	}
	switch p.Part {
	case PartSnapshot:
		return r.removeSnapshots(ctx, holdings{snapshots: []snapshotRef{{r.Snapshotter, p.ID}}})
	case PartRange:
		return r.removeRange(ctx, p)
	case PartFIFOs:
		return fifoDir(r.FIFORoot).remove(p.ID)
	case PartMount:
		return r.unmount(ctx, p.ID)
	case PartBundle:
		return r.removeBundle(ctx, p.ID)
	case PartCgroup:
		r.cgroups().remove(p.Path)
		if r.cgroups().exists(p.Path) {
			return fmt.Errorf("removing the cgroup of container %s, which has processes: %w", p.ID, errdefs.ErrUnavailable)
		}
		return nil
	case PartLog:
		if filepath.Dir(p.Path) != filepath.Clean(r.LogRoot) {
			return fmt.Errorf("log directory %q: %w", p.Path, errdefs.ErrInvalidArgument)
		}
		if err := os.RemoveAll(p.Path); err != nil {
			return fmt.Errorf("removing the log of container %s: %w", p.ID, err)
		}
		return nil
	}
	return fmt.Errorf("part %q of container %s: %w", p.Part, p.ID, errdefs.ErrInvalidArgument)
}

// removeRange releases a container's user ids, after what may belong to them.
func (r *Remover) removeRange(ctx context.Context, p Piece) error {
	first, err := strconv.ParseUint(p.Path, 10, 32)
	if err != nil {
		return fmt.Errorf("range %q of container %s: %w", p.Path, p.ID, errdefs.ErrInvalidArgument)
	}
	if err := r.removeStrays(ctx, p.ID, ""); err != nil {
		return err
	}
	if err := r.removeSnapshots(ctx, holdings{snapshots: []snapshotRef{{r.Snapshotter, p.ID}}}); err != nil {
		return err
	}
	return r.Ranges.Release(uint32(first), p.ID)
}

// Measure returns about how many bytes of disk a container's removal frees. What cannot be read is not counted.
func (r *Remover) Measure(ctx context.Context, id string) int64 {
	if !validID(id) {
		return 0
	}
	known, err := r.inspect(ctx, id)
	if err != nil {
		return 0
	}
	var sum int64
	for _, ref := range known.snapshots {
		step, cancel := r.step(ctx)
		usage, err := r.Client.SnapshotService(ref.snapshotter).Usage(step, ref.key)
		cancel()
		if err == nil {
			sum += usage.Size
		}
	}
	return sum + r.logs().usage(id)
}
