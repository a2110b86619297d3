package slot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	// checkInterval is how often the machine's memory and the time are checked.
	checkInterval = time.Second
	// yieldDelay is how long the start of a missing slot waits for creates that run.
	yieldDelay = 500 * time.Millisecond
	// groupSize is how many slots share a shim. More would save memory, and lose more sandboxes with a shim.
	groupSize = 8
	// cleaners is how many slots are removed concurrently.
	cleaners      = 2
	startTimeout  = 30 * time.Second
	removeTimeout = 45 * time.Second
	endTimeout    = 10 * time.Second
	// reportAfter is how many starts in a row have to fail before that is reported.
	reportAfter = 3
)

// retries is the policy of starts and removals that fail.
var retries = backoff.Policy{Initial: 500 * time.Millisecond, Max: 30 * time.Second}

// Run keeps the slots until ctx ends, and then removes those that are free: a slot ends with its agent. changed receives the
// status at first and after every change, in order.
func (p *Pool) Run(ctx context.Context, changed func(*agentv1.SlotStatus)) error {
	log := logr.FromContextOrDiscard(ctx)
	if err := p.config.Runtime.Unsupported(ctx); err != nil {
		p.mu.Lock()
		p.never = err.Error()
		p.mu.Unlock()
		log.Info("slots are off; sandboxes take the cold path", obs.KeyReason, err.Error())
	}
	ticker := p.clock.NewTicker(checkInterval)
	defer ticker.Stop()
	p.checkMemory(log)
	for reported := (*agentv1.SlotStatus)(nil); ; {
		if now := p.reconcile(ctx, log); reported == nil || !proto.Equal(now, reported) {
			reported = now
			changed(now)
		}
		select {
		case <-ctx.Done():
			p.end(ctx, log)
			return nil
		case <-p.wake:
		case <-ticker.C():
			p.checkMemory(log)
		}
	}
}

// checkMemory notes whether the machine's memory is short.
func (p *Pool) checkMemory(log logr.Logger) {
	memory, err := p.config.Memory()
	if err != nil {
		log.V(2).Info("reading the machine's memory failed", obs.KeyError, err.Error())
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := memory.short(p.short); now != p.short {
		p.short = now
		log.Info("memory changed", obs.KeyMemoryShort, now, obs.KeyAvailableBytes, memory.Available)
	}
}

// reconcile begins the work that the state calls for and returns the status.
func (p *Pool) reconcile(ctx context.Context, log logr.Logger) *agentv1.SlotStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return p.status()
	}
	for len(p.free) > p.want()+p.busy {
		p.free[0].unwatch()
		p.garbage = append(p.garbage, p.free[0].id)
		p.free = slices.Delete(p.free, 0, 1)
	}
	for len(p.garbage) > 0 && p.cleaning < cleaners {
		id := p.garbage[0]
		p.garbage = p.garbage[1:]
		p.cleaning++
		p.wg.Go(func() { p.clean(ctx, id, log) })
	}
	for p.mayStart() {
		p.starting++
		id := identity.SlotID(strings.ReplaceAll(uuid.NewString(), "-", "")[:20])
		group := p.groupOf(id)
		p.wg.Go(func() { p.start(ctx, id, group, log) })
	}
	p.warm(ctx, log)
	return p.status()
}

// mayStart reports whether a slot is missing and may be started now. mu is held.
func (p *Pool) mayStart() bool {
	now := p.clock.Now()
	if len(p.free)+p.starting >= p.want() {
		p.missing = time.Time{}
		return false
	}
	if p.missing.IsZero() {
		p.missing = now
	}
	if now.Before(p.notUntil) {
		return false
	}
	if p.busy == 0 && p.failures == 0 {
		return p.starting < p.config.Starters
	}
	// Beside creates, and after a failure, one at a time.
	return p.starting == 0 && (p.busy == 0 || now.Sub(p.missing) >= yieldDelay)
}

// groupOf returns the group of a new slot; the first slot of a group gives it its name. mu is held.
func (p *Pool) groupOf(id string) string {
	if p.members%groupSize == 0 {
		p.group = id
	}
	p.members++
	return p.group
}

// start starts one slot.
func (p *Pool) start(ctx context.Context, id, group string, log logr.Logger) {
	f := &free{id: id}
	err := p.startSlot(ctx, id, group)
	p.mu.Lock()
	p.starting--
	if err == nil {
		p.failures, p.missing = 0, time.Time{}
		p.retry.Reset()
		var watch context.Context
		watch, f.unwatch = context.WithCancel(ctx)
		p.free = append(p.free, f)
		p.wg.Go(func() { p.watch(watch, f, log) })
	} else {
		p.garbage = append(p.garbage, id)
		p.fail(err)
	}
	p.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		log.Info("starting slot failed", obs.KeyContainer, id, obs.KeyError, err.Error())
	}
	p.poke()
}

// fail notes that a slot could not be started, or ended by itself. mu is held.
func (p *Pool) fail(err error) {
	p.failures++
	p.members = 0 // the next slot gets a group of its own
	p.failure = publicMessage(err)
	p.notUntil = p.clock.Now().Add(p.retry.Next())
}

// publicMessage returns the part of an error that any caller may see.
func publicMessage(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "the agent's log has the error"
}

func (p *Pool) startSlot(ctx context.Context, id, group string) error {
	paths, err := p.config.Logs.Create(id, "")
	if err != nil {
		return runtime.Shortage(err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return runtime.Shortage(p.config.Runtime.StartSlot(ctx, runtime.Slot{
		ID: id, Group: group, LogPath: paths.Output, HostnamePath: paths.Hostname,
		Labels: identity.Identity{
			AgentUID: p.config.AgentUID, AgentProcess: p.config.AgentProcess, Pool: p.config.AgentPool, State: identity.StateSlot,
		}.Labels(),
	}))
}

// watch waits for a free slot's process, which should not end by itself.
func (p *Pool) watch(ctx context.Context, f *free, log logr.Logger) {
	for {
		exit, err := p.config.Runtime.Wait(ctx, f.id)
		if ctx.Err() != nil {
			return
		}
		if err == nil || errdefs.IsNotFound(err) {
			log.Info("free slot ended", obs.KeyContainer, f.id, obs.KeyExitCode, exit.Code)
			p.change(func() {
				if i := slices.Index(p.free, f); i >= 0 {
					p.free = slices.Delete(p.free, i, i+1)
					p.garbage = append(p.garbage, f.id)
					p.fail(fmt.Errorf("slot %s ended: %w", f.id, errdefs.ErrUnavailable))
				}
			})
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-p.clock.After(checkInterval):
		}
	}
}

// warm prepares one free slot for a recently claimed image, if there is no other work. mu is held.
func (p *Pool) warm(ctx context.Context, log logr.Logger) {
	if len(p.recent) == 0 || p.busy > 0 || p.starting > 0 || p.warming {
		return
	}
	cold := slices.IndexFunc(p.free, func(f *free) bool { return f.image == "" })
	if cold < 0 {
		return
	}
	f, image := p.free[cold], p.rarest()
	f.image, p.warming = image, true
	p.wg.Go(func() {
		err := p.config.Runtime.WarmSlot(ctx, f.id, image)
		if err != nil && ctx.Err() == nil {
			log.V(2).Info("warming slot failed", obs.KeyContainer, f.id, obs.KeyImage, image, obs.KeyError, err.Error())
		}
		p.change(func() {
			p.warming = false
			if err != nil {
				f.image = ""
				p.recent = slices.DeleteFunc(p.recent, func(i string) bool { return i == image })
			}
		})
	})
}

// rarest returns the recently claimed image that the fewest free slots are warm for; the later one of equals. mu is held.
func (p *Pool) rarest() string {
	best, least := "", 0
	for _, image := range p.recent {
		n := 0
		for _, f := range p.free {
			if f.image == image {
				n++
			}
		}
		if best == "" || n < least {
			best, least = image, n
		}
	}
	return best
}

// clean removes what was a slot. It retries until that succeeds or ctx ends; the next agent process, or the janitor, removes
// what is left then.
func (p *Pool) clean(ctx context.Context, id string, log logr.Logger) {
	defer p.change(func() { p.cleaning-- })
	_ = backoff.Retry(ctx, p.clock, retries, func(ctx context.Context) error {
		err := p.remove(ctx, id)
		if err != nil {
			log.V(2).Info("removing slot failed; will retry", obs.KeyContainer, id, obs.KeyError, err.Error())
		}
		return err
	})
}

func (p *Pool) remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	p.config.Logs.Release(id)
	if err := p.config.Runtime.Delete(ctx, id); err != nil {
		return err
	}
	return p.config.Logs.Remove(id)
}

// end removes the free slots when the agent ends, as far as that succeeds within endTimeout.
func (p *Pool) end(ctx context.Context, log logr.Logger) {
	p.mu.Lock()
	var ids []string
	for _, f := range p.free {
		f.unwatch()
		ids = append(ids, f.id)
	}
	p.free = nil
	p.mu.Unlock()
	p.wg.Wait()
	p.mu.Lock()
	ids = append(ids, p.garbage...)
	p.garbage = nil
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	work := make(chan string)
	for range min(cleaners, len(ids)) {
		p.wg.Go(func() {
			for id := range work {
				if err := p.remove(ctx, id); err != nil {
					log.V(2).Info("removing slot at shutdown failed", obs.KeyContainer, id, obs.KeyError, err.Error())
				}
			}
		})
	}
	for _, id := range ids {
		select {
		case work <- id:
		case <-ctx.Done():
		}
	}
	close(work)
	p.wg.Wait()
}
