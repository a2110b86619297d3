package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Part is a kind of thing that containers have beside their records.
type Part string

// The parts.
const (
	PartSnapshot Part = "snapshot"
	PartFIFOs    Part = "fifos"
	PartMount    Part = "mount"
	PartCgroup   Part = "cgroup"
	PartLog      Part = "log"
	PartBundle   Part = "bundle"
)

// Piece is something on the node that is named after a container of ours.
type Piece struct {
	// ID is the container that it is named after.
	ID   string
	Part Part
	// Path is, of a log, its directory, and of a cgroup its path below the roots of the hierarchies.
	Path string
	// Owner is the uid of the agent's Pod that it belongs to: of a log by the file in it, of a cgroup and a bundle by the cgroup's
	// path, of a snapshot by its label. Empty if it cannot be read, as of a log whose removal was interrupted.
	Owner string
	// Deleted is, of a log, when MarkDeleted was called; zero if it was not. Written is when it was last written to.
	Deleted, Written time.Time
}

// ours tells whether something is named after a container of ours.
func ours(id string) bool { return identity.IsContainerID(id) }

// Survey finds everything on the node that is named as parts of our containers are, whether they have a record or not: snapshots
// in the Remover's snapshotter, mounts in containerd's own bundles, cgroups within the parents. A cgroup in which something
// runs that containerd knows nothing of is not told of: it is another's. What cannot be read is in the error; the rest is
// returned all the same.
func (r *Remover) Survey(ctx context.Context) ([]Piece, error) { return r.SurveyBut(ctx, nil) }

// SurveyBut is Survey without what is named after the containers that are left out: those that are known to have a record,
// which is nearly all of them, so that nothing need be read of their parts.
func (r *Remover) SurveyBut(ctx context.Context, leftOut map[string]bool) ([]Piece, error) {
	wanted := func(id string) bool { return ours(id) && !leftOut[id] }
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
	streams, err := r.fifos()
	if err != nil {
		errs = append(errs, fmt.Errorf("listing FIFOs: %w", err))
	}
	for _, f := range streams {
		if wanted(f.id) {
			out = append(out, Piece{ID: f.id, Part: PartFIFOs})
		}
	}
	proc, err := r.hostProc(ctx)
	if err != nil {
		errs = append(errs, fmt.Errorf("listing mounts: %w", err))
	}
	if proc != "" {
		points, err := r.mountPoints(proc, wanted)
		if err != nil {
			errs = append(errs, fmt.Errorf("listing mounts: %w", err))
		}
		for _, p := range points {
			out = append(out, Piece{ID: p.id, Part: PartMount})
		}
		bundles, err := r.leftBundles(proc, wanted)
		if err != nil {
			errs = append(errs, fmt.Errorf("listing bundles: %w", err))
		}
		out = append(out, bundles...)
	}
	groups, err := r.freeCgroups(ctx, wanted)
	if err != nil {
		errs = append(errs, err)
	}
	out = append(out, groups...)
	logs, err := r.logs(wanted)
	if err != nil {
		errs = append(errs, fmt.Errorf("listing logs: %w", err))
	}
	return append(out, logs...), errors.Join(errs...)
}

// freeCgroups are the cgroups of ours that are empty, or in which something runs as a task of this containerd.
func (r *Remover) freeCgroups(ctx context.Context, wanted func(id string) bool) ([]Piece, error) {
	all := r.cgroups()
	maps.DeleteFunc(all, func(id, _ string) bool { return !wanted(id) })
	if len(all) == 0 {
		return nil, nil
	}
	known, err := r.taskIDs(ctx)
	if err != nil {
		return nil, err
	}
	var out []Piece
	for id, path := range all {
		if known[id] || len(r.members(path)) == 0 {
			out = append(out, Piece{ID: id, Part: PartCgroup, Path: path, Owner: podOf(path)})
		}
	}
	return out, nil
}

// taskIDs are the ids of all tasks, of those without a record as well.
func (r *Remover) taskIDs(ctx context.Context) (map[string]bool, error) {
	step, cancel := r.step(ctx)
	defer cancel()
	resp, err := r.Client.TaskService().List(step, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing tasks: %w", errgrpc.ToNative(err))
	}
	ids := make(map[string]bool, len(resp.GetTasks()))
	for _, t := range resp.GetTasks() {
		ids[t.GetID()] = true
	}
	return ids, nil
}

// logs are the log directories of the containers that are wanted, those that are being made among them.
func (r *Remover) logs(wanted func(id string) bool) ([]Piece, error) {
	if r.LogRoot == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(r.LogRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Piece
	for _, e := range entries {
		p := Piece{ID: e.Name(), Part: PartLog, Path: filepath.Join(r.LogRoot, e.Name())}
		name, isNew := strings.CutPrefix(e.Name(), NewLogPrefix)
		if isNew {
			// The owner is a uid, 36 characters long.
			if p.ID = ""; len(name) > 37 {
				p.Owner, p.ID = name[:36], name[37:]
			}
		}
		if !e.IsDir() || !wanted(p.ID) {
			continue
		}
		if raw, err := os.ReadFile(filepath.Join(p.Path, OwnerFile)); err == nil && !isNew {
			p.Owner = string(raw)
		}
		p.Deleted, p.Written = modified(filepath.Join(p.Path, deletedFile)), modified(filepath.Join(p.Path, OutputFile))
		if p.Written.IsZero() {
			p.Written = modified(p.Path)
		}
		out = append(out, p)
	}
	return out, nil
}

// deletedFile, in a log directory, says that and when the container was deleted.
const deletedFile = "deleted"

// modified is when a file was written to; zero if there is none.
func modified(path string) time.Time {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// MarkDeleted notes in a container's log directory, if there is one, that the container is deleted.
func (r *Remover) MarkDeleted(id string) error {
	if r.LogRoot == "" || !validID(id) {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(r.LogRoot, id, deletedFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("marking the log of container %s: %w", id, err)
	}
	return f.Close()
}

// RemovePiece removes what has no container any more, with whatever containerd still runs of it. What is not there is removed
// already. The caller has made sure that the container has no record.
func (r *Remover) RemovePiece(ctx context.Context, p Piece) error {
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
	case PartFIFOs:
		return r.removeFIFOs(p.ID)
	case PartMount:
		return r.unmount(ctx, p.ID)
	case PartBundle:
		return r.removeBundle(ctx, p.ID)
	case PartCgroup:
		r.removeCgroup(p.Path)
		if r.cgroupExists(p.Path) {
			return fmt.Errorf("removing the cgroup of container %s, in which something runs: %w", p.ID, errdefs.ErrUnavailable)
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

// Measure is about how many bytes of disk a container's removal frees; what cannot be read counts nothing.
func (r *Remover) Measure(ctx context.Context, id string) int64 {
	if !validID(id) {
		return 0
	}
	known, err := r.look(ctx, id)
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
	if r.LogRoot != "" && !r.KeepLog {
		sum += diskUsage(filepath.Join(r.LogRoot, id))
	}
	return sum
}

// diskUsage is what the files below a directory take.
func diskUsage(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it went in this moment
		}
		if info, err := e.Info(); err == nil {
			if s, ok := info.Sys().(*syscall.Stat_t); ok {
				sum += s.Blocks * 512
			}
		}
		return nil
	})
	return sum
}
