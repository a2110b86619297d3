package ctrd

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

const (
	// shimGrace is how long the shim of a group has to end by itself after the group's last task was deleted.
	shimGrace = 2 * time.Second
	// shimTimeout is how long a removal waits for the shim's end.
	shimTimeout = 5 * time.Second
)

// shimPolls is the policy of checks whether a shim has ended, which takes it a few milliseconds.
var shimPolls = backoff.Policy{Initial: 5 * time.Millisecond, Max: 100 * time.Millisecond}

// leaving holds, by group, the containers without a task whose records are about to be removed. Of two concurrent removals at
// least the one that enters later finds the other here or without a record, and so ends the shim.
type leaving struct {
	mu  sync.Mutex
	ids map[string]map[string]bool
}

// enter adds a container until done is called.
func (l *leaving) enter(id, group string) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ids[group] == nil {
		if l.ids == nil {
			l.ids = map[string]map[string]bool{}
		}
		l.ids[group] = map[string]bool{}
	}
	l.ids[group][id] = true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if delete(l.ids[group], id); len(l.ids[group]) == 0 {
			delete(l.ids, group)
		}
	}
}

// of returns the containers of a group.
func (l *leaving) of(group string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]string, 0, len(l.ids[group]))
	for id := range l.ids[group] {
		out = append(out, id)
	}
	return out
}

// endShim ends the shim of a slot's group if no other container of the group has a record. Usually the shim has ended by itself
// then. It has not if the client of a create ended at the wrong moment: containerd cancels the create, asks the shim, which does
// not know the task yet, to delete it, and the shim then keeps a task that containerd does not know. A create makes the record
// before it joins the shim, so a shim without a record in its group serves no create, except one that JoinsGroup reports.
func (r *Remover) endShim(ctx context.Context, id, group string) error {
	if group == "" || (r.JoinsGroup != nil && r.JoinsGroup(group)) {
		return nil
	}
	if identity.IsShimID(group) {
		return r.endAnchor(ctx, group)
	}
	host := r.processes()
	shims := host.shims(group, id)
	if len(shims) == 0 {
		return nil
	}
	used, err := r.groupHasRecord(ctx, group, r.leaving.of(group))
	if err != nil || used {
		return err
	}
	begun, polls := r.clock().Now(), backoff.New(r.clock(), shimPolls)
	for {
		if shims = slices.DeleteFunc(shims, func(pid int) bool { return !host.isShim(pid, group, id) }); len(shims) == 0 {
			return nil
		}
		waited := r.clock().Since(begun)
		if waited >= shimTimeout {
			return fmt.Errorf("ending the shim of group %s: %w", group, errdefs.ErrUnavailable)
		}
		if waited >= shimGrace {
			shims = slices.DeleteFunc(shims, host.hasChild) // it runs a task without a record
			for _, pid := range shims {
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended meanwhile
			}
		}
		if err := polls.Wait(ctx); err != nil {
			return fmt.Errorf("ending the shim of group %s: %w", group, err)
		}
	}
}

// endAnchor ends a shim of ours, by its anchor, if no other container of the shim has a record.
func (r *Remover) endAnchor(ctx context.Context, anchor string) error {
	used, err := r.groupHasRecord(ctx, anchor, r.leaving.of(anchor))
	if err != nil || used {
		return err
	}
	return r.removeAnchor(ctx, anchor)
}

// removeAnchor ends a shim of ours, and removes its anchor and its record. A containerd that was killed while it started the shim knows no task
// of it, but the process may run.
func (r *Remover) removeAnchor(ctx context.Context, anchor string) error {
	known, err := r.tasks().remove(ctx, anchor)
	if err != nil {
		return fmt.Errorf("ending shim %s: %w", anchor, err)
	}
	if !known {
		if err := r.killShims(ctx, anchor); err != nil {
			return err
		}
	}
	step, cancel := r.step(ctx)
	defer cancel()
	return RemoveAnchor(step, r.Client, anchor)
}

// killShims kills the shim of an anchor, and the process that may be about to start it, and waits until none is left.
func (r *Remover) killShims(ctx context.Context, anchor string) error {
	begun, polls := r.clock().Now(), backoff.New(r.clock(), shimPolls)
	for {
		pids := r.processes().shims(anchor)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended meanwhile
		}
		if r.clock().Since(begun) >= shimTimeout {
			return fmt.Errorf("ending shim %s: %w", anchor, errdefs.ErrUnavailable)
		}
		if err := polls.Wait(ctx); err != nil {
			return fmt.Errorf("ending shim %s: %w", anchor, err)
		}
	}
}

// RemoveAnchor removes the anchor of a shim of ours, with its task if it has one.
func RemoveAnchor(ctx context.Context, c *client.Client, anchor string) error {
	service := c.TaskService()
	for _, call := range []func() error{
		func() error {
			_, err := service.Kill(ctx, &tasks.KillRequest{ContainerID: anchor, Signal: uint32(syscall.SIGKILL), All: true})
			return err
		},
		func() error {
			_, err := service.Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: anchor})
			return err
		},
	} {
		// A shim that has ended is cleaned up by containerd.
		if err := errgrpc.ToNative(call()); err != nil && !errdefs.IsNotFound(err) && !IsGone(err) && !isBroken(err) {
			return fmt.Errorf("ending shim %s: %w", anchor, err)
		}
	}
	if err := c.ContainerService().Delete(ctx, anchor); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing the anchor of shim %s: %w", anchor, err)
	}
	if err := c.SandboxStore().Delete(ctx, anchor); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing the record of shim %s: %w", anchor, err)
	}
	return nil
}

// groupHasRecord reports whether a container of the group has a record, besides those in except.
func (r *Remover) groupHasRecord(ctx context.Context, group string, except []string) (bool, error) {
	step, cancel := r.step(ctx)
	defer cancel()
	list, err := r.Client.ContainerService().List(step, fmt.Sprintf("labels.%q==true", identity.KeyManaged))
	if err != nil {
		return false, fmt.Errorf("listing the containers of group %s: %w", group, err)
	}
	for _, c := range list {
		if c.Spec != nil && !slices.Contains(except, c.ID) && parseSpec(c.Spec.GetValue()).Annotations[GroupAnnotation] == group {
			return true, nil
		}
	}
	return false, nil
}
