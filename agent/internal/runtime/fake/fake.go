// Package fake keeps containers in memory: a runtime.Runtime for tests, whose hooks fail and block calls, and whose commands
// say how processes end. It passes the conformance suite.
package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Op names a call, for hooks.
type Op string

// The calls.
const (
	OpPing   Op = "ping"
	OpPin    Op = "pin"
	OpImage  Op = "image"
	OpCreate Op = "create" // after the image
	OpTask   Op = "task"   // after the container
	OpStart  Op = "start"
	OpWait   Op = "wait"
	OpSignal Op = "signal"
	OpFinish Op = "finish"
	OpLabel  Op = "label"
	OpDelete Op = "delete"
	OpList   Op = "list"
	OpUsage  Op = "usage"
)

// Image is an image of the fake's registry.
type Image struct {
	// Missing: the registry does not have it. Away: the registry does not answer. NoUser: its user does not exist. Broken: it
	// cannot be unpacked.
	Missing, Away, NoUser, Broken bool
	// Local: it is on the node.
	Local bool
}

// Runtime is the fake. Make it with New.
type Runtime struct {
	mu         sync.Mutex
	hook       func(ctx context.Context, op Op, id string) error
	images     map[string]Image
	containers map[string]*container
	watchers   map[int]func()
	next       int
	deleted    []string
	pinned     []string
}

type container struct {
	spec   runtime.Container
	found  runtime.Found
	exit   runtime.Exit
	slot   bool // not claimed
	ended  chan struct{}
	onTERM int32
	// handles: the process catches SIGTERM; lingers: it then runs on.
	handles, lingers bool
}

var _ runtime.Runtime = (*Runtime)(nil)

// New returns a fake with images, by normalized reference.
func New(images map[string]Image) *Runtime {
	return &Runtime{images: maps.Clone(images), containers: map[string]*container{}, watchers: map[int]func(){}}
}

// Hook makes every call run f first; f may fail it or block it. It runs without the fake's lock.
func (r *Runtime) Hook(f func(ctx context.Context, op Op, id string) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = f
}

func (r *Runtime) enter(ctx context.Context, op Op, id string) error {
	r.mu.Lock()
	hook := r.hook
	r.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, op, id); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// IDs returns the containers that exist, sorted.
func (r *Runtime) IDs() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.containers))
}

// Deleted returns the ids that Delete was called with, in order.
func (r *Runtime) Deleted() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.deleted)
}

// Exit ends the process of a container.
func (r *Runtime) Exit(id string, exit runtime.Exit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.containers[id]; ok {
		c.end(exit)
	}
}

// Put adds a container as an earlier agent process may have left it.
func (r *Runtime) Put(f runtime.Found, exit runtime.Exit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &container{found: f, exit: exit, ended: make(chan struct{})}
	if f.Task == runtime.TaskStopped {
		close(c.ended)
	}
	r.containers[f.ID] = c
}

// Found returns what List would report of a container.
func (r *Runtime) Found(id string) (runtime.Found, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	if !ok {
		return runtime.Found{}, false
	}
	return c.snapshot(), true
}

// Spec returns what a container was created with.
func (r *Runtime) Spec(id string) (runtime.Container, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.containers[id]
	if !ok {
		return runtime.Container{}, false
	}
	return c.spec, true
}

func (c *container) snapshot() runtime.Found {
	f := c.found
	f.Labels = maps.Clone(f.Labels)
	return f
}

// end is called with the lock held.
func (c *container) end(exit runtime.Exit) {
	if c.found.Task != runtime.TaskRunning {
		return
	}
	if exit.At.IsZero() {
		exit.At = time.Now()
	}
	c.exit, c.found.Task = exit, runtime.TaskStopped
	close(c.ended)
}

// Ping implements runtime.Runtime.
func (r *Runtime) Ping(ctx context.Context) error { return r.enter(ctx, OpPing, "") }

// Images lists the local images.
func (r *Runtime) Images(context.Context) ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for name, img := range r.images {
		if img.Local {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// PinImages remembers the images.
func (r *Runtime) PinImages(ctx context.Context, listed []string) error {
	if err := r.enter(ctx, OpPin, ""); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pinned = nil
	for _, name := range listed {
		if r.images[name].Local {
			r.pinned = append(r.pinned, name)
		}
	}
	return nil
}

// Pinned returns the images that the last PinImages protected.
func (r *Runtime) Pinned() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.pinned)
}

// SetImage adds or replaces an image.
func (r *Runtime) SetImage(name string, img Image) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.images[name] = img
}

// WatchImages waits; a pull calls changed.
func (r *Runtime) WatchImages(ctx context.Context, changed func()) error {
	r.mu.Lock()
	id := r.next
	r.next++
	r.watchers[id] = changed
	r.mu.Unlock()
	<-ctx.Done()
	r.mu.Lock()
	delete(r.watchers, id)
	r.mu.Unlock()
	return nil
}

// Pull makes an image local.
func (r *Runtime) Pull(ctx context.Context, ref string, progress func(runtime.Progress)) (string, error) {
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return "", err
	}
	if err := r.enter(ctx, OpImage, name); err != nil {
		return "", err
	}
	r.mu.Lock()
	img, known := r.images[name]
	switch {
	case !known || img.Missing:
		err = fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no image %s", name)
	case img.Away:
		err = fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "image %s could not be pulled", name)
	case img.Broken:
		err = fault.New(errdefs.ErrFailedPrecondition, fault.ImageInvalid, "image %s is broken", name)
	default:
		img.Local = true
		r.images[name] = img
	}
	watchers := slices.Collect(maps.Values(r.watchers))
	r.mu.Unlock()
	if err != nil {
		return "", err
	}
	for _, w := range watchers {
		w()
	}
	if progress != nil {
		progress(runtime.Progress{Phase: runtime.PhaseDone})
	}
	return name, nil
}

// Create keeps the container.
func (r *Runtime) Create(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error {
	r.mu.Lock()
	_, exists := r.containers[c.ID]
	r.mu.Unlock()
	if exists {
		return fmt.Errorf("container %s: %w", c.ID, errdefs.ErrAlreadyExists)
	}
	if err := r.ensure(ctx, c); err != nil {
		return err
	}
	reached(runtime.StageImage)
	if err := r.checkUser(c); err != nil {
		return err
	}
	if err := r.enter(ctx, OpCreate, c.ID); err != nil {
		return err
	}
	reached(runtime.StageSnapshot)
	r.mu.Lock()
	r.containers[c.ID] = &container{spec: c, ended: make(chan struct{}), found: runtime.Found{
		ID: c.ID, Labels: maps.Clone(c.Labels), Record: c.Record, CreatedAt: time.Now(),
	}}
	r.mu.Unlock()
	reached(runtime.StageContainer)
	if err := r.enter(ctx, OpTask, c.ID); err != nil {
		return err
	}
	if err := check(c); err != nil {
		return err
	}
	r.mu.Lock()
	r.containers[c.ID].found.Task = runtime.TaskCreated
	r.mu.Unlock()
	reached(runtime.StageTask)
	return nil
}

// ensure pulls the container's image if it is not on the node.
func (r *Runtime) ensure(ctx context.Context, c runtime.Container) error {
	name, err := runtime.NormalizeImage(c.Image)
	if err != nil {
		return err
	}
	r.mu.Lock()
	img := r.images[name]
	r.mu.Unlock()
	if !img.Local {
		_, err = r.Pull(ctx, name, nil)
	}
	return err
}

func (r *Runtime) checkUser(c runtime.Container) error {
	name, err := runtime.NormalizeImage(c.Image)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.images[name].NoUser {
		return fault.New(errdefs.ErrFailedPrecondition, fault.UserNotFound, "image %s has no such user", name)
	}
	return nil
}

// check fails commands that the conformance suite's image does not have.
func check(c runtime.Container) error {
	if len(c.Command) == 0 {
		return nil
	}
	switch command := c.Command[0]; {
	case slices.ContainsFunc(c.Args, func(a string) bool { return len(a) > 128<<10 }):
		return fault.Field("spec.args", "too long")
	case c.WorkingDir == "/data.txt":
		return fault.New(errdefs.ErrFailedPrecondition, fault.WorkingDirInvalid, "no directory")
	case command == "/data.txt" || command == "/etc":
		return fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotExecutable, "cannot execute")
	case strings.Contains(command, "nope"):
		return fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "no command")
	}
	return nil
}
