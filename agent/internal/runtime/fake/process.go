package fake

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
)

// Start runs the process: `exit N` in its command ends it with N at once, or, after `trap`, at SIGTERM; `true` ends it;
// everything else runs until it is killed; without a process, SIGTERM ends it; with `trap` and `linger` it catches SIGTERM and runs on.
func (r *Runtime) Start(ctx context.Context, id string) error {
	if err := r.enter(ctx, OpStart, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	if !ok {
		return fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	}
	c.found.Task = runtime.TaskRunning
	line := strings.Join(c.spec.Command, " ")
	code := int32(0)
	match := regexp.MustCompile(`exit (\d+)`).FindStringSubmatch(line)
	if match != nil {
		n, err := strconv.ParseInt(match[1], 10, 32)
		if err != nil {
			return err
		}
		code = int32(n)
	}
	switch {
	case c.spec.KeepAlive:
		c.handles, c.onTERM = true, 128+int32(syscall.SIGTERM)
	case strings.Contains(line, "trap"):
		c.handles, c.lingers, c.onTERM = true, strings.Contains(line, "linger"), code
	case match != nil || strings.HasSuffix(line, "true"):
		c.end(runtime.Exit{Code: code})
	}
	return nil
}

// Wait waits for the process.
func (r *Runtime) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	if err := r.enter(ctx, OpWait, id); err != nil {
		return runtime.Exit{}, err
	}
	r.mu.Lock()
	c, ok := r.containers[id]
	ok = ok && c.found.Task != runtime.TaskNone
	r.mu.Unlock()
	if !ok {
		return runtime.Exit{}, fmt.Errorf("task %s: %w", id, errdefs.ErrNotFound)
	}
	select {
	case <-c.ended:
		r.mu.Lock()
		defer r.mu.Unlock()
		return c.exit, nil
	case <-ctx.Done():
		return runtime.Exit{}, ctx.Err()
	}
}

// Signal ends a process as it handles signals: SIGKILL always does.
func (r *Runtime) Signal(ctx context.Context, id string, sig syscall.Signal, _ bool) error {
	if err := r.enter(ctx, OpSignal, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	if !ok || c.found.Task == runtime.TaskNone {
		return fmt.Errorf("task %s: %w", id, errdefs.ErrNotFound)
	}
	switch {
	case sig == syscall.SIGKILL:
		c.end(runtime.Exit{Code: 128 + int32(syscall.SIGKILL)})
	case sig == syscall.SIGTERM && c.handles && !c.lingers:
		c.end(runtime.Exit{Code: c.onTERM})
	}
	return nil
}

// HandlesSignal reports whether the process has a trap.
func (r *Runtime) HandlesSignal(_ context.Context, id string, sig syscall.Signal) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	return !ok || (sig == syscall.SIGTERM && c.handles)
}

// DiskUsage returns nothing: a container uses no disk.
func (r *Runtime) DiskUsage(ctx context.Context, id string, _ runtime.DiskUsage) (runtime.DiskUsage, error) {
	if err := r.enter(ctx, OpUsage, id); err != nil {
		return runtime.DiskUsage{}, err
	}
	if _, ok := r.Found(id); !ok {
		return runtime.DiskUsage{}, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	}
	return runtime.DiskUsage{}, nil
}

// Finish stores the report and drops the task.
func (r *Runtime) Finish(ctx context.Context, id string, report *anypb.Any) error {
	if err := r.enter(ctx, OpFinish, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	if !ok {
		return fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	}
	c.end(runtime.Exit{Code: 128 + int32(syscall.SIGKILL)})
	c.found.Report, c.found.Task = report, runtime.TaskNone
	return nil
}

// SetLabel sets a label.
func (r *Runtime) SetLabel(ctx context.Context, id, key, value string) error {
	if err := r.enter(ctx, OpLabel, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	if !ok {
		return fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	}
	if c.found.Labels == nil {
		c.found.Labels = map[string]string{}
	}
	c.found.Labels[key] = value
	return nil
}

// Delete removes the container and its log directory.
func (r *Runtime) Delete(ctx context.Context, id string) error {
	if err := r.enter(ctx, OpDelete, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deleted = append(r.deleted, id)
	c, ok := r.containers[id]
	if !ok {
		return nil
	}
	c.end(runtime.Exit{Code: 128 + int32(syscall.SIGKILL)})
	delete(r.containers, id)
	if c.spec.LogPath == "" {
		return nil
	}
	return os.RemoveAll(filepath.Dir(c.spec.LogPath))
}

// List selects containers.
func (r *Runtime) List(ctx context.Context, labels map[string]string) ([]runtime.Found, error) {
	if err := r.enter(ctx, OpList, ""); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []runtime.Found
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		f := r.containers[id].snapshot()
		match := true
		for k, v := range labels {
			match = match && f.Labels[k] == v
		}
		if match {
			out = append(out, f)
		}
	}
	return out, nil
}
