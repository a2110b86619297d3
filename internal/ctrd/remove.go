package ctrd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sync/singleflight"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Remover takes containers away.
type Remover struct {
	// Client of containerd; every call is in its namespace.
	Client *client.Client
	// Snapshotter of containers whose record is gone already.
	Snapshotter string
	// LogRoot holds a directory for each container, named by its id; empty for none.
	LogRoot string
	// ProcRoot is where processes are seen (`/proc`). A shim that answers no more is looked for there and killed; in a
	// process namespace without the host's processes none is found, and the removal is retried by the caller.
	ProcRoot string
	// CgroupRoot is where cgroups are seen (`/sys/fs/cgroup`); empty for none.
	CgroupRoot string
	// FIFORoot holds the directories of FIFOs that containerd's clients make (`/run/containerd/fifo`); empty for not looking.
	FIFORoot string
	// HostProc is the /proc directory of a process in containerd's mount namespace (`/proc/1`), for mounts that were left
	// behind; ProcOfContainerd for containerd's own, below ProcRoot; empty for not looking.
	HostProc string
	// StateDir is the directory of containerd's state, as containerd sees it. Empty: DefaultStateDir.
	StateDir string
	// CgroupParents are the paths below the hierarchies' roots within which Survey looks for cgroups (`/kubepods`): others may
	// be of another containerd, for instance of a cluster within this host's containers.
	CgroupParents []string
	// KeepLog leaves the log directory, but for what a slot has in it.
	KeepLog bool
	// StepTimeout bounds each call to containerd. Zero: 5 s.
	StepTimeout time.Duration
	// Clock waits between retries. Nil: the real one.
	Clock clock.Clock
	// Before is told of each step of Remove before it is done; for tests.
	Before func(Step)

	lost singleflight.Group // the ends of tasks without a record
}

// Step is a part of a removal.
type Step string

// The steps of a removal, in their order.
const (
	StepTask     Step = "task"
	StepStrays   Step = "strays"
	StepMounts   Step = "mounts"
	StepFIFOs    Step = "fifos"
	StepLog      Step = "log"
	StepSnapshot Step = "snapshot"
	StepRecord   Step = "record"
)

// Steps are all steps, in their order.
func Steps() []Step {
	return []Step{StepTask, StepStrays, StepMounts, StepFIFOs, StepLog, StepSnapshot, StepRecord}
}

const (
	removeAttempts = 4
	strayTimeout   = 10 * time.Second
	strayInterval  = 50 * time.Millisecond
)

// Remove kills what runs of the container and removes its task, cgroup, mounts, FIFOs, log directory, snapshots and record,
// in this order: the record is the evidence, so it goes last, and a removal that was cut short can be done again. What is
// not there is removed already. It blocks for at most about 30 s; an error says what is left, and the call may be repeated.
func (r *Remover) Remove(ctx context.Context, id string) error {
	if !validID(id) {
		return fmt.Errorf("container id %q: %w", id, errdefs.ErrInvalidArgument)
	}
	known, err := r.look(ctx, id)
	if err != nil {
		return err
	}
	r.before(StepTask)
	had, err := r.removeTask(ctx, id)
	if err != nil {
		return err
	}
	r.before(StepStrays)
	if had {
		r.removeCgroup(known.cgroup)
	} else if err := r.removeStrays(ctx, id, known.group, known.cgroup); err != nil {
		return err
	}
	r.before(StepMounts)
	if err := r.unmount(ctx, id); err != nil {
		return err
	}
	r.before(StepFIFOs)
	if err := r.removeFIFOs(id); err != nil {
		return err
	}
	r.before(StepLog)
	if err := r.removeLog(id); err != nil {
		return err
	}
	r.before(StepSnapshot)
	if err := r.removeSnapshots(ctx, known); err != nil {
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

// holdings are what a container's record says that it has.
type holdings struct {
	snapshots     []snapshotRef
	cgroup, group string
}

type snapshotRef struct{ snapshotter, key string }

// look reads what a container's record says; of one without a record, its snapshot has its name.
func (r *Remover) look(ctx context.Context, id string) (holdings, error) {
	step, cancel := r.step(ctx)
	defer cancel()
	info, err := r.Client.ContainerService().Get(step, id)
	switch {
	case errdefs.IsNotFound(err):
		return holdings{snapshots: []snapshotRef{{r.Snapshotter, id}}}, nil
	case err != nil:
		return holdings{}, fmt.Errorf("reading container %s: %w", id, err)
	}
	h := holdings{snapshots: snapshotsOf(info)}
	if len(h.snapshots) == 0 {
		h.snapshots = []snapshotRef{{r.Snapshotter, id}}
	}
	if info.Spec != nil {
		known := parseSpec(info.Spec.GetValue())
		h.cgroup = cgroupPath(known.Linux.CgroupsPath)
		if identity.IsSlotID(id) {
			h.group = known.Annotations[GroupAnnotation]
		}
	}
	return h, nil
}

// removeLog removes the log directory. An agent that looks at the log may make a file in the directory after it was read
// and before it is removed, which is no fault: then it is read again.
func (r *Remover) removeLog(id string) error {
	if r.LogRoot == "" {
		return nil
	}
	dir := filepath.Join(r.LogRoot, id)
	if r.KeepLog {
		dir = filepath.Join(dir, ClaimDir)
	}
	var err error
	for range removeAttempts {
		if err = os.RemoveAll(dir); !errors.Is(err, syscall.ENOTEMPTY) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("removing the log of container %s: %w", id, err)
	}
	return nil
}

// RemoveTask kills and deletes the container's task. A shim that does not answer is killed itself, after which
// containerd cleans up behind it.
func (r *Remover) RemoveTask(ctx context.Context, id string) error {
	_, err := r.removeTask(ctx, id)
	return err
}

// removeTask tells also whether containerd knew the task.
func (r *Remover) removeTask(ctx context.Context, id string) (bool, error) {
	var last error
	for attempt := range removeAttempts {
		if attempt > 0 {
			// What is gone and cannot be deleted (no such device: its cgroup or mount went first) is a shim's confusion.
			if errdefs.IsDeadlineExceeded(last) || errors.Is(last, context.DeadlineExceeded) || isBroken(last) || IsGone(last) {
				r.kill(r.strays(id))
			}
			select {
			case <-ctx.Done():
				return true, fmt.Errorf("removing task %s: %w", id, errors.Join(last, ctx.Err()))
			case <-r.clock().After(time.Duration(attempt) * 100 * time.Millisecond):
			}
		}
		var known bool
		if known, last = r.tryRemoveTask(ctx, id); last == nil {
			return known || attempt > 0, nil
		}
	}
	return true, fmt.Errorf("removing task %s: %w", id, last)
}

func (r *Remover) tryRemoveTask(ctx context.Context, id string) (known bool, err error) {
	step, cancel := r.step(ctx)
	defer cancel()
	service := r.Client.TaskService()
	// Deleting what has not ended is not tried: for a task that was created and never started, the shim takes many seconds
	// over it, in which it does nothing else.
	resp, err := service.Get(step, &tasks.GetRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil {
		if errdefs.IsNotFound(err) {
			return false, nil
		}
		return true, err
	}
	if resp.GetProcess().GetStatus() != task.Status_STOPPED {
		// It may end in this moment, which shims say in words of their own: killing what is dead is no error.
		_, err = service.Kill(step, &tasks.KillRequest{ContainerID: id, Signal: uint32(syscall.SIGKILL), All: true})
		if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) && !IsGone(err) {
			return true, err
		}
		_, err = service.Wait(step, &tasks.WaitRequest{ContainerID: id})
		if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) && !IsGone(err) {
			return true, err
		}
	}
	_, err = service.Delete(step, &tasks.DeleteTaskRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return true, err
	}
	return true, nil
}

// IsGone tells whether an error of a task's call says in other words that the process has ended.
func IsGone(err error) bool {
	if err == nil {
		return false
	}
	for _, s := range []string{"process already finished", "no such process", "no such device", "container not running", "container is not running", "not created"} {
		if strings.Contains(err.Error(), s) {
			return true
		}
	}
	return false
}

// isBroken tells whether the shim's connection is broken: it died or is about to be cleaned up by containerd.
func isBroken(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "ttrpc: closed") || strings.Contains(err.Error(), "ttrpc: server closed") ||
		strings.Contains(err.Error(), "connection refused") && strings.Contains(err.Error(), "shim"))
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

func validID(id string) bool {
	return id != "" && id != "." && id != ".." && !strings.ContainsAny(id, "/\x00")
}
