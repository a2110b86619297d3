// Package disk ends sandboxes whose files take more disk, or are more in number, than they may: the node's disk is shared by all of
// them, and cgroups do not bound it. It measures the writable layers of running containers, one after another, and owns nothing. What a
// sandbox writes between two measurements is not bounded. Run is called once; Measured may be called concurrently.
package disk

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tree"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	// interval is the shortest time between two measurements of a container.
	interval = 10 * time.Second
	// share is the part of the time, as one in so many, that the measurements of one container may take: a layer is walked file by
	// file. A container with very many files thereby delays its own next measurement, and not those of others.
	share = 10
	// tick is the time after which the containers are looked through for those that are due.
	tick = time.Second
	// callTimeout bounds the time that one measurement blocks the others. That of a layer at the limit takes some seconds.
	callTimeout = time.Minute
)

// Reason is that of a sandbox that was ended.
const Reason = "DiskLimitExceeded"

// Sandboxes has the running sandboxes. sandbox.Manager implements it.
type Sandboxes interface {
	// Running returns the ids of the containers whose processes run.
	Running() []string
	// End ends the process of a container for a reason, which its report then has. One that has ended is no error.
	End(ctx context.Context, id, reason, message string) error
}

// Runtime measures containers. It is a part of runtime.Runtime.
type Runtime interface {
	// DiskUsage returns what a container's writable layer takes, or what of it exceeds the limit. NotFound: there is no such container.
	// tree.ErrTooDeep: its directories nest too deep to be measured.
	DiskUsage(ctx context.Context, id string, limit runtime.DiskUsage) (runtime.DiskUsage, error)
}

// Config is what a Watcher needs.
type Config struct {
	Runtime   Runtime
	Sandboxes Sandboxes
	// Limit of each sandbox; a field that is zero is no limit.
	Limit runtime.DiskUsage
	Clock clock.Clock
}

// Watcher ends sandboxes that exceed the limit. Make it with New.
type Watcher struct {
	config Config
	due    map[string]time.Time // when each running container is measured next; only of Run

	mu       sync.Mutex
	measured map[string]Measurement // the last one of each running container
}

// Measurement is what a container's files took at a time.
type Measurement struct {
	runtime.DiskUsage
	At time.Time
}

// New returns a Watcher. It does no I/O.
func New(cfg Config) *Watcher {
	return &Watcher{config: cfg, due: map[string]time.Time{}, measured: map[string]Measurement{}}
}

// Measured returns the last measurement of a running container; false if there is none.
func (w *Watcher) Measured(id string) (Measurement, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, ok := w.measured[id]
	return m, ok
}

// Run measures until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	if w.config.Limit == (runtime.DiskUsage{}) {
		<-ctx.Done()
		return nil
	}
	for {
		for _, id := range w.next() {
			took := w.measure(ctx, id)
			// However many containers are slow to measure, half of the time is left.
			if took > tick && !w.pause(ctx, took) {
				return nil
			}
		}
		if !w.pause(ctx, tick) {
			return nil
		}
	}
}

// next returns the running containers that are due, those that are due the longest first, and forgets the others.
func (w *Watcher) next() []string {
	now := w.config.Clock.Now()
	due, ids := map[string]time.Time{}, []string(nil)
	for _, id := range w.config.Sandboxes.Running() {
		at, ok := w.due[id]
		if !ok {
			at = now.Add(interval)
		}
		due[id] = at
		if !now.Before(at) {
			ids = append(ids, id)
		}
	}
	w.due = due
	w.mu.Lock()
	maps.DeleteFunc(w.measured, func(id string, _ Measurement) bool { return due[id].IsZero() })
	w.mu.Unlock()
	slices.SortFunc(ids, func(a, b string) int { return due[a].Compare(due[b]) })
	return ids
}

// pause waits; false means that ctx has ended.
func (w *Watcher) pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-w.config.Clock.After(d):
		return true
	}
}

// measure measures one container, ends it if it exceeds the limit, and returns how long that took.
func (w *Watcher) measure(ctx context.Context, id string) time.Duration {
	began := w.config.Clock.Now()
	w.check(ctx, id)
	took := w.config.Clock.Since(began)
	w.due[id] = began.Add(took + max(interval, took*(share-1)))
	return took
}

// check measures one container, and ends it if it exceeds the limit.
func (w *Watcher) check(ctx context.Context, id string) {
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeyContainer, id)
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	used, err := w.config.Runtime.DiskUsage(ctx, id, w.config.Limit)
	if err == nil {
		w.mu.Lock()
		w.measured[id] = Measurement{used, w.config.Clock.Now()}
		w.mu.Unlock()
	}
	message := exceeded(used, w.config.Limit)
	if errors.Is(err, tree.ErrTooDeep) {
		message = fmt.Sprintf("the sandbox's directories nest deeper than the %d allowed", tree.MaxDepth)
	}
	if message == "" {
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsUnavailable(err) && !errors.Is(err, context.Canceled) {
			log.Error(err, "measuring a sandbox's disk; will retry")
		}
		return
	}
	log.Info("ending sandbox that exceeds its disk limit", obs.KeyReason, message)
	if err := w.config.Sandboxes.End(ctx, id, Reason, message); err != nil {
		log.Error(err, "ending sandbox that exceeds its disk limit; will retry")
	}
}

// exceeded explains what exceeds the limit; empty for nothing.
func exceeded(used, limit runtime.DiskUsage) string {
	switch {
	case limit.Bytes > 0 && used.Bytes > limit.Bytes:
		return fmt.Sprintf("the sandbox's files take %d bytes of disk, more than the %d allowed", used.Bytes, limit.Bytes)
	case limit.Inodes > 0 && used.Inodes > limit.Inodes:
		return fmt.Sprintf("the sandbox has %d files, more than the %d allowed", used.Inodes, limit.Inodes)
	}
	return ""
}
