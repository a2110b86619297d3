package observe

import (
	"context"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// loop is the goroutines that keep a NodeState up to date: they follow containerd's events, scan at intervals, and process the
// queues of the state.
type loop struct {
	state *NodeState
}

// Run keeps the state up to date until ctx ends. Errors of containerd are logged and retried.
func (s *NodeState) Run(ctx context.Context) error {
	l := &loop{state: s}
	var wg sync.WaitGroup
	wg.Go(func() { l.follow(ctx) })
	wg.Go(func() { l.serve(ctx) })
	wg.Go(func() { l.scans(ctx) })
	wg.Go(func() { l.rechecks(ctx) })
	<-ctx.Done()
	s.looks.ShutDown()
	s.asks.ShutDown()
	wg.Wait()
	return nil
}

// whole returns the look that stands for a scan of the whole node.
func whole() look { return look{refresh: true} }

// scans queues a scan at each interval, the first at once.
func (l *loop) scans(ctx context.Context) {
	ticker := l.state.clock.NewTicker(l.state.config.ScanInterval)
	defer ticker.Stop()
	for {
		l.state.looks.Add(whole())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

// serve processes the queue of looks.
func (l *loop) serve(ctx context.Context) {
	for {
		item, stop := l.state.looks.Get()
		if stop {
			return
		}
		l.examine(ctx, item)
		l.state.looks.Done(item)
	}
}

func (l *loop) examine(ctx context.Context, item look) {
	var err error
	switch {
	case item == whole():
		if err = l.state.Scan(ctx); err != nil && !l.state.Ready() {
			l.state.looks.AddAfter(item, time.Second) // nothing is judged before the first scan
		}
	case item.refresh:
		if err = l.state.refresh(ctx, item.key.ID); err != nil {
			l.state.looks.AddAfter(item, time.Second)
		}
	default:
		l.state.mu.Lock()
		defer l.state.mu.Unlock()
		if e := l.state.inventory.containers[item.key.ID]; e != nil {
			l.state.judge(e, l.state.clock.Now())
		}
	}
	if err != nil && ctx.Err() == nil {
		l.state.config.Log.Error(err, "examining the node", obs.KeyContainer, item.key.ID)
	}
}

// follow queues the containers that containerd reports as changed. After a break in the stream, it queues a scan.
func (l *loop) follow(ctx context.Context) {
	retry := backoff.New(l.state.clock, backoff.Policy{Initial: 200 * time.Millisecond, Max: 10 * time.Second})
	for {
		err := l.state.config.Node.Events(ctx, func() {
			retry.Reset()
			l.state.looks.AddAfter(whole(), settle)
		}, func(id string) {
			l.state.looks.AddAfter(look{key: Key{ID: id}, refresh: true}, settle)
		})
		if ctx.Err() != nil {
			return
		}
		l.state.config.Log.Error(err, "following containerd's events")
		if retry.Wait(ctx) != nil {
			return
		}
	}
}
