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
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

const (
	// lookInterval is how often memory is looked at, and what nobody told of.
	lookInterval = time.Second
	// politeness is how long a missing slot lets creates go first.
	politeness = 500 * time.Millisecond
	// groupSize is how many slots share a shim. More would save memory, and lose more sandboxes with a shim.
	groupSize = 8
	// cleaners is how many slots are removed side by side.
	cleaners           = 2
	startTimeout       = 30 * time.Second
	removeTimeout      = 45 * time.Second
	endTimeout         = 10 * time.Second
	retryMin, retryMax = 500 * time.Millisecond, 30 * time.Second
	// tellAfter is how many starts in a row have to fail before it is told.
	tellAfter = 3
)

// Run keeps the slots until ctx ends, and then removes those that are free: a slot dies with its agent. changed is told the
// status at first and at every change, one after the other.
func (p *Pool) Run(ctx context.Context, changed func(*agentv1.SlotStatus)) error {
	log := logr.FromContextOrDiscard(ctx)
	if err := p.config.Runtime.Unsupported(ctx); err != nil {
		p.mu.Lock()
		p.never = err.Error()
		p.mu.Unlock()
		log.Info("slots are off; sandboxes are started one by one", "why", err.Error())
	}
	ticker := p.clock.NewTicker(lookInterval)
	defer ticker.Stop()
	p.weigh(log)
	for told := (*agentv1.SlotStatus)(nil); ; {
		if now := p.look(ctx, log); told == nil || !proto.Equal(now, told) {
			told = now
			changed(now)
		}
		select {
		case <-ctx.Done():
			p.end(ctx, log)
			return nil
		case <-p.wake:
		case <-ticker.C():
			p.weigh(log)
		}
	}
}

// weigh looks at the machine's memory.
func (p *Pool) weigh(log logr.Logger) {
	memory, err := p.config.Memory()
	if err != nil {
		log.V(2).Info("reading the machine's memory", "err", err.Error())
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := memory.short(p.pressed); now != p.pressed {
		p.pressed = now
		log.Info("memory", "short", now, "availableBytes", memory.Available)
	}
}

// look begins what is to be done now and returns the status.
func (p *Pool) look(ctx context.Context, log logr.Logger) *agentv1.SlotStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return p.status()
	}
	for len(p.free) > p.want()+p.busy {
		p.free[0].forget()
		p.rubbish = append(p.rubbish, p.free[0].id)
		p.free = slices.Delete(p.free, 0, 1)
	}
	for len(p.rubbish) > 0 && p.cleaning < cleaners {
		id := p.rubbish[0]
		p.rubbish = p.rubbish[1:]
		p.cleaning++
		p.wg.Go(func() { p.clean(ctx, id, log) })
	}
	if p.mayStart() {
		p.starting++
		id := identity.SlotID(strings.ReplaceAll(uuid.NewString(), "-", "")[:20])
		group := p.groupOf(id)
		p.wg.Go(func() { p.start(ctx, id, group, log) })
	}
	p.warm(ctx, log)
	return p.status()
}

// mayStart tells whether a slot is missing and this is the moment to start it. mu is held.
func (p *Pool) mayStart() bool {
	now := p.clock.Now()
	if len(p.free)+p.starting >= p.want() {
		p.waiting = time.Time{}
		return false
	}
	if p.waiting.IsZero() {
		p.waiting = now
	}
	if p.starting > 0 || now.Before(p.notUntil) {
		return false
	}
	return p.busy == 0 || now.Sub(p.waiting) >= politeness
}

// groupOf is the group that the next slot goes into; the first of a group gives it its name. mu is held.
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
	err := p.bringUp(ctx, id, group)
	p.mu.Lock()
	p.starting--
	if err == nil {
		p.failures, p.waiting = 0, time.Time{}
		var watch context.Context
		watch, f.forget = context.WithCancel(ctx)
		p.free = append(p.free, f)
		p.wg.Go(func() { p.watch(watch, f, log) })
	} else {
		p.rubbish = append(p.rubbish, id)
		p.fail(err)
	}
	p.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		log.Info("starting a slot failed", "container", id, "err", err.Error())
	}
	p.poke()
}

// fail notes that a slot could not be, or did not last. mu is held.
func (p *Pool) fail(err error) {
	p.failures++
	p.members = 0 // the next one goes into a group of its own
	p.failure = publicText(err)
	p.notUntil = p.clock.Now().Add(min(retryMin<<min(p.failures-1, 16), retryMax))
}

// publicText is what may be told to anyone.
func publicText(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "the agent's log says why"
}

func (p *Pool) bringUp(ctx context.Context, id, group string) error {
	paths, err := p.config.Logs.Create(id, "")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return p.config.Runtime.StartSlot(ctx, runtime.Slot{
		ID: id, Group: group, LogPath: paths.Output, HostnamePath: paths.Hostname,
		Labels: identity.Identity{AgentUID: p.config.AgentUID, Pool: p.config.AgentPool, State: identity.StateSlot}.Labels(),
	})
}

// watch waits for a free slot's process to end, which it never should.
func (p *Pool) watch(ctx context.Context, f *free, log logr.Logger) {
	for {
		exit, err := p.config.Runtime.Wait(ctx, f.id)
		if ctx.Err() != nil {
			return
		}
		if err == nil || errdefs.IsNotFound(err) {
			log.Info("a free slot ended", "container", f.id, "exitCode", exit.Code)
			p.change(func() {
				if i := slices.Index(p.free, f); i >= 0 {
					p.free = slices.Delete(p.free, i, i+1)
					p.rubbish = append(p.rubbish, f.id)
					p.fail(fmt.Errorf("slot %s ended: %w", f.id, errdefs.ErrUnavailable))
				}
			})
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-p.clock.After(lookInterval):
		}
	}
}

// warm makes one free slot ready for an image that was asked for of late, if nothing else is to be done. mu is held.
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
			log.V(2).Info("warming a slot", "container", f.id, "image", image, "err", err.Error())
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

// rarest is the image of those asked for of late that the fewest free slots are warm for; the later one of equals. mu is
// held.
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

// clean removes what was a slot, trying until it is gone or ctx ends: what is left then is removed by the next life of the
// agent, or by the janitor.
func (p *Pool) clean(ctx context.Context, id string, log logr.Logger) {
	defer p.change(func() { p.cleaning-- })
	for wait := retryMin; ; wait = min(2*wait, retryMax) {
		err := p.remove(ctx, id)
		if err == nil {
			return
		}
		log.V(2).Info("removing a slot; trying on", "container", id, "err", err.Error())
		select {
		case <-ctx.Done():
			return
		case <-p.clock.After(wait):
		}
	}
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

// end removes the free slots when the agent ends, as far as that succeeds soon.
func (p *Pool) end(ctx context.Context, log logr.Logger) {
	p.mu.Lock()
	var ids []string
	for _, f := range p.free {
		f.forget()
		ids = append(ids, f.id)
	}
	p.free = nil
	p.mu.Unlock()
	p.wg.Wait()
	p.mu.Lock()
	ids = append(ids, p.rubbish...)
	p.rubbish = nil
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	work := make(chan string)
	for range min(cleaners, len(ids)) {
		p.wg.Go(func() {
			for id := range work {
				if err := p.remove(ctx, id); err != nil {
					log.V(2).Info("removing a slot at the end", "container", id, "err", err.Error())
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
