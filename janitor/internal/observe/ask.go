package observe

import (
	"context"
	"time"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	// askInterval is the time between two questions for one Sandbox that the cache does not show, and before the first one
	// unless the cache has just lost it: what was written a moment ago comes by itself.
	askInterval = time.Second
	// askGap is the time between any two questions, so that a thousand Sandboxes that go at once are no flood.
	askGap = 50 * time.Millisecond
)

// wonder has the API server itself asked for the Sandbox of a container that waits for its grace, while it does: the cache
// shows this node's Sandboxes alone, and what has the name by now may be another sandbox, which runs elsewhere or nowhere yet.
// Then there is nothing to wait for. mu is held.
//
//	the cache loses the Sandbox ------> asked at once --+--> absent: asked again after a second, until the grace is over
//	the cache never had it --> a second --> asked ------+--> there: judged by that, and what is to be deleted is confirmed
func (b *Board) wonder(e *entry, now time.Time) {
	if e.asking || e.last.Verdict.Reason != verdict.WithinGrace {
		return
	}
	e.asking = true
	b.asks.AddAfter(e.container.ID, e.askAfter.Sub(now))
}

// inquire asks what is to be asked, until ctx ends.
func (b *Board) inquire(ctx context.Context) {
	for {
		id, stop := b.asks.Get()
		if stop {
			return
		}
		asked := b.ask(ctx, id)
		b.asks.Done(id)
		if !asked {
			continue
		}
		timer := b.clock.NewTimer(askGap)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// ask asks the API server itself for a container's Sandbox, if that is still of use, and judges the container by the answer.
// An error is no answer. It tells whether it has asked.
func (b *Board) ask(ctx context.Context, id string) bool {
	c, ok := b.toAsk(id)
	if !ok {
		return false
	}
	live, err := b.liveResource(ctx, c)
	if err != nil && ctx.Err() == nil {
		b.config.Log.V(2).Info("nobody says whether a Sandbox is there", "container", id, "err", err.Error())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	e, now := b.containers[id], b.clock.Now()
	if e == nil {
		return true
	}
	if err == nil && live.State != verdict.ResourceAbsent && e.container.Identity == c.Identity {
		e.live, e.liveUntil = *live, now.Add(b.config.ScanInterval)
	}
	e.asking, e.askAfter = false, now.Add(askInterval)
	if !e.missing.IsZero() && now.Sub(e.missing) >= b.config.Policy.Grace {
		e.askAfter = now.Add(b.config.ScanInterval) // by the node's clock it is not made yet, for who knows how long
	}
	b.judge(e, now)
	return true
}

// toAsk is the container for whose Sandbox it is time to ask; if it is not, it sees to it that the time comes.
func (b *Board) toAsk(id string) (Container, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, now := b.containers[id], b.clock.Now()
	if e == nil {
		return Container{}, false
	}
	b.judge(e, now)
	due := !now.Before(e.askAfter)
	if e.last.Verdict.Reason != verdict.WithinGrace || !due {
		e.asking = false
		b.wonder(e, now)
		return Container{}, false
	}
	e.asking = true
	return e.container, true
}
