package observe

import (
	"context"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	// recheckInterval is the interval between requests for one Sandbox that the cache does not show, and the delay before the first one
	// unless the cache has just lost it: a Sandbox that was just written reaches the cache by itself.
	recheckInterval = time.Second
	// recheckGap is the minimum interval between any two requests, so that the deletion of a thousand Sandboxes causes no burst.
	recheckGap = 50 * time.Millisecond
)

// recheckLive schedules a request to the API server for the Sandbox of a container that waits for its grace period. The cache
// shows only this node's Sandboxes; another sandbox may have taken the name, which runs elsewhere or is not assigned yet. Then
// there is nothing to wait for.
//
//	the cache loses the Sandbox ------> request at once --+--> absent: again after a second, until the grace period is over
//	the cache never had it --> a second --> request ------+--> present: judged by that; a deletion is confirmed first
func (v *evidence) recheckLive(e *entry, now time.Time) {
	if e.asking || e.last.Verdict.Reason != verdict.WithinGrace {
		return
	}
	e.asking = true
	v.asks.AddAfter(e.container.ID, e.askAfter.Sub(now))
}

// rechecks makes the scheduled requests until ctx ends.
func (l *loop) rechecks(ctx context.Context) {
	for {
		id, stop := l.state.asks.Get()
		if stop {
			return
		}
		asked := l.recheck(ctx, id)
		l.state.asks.Done(id)
		if !asked {
			continue
		}
		timer := l.state.clock.NewTimer(recheckGap)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// recheck asks the API server for a container's Sandbox, if that is still useful, and judges the container by the answer. An
// error changes nothing. It reports whether a request was made.
func (l *loop) recheck(ctx context.Context, id string) bool {
	c, ok := l.dueRecheck(id)
	if !ok {
		return false
	}
	live, err := l.state.liveResource(ctx, c)
	if err != nil && ctx.Err() == nil {
		l.state.config.Log.V(2).Info("rechecking a Sandbox failed", obs.KeyContainer, id, obs.KeyError, err.Error())
	}
	l.state.mu.Lock()
	defer l.state.mu.Unlock()
	e, now := l.state.inventory.containers[id], l.state.clock.Now()
	if e == nil {
		return true
	}
	if err == nil && live.State != verdict.ResourceAbsent && e.container.Identity == c.Identity {
		e.live, e.liveUntil = *live, now.Add(l.state.config.ScanInterval)
	}
	e.asking, e.askAfter = false, now.Add(recheckInterval)
	if !e.missing.IsZero() && now.Sub(e.missing) >= l.state.config.Policy.Grace {
		e.askAfter = now.Add(l.state.config.ScanInterval) // by the node's clock it was created in the future
	}
	l.state.judge(e, now)
	return true
}

// dueRecheck returns the container whose Sandbox is to be requested now; if it is too early, it schedules the request.
func (l *loop) dueRecheck(id string) (Container, bool) {
	l.state.mu.Lock()
	defer l.state.mu.Unlock()
	e, now := l.state.inventory.containers[id], l.state.clock.Now()
	if e == nil {
		return Container{}, false
	}
	l.state.judge(e, now)
	due := !now.Before(e.askAfter)
	if e.last.Verdict.Reason != verdict.WithinGrace || !due {
		e.asking = false
		l.state.recheckLive(e, now)
		return Container{}, false
	}
	e.asking = true
	return e.container, true
}
