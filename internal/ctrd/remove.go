package ctrd

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/singleflight"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// Remover removes containers completely.
type Remover struct {
	// Client of containerd; every call is in its namespace.
	Client *client.Client
	// Snapshotter of containers without a record.
	Snapshotter string
	// Ranges are those of the containers' user namespaces; without a directory there are none.
	Ranges idrange.Ranges
	// LogRoot holds a directory for each container, named by its id; empty for none.
	LogRoot string
	// ProcRoot is where processes are visible (`/proc`). A shim that does not answer is searched there and killed. In a PID
	// namespace without the host's processes none is found, and the caller has to retry the removal.
	ProcRoot string
	// CgroupRoot is where cgroups are mounted (`/sys/fs/cgroup`); empty for none.
	CgroupRoot string
	// FIFORoot holds the directories of FIFOs that containerd's clients create (`/run/containerd/fifo`); empty to skip FIFOs.
	FIFORoot string
	// HostProc is the /proc directory of a process in containerd's mount namespace (`/proc/1`), to find mounts that were left;
	// ProcOfContainerd for containerd's own process, below ProcRoot; empty to skip mounts.
	HostProc string
	// StateDir is the directory of containerd's state, in containerd's mount namespace. Empty: DefaultStateDir.
	StateDir string
	// CgroupParents are the paths below the hierarchies' roots that Inventory searches for cgroups (`/kubepods`). Others may
	// belong to another containerd, for instance of a cluster within this host's containers.
	CgroupParents []string
	// KeepLog keeps the log directory, except a slot's private directory in it.
	KeepLog bool
	// JoinsGroup reports whether a container of this group is being created, or may be created, by this process: then the group's
	// shim is not ended. It must not turn true again once it was false. Nil: no container is.
	JoinsGroup func(group string) bool
	// StepTimeout bounds each call to containerd. Zero: 5 s.
	StepTimeout time.Duration
	// Clock waits between retries. Nil: the real one.
	Clock clock.Clock
	// Before is called before each step of Remove; for tests.
	Before func(Step)

	lost    singleflight.Group // of endLost
	leaving leaving            // containers whose records are about to be removed
}

// Step is a part of a removal.
type Step string

// The steps of a removal, in order.
const (
	StepTask     Step = "task"
	StepStrays   Step = "strays"
	StepMounts   Step = "mounts"
	StepFIFOs    Step = "fifos"
	StepLog      Step = "log"
	StepSnapshot Step = "snapshot"
	StepRange    Step = "range"
	StepShim     Step = "shim"
	StepRecord   Step = "record"
)

// Steps returns all steps, in order.
func Steps() []Step {
	return []Step{StepTask, StepStrays, StepMounts, StepFIFOs, StepLog, StepSnapshot, StepRange, StepShim, StepRecord}
}

// Remove kills the container's processes and removes its task, cgroup, mounts, FIFOs, log directory and snapshots, releases its user ids, and
// removes the shim of its group if no other container of the group is left, and its record, in this order: the record is the evidence, so it is removed last,
// and an interrupted removal can be repeated. Parts that do not exist are skipped. It blocks for at most about 30 s; an error says
// what is left. Safe to repeat.
func (r *Remover) Remove(ctx context.Context, id string) error {
	if !validID(id) {
		return fmt.Errorf("container id %q: %w", id, errdefs.ErrInvalidArgument)
	}
	known, err := r.inspect(ctx, id)
	if err != nil {
		return err
	}
	r.before(StepTask)
	had, err := r.tasks().remove(ctx, id)
	if err != nil {
		return err
	}
	r.before(StepStrays)
	if had {
		r.cgroups().remove(known.cgroup)
	} else if err := r.removeStrays(ctx, id, known.cgroup); err != nil {
		return err
	}
	r.before(StepMounts)
	if err := r.unmount(ctx, id); err != nil {
		return err
	}
	r.before(StepFIFOs)
	if err := fifoDir(r.FIFORoot).remove(id); err != nil {
		return err
	}
	r.before(StepLog)
	if err := r.logs().remove(id); err != nil {
		return err
	}
	r.before(StepSnapshot)
	if err := r.removeSnapshots(ctx, known); err != nil {
		return err
	}
	r.before(StepRange)
	if err := r.releaseIDs(id, known); err != nil {
		return err
	}
	defer r.leaving.enter(id, known.group)()
	r.before(StepShim)
	if err := r.endShim(ctx, id, known.group); err != nil {
		return err
	}
	r.before(StepRecord)
	step, cancel := r.step(ctx)
	defer cancel()
	if err := r.Client.ContainerService().Delete(step, id); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	return nil
}

func (r *Remover) before(s Step) {
	if r.Before != nil {
		r.Before(s)
	}
}

// holdings is what a container's record references.
type holdings struct {
	snapshots     []snapshotRef
	cgroup, group string
	// recorded is false for a container without a record. firstID is the first of its user ids; zero for none.
	recorded bool
	firstID  uint32
}

type snapshotRef struct{ snapshotter, key string }

// inspect reads a container's record. Without a record the container's snapshot is the one with its id.
func (r *Remover) inspect(ctx context.Context, id string) (holdings, error) {
	step, cancel := r.step(ctx)
	defer cancel()
	info, err := r.Client.ContainerService().Get(step, id)
	switch {
	case errdefs.IsNotFound(err):
		return holdings{snapshots: []snapshotRef{{r.Snapshotter, id}}}, nil
	case err != nil:
		return holdings{}, fmt.Errorf("reading container %s: %w", id, err)
	}
	h := holdings{snapshots: snapshotsOf(info), recorded: true}
	if len(h.snapshots) == 0 {
		h.snapshots = []snapshotRef{{r.Snapshotter, id}}
	}
	if info.Spec != nil {
		known := parseSpec(info.Spec.GetValue())
		h.cgroup, h.firstID = node.CgroupPath(known.Linux.CgroupsPath), known.firstID()
		if identity.IsSlotID(id) || info.SandboxID != "" {
			h.group = known.Annotations[GroupAnnotation]
		}
	}
	return h, nil
}

// releaseIDs releases the container's user ids: nothing is left that could use them.
func (r *Remover) releaseIDs(id string, known holdings) error {
	if r.Ranges.Dir == "" {
		return nil
	}
	if known.recorded {
		if known.firstID == 0 {
			return nil
		}
		return r.Ranges.Release(known.firstID, id)
	}
	held, err := r.Ranges.List()
	if err != nil {
		return err
	}
	for _, h := range held {
		if h.ID == id {
			return r.Ranges.Release(h.First, id)
		}
	}
	return nil
}

// RemoveTask kills and deletes the container's task. A shim that does not answer is killed, after which containerd cleans up.
func (r *Remover) RemoveTask(ctx context.Context, id string) error {
	_, err := r.tasks().remove(ctx, id)
	return err
}

func (r *Remover) step(ctx context.Context) (context.Context, context.CancelFunc) {
	d := r.StepTimeout
	if d == 0 {
		d = 5 * time.Second
	}
	return context.WithTimeout(ctx, d)
}

func (r *Remover) clock() clock.Clock {
	if r.Clock != nil {
		return r.Clock
	}
	return clock.RealClock{}
}

// The parts of the host that a removal needs, each a view of this Remover's fields.

func (r *Remover) processes() processes {
	return processes{root: r.ProcRoot, namespace: r.Client.DefaultNamespace()}
}

func (r *Remover) cgroups() cgroups { return cgroups{root: r.CgroupRoot, parents: r.CgroupParents} }

func (r *Remover) logs() logs { return logs{root: r.LogRoot, keep: r.KeepLog} }

func (r *Remover) tasks() *taskSet {
	return &taskSet{client: r.Client, processes: r.processes(), clock: r.clock(), step: r.step}
}

func validID(id string) bool {
	return id != "" && id != "." && id != ".." && !strings.ContainsAny(id, "/\x00")
}
