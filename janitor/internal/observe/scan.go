package observe

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	// scanTimeout bounds a scan, and lookTimeout a question for one container.
	scanTimeout = 50 * time.Second
	lookTimeout = 10 * time.Second
	// settle is how long a container that changes is left alone before containerd is asked for it: changes come in threes.
	settle = 200 * time.Millisecond
)

// Scan looks at the whole node and judges everything anew. What cannot be read is in the error; the rest counts.
func (b *Board) Scan(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, scanTimeout)
	defer cancel()
	started := b.clock.Now()
	// What is left of containers first: what is named after a container that is made meanwhile has one by then. Of a container
	// that is known now, and removed meanwhile, nothing is taken in: it goes with it, or is seen by the next survey.
	pieces, surveyErr := b.config.Node.Survey(ctx, b.ids())
	if surveyErr != nil {
		surveyErr = fmt.Errorf("looking for what is left of containers: %w", surveyErr)
	}
	asked := b.clock.Now()
	list, err := b.config.Node.List(ctx)
	if err != nil {
		b.config.Metrics.scanned(b.clock.Now().Sub(started), err)
		return errors.Join(fmt.Errorf("listing containers: %w", err), surveyErr)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.replace(list, asked)
	b.settleRemnants(pieces, surveyErr == nil)
	b.scanned = true
	b.judgeAll()
	b.forget(b.clock.Now())
	b.config.Metrics.scanned(b.clock.Now().Sub(started), surveyErr)
	b.count()
	return surveyErr
}

// replace takes in what containerd has said of all containers; of one that it was asked for since, the later word counts. mu
// is held.
func (b *Board) replace(list Listing, asked time.Time) {
	b.running = list.Pods
	there := make(map[string]bool, len(list.Containers))
	for _, c := range list.Containers {
		there[c.ID] = true
		if e := b.containers[c.ID]; e == nil || e.seen.Before(asked) {
			b.put(c, asked)
		}
	}
	for id, e := range b.containers {
		if !there[id] && e.seen.Before(asked) {
			b.drop(id)
		}
	}
	if !b.scanned {
		b.notify()
	}
}

// kinds are the kinds of remnants by the parts of which they consist.
func kindOf(p ctrd.Part) (verdict.Kind, bool) {
	switch p {
	case ctrd.PartSnapshot:
		return verdict.Snapshot, true
	case ctrd.PartFIFOs:
		return verdict.FIFOs, true
	case ctrd.PartMount:
		return verdict.Mount, true
	case ctrd.PartCgroup:
		return verdict.Cgroup, true
	case ctrd.PartLog:
		return verdict.Log, true
	}
	return 0, false
}

// ids are the containers that are known.
func (b *Board) ids() map[string]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make(map[string]bool, len(b.containers))
	for id := range b.containers {
		out[id] = true
	}
	return out
}

// settleRemnants takes in what a survey has found; whole tells that it found all there is. mu is held.
func (b *Board) settleRemnants(pieces []ctrd.Piece, whole bool) {
	found := map[Key][]ctrd.Piece{}
	for _, p := range pieces {
		kind, ok := kindOf(p.Part)
		if _, has := b.containers[p.ID]; has || !ok {
			continue
		}
		key := Key{ID: p.ID, Remnant: true, Kind: kind}
		found[key] = append(found[key], p)
	}
	now := b.clock.Now()
	for key, list := range found {
		r := b.remnants[key]
		if r == nil {
			r = &remnant{since: now}
			b.remnants[key] = r
		}
		r.last.Key, r.last.Pieces = key, list
	}
	for key := range b.remnants {
		if _, has := b.containers[key.ID]; has || (whole && found[key] == nil) {
			delete(b.remnants, key)
			b.notify()
		}
	}
}

// refresh asks containerd for one container.
func (b *Board) refresh(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	asked := b.clock.Now()
	c, err := b.config.Node.Get(ctx, id)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case errdefs.IsNotFound(err) || (err == nil && !c.Managed):
		b.drop(id)
		return nil
	case err != nil:
		return err
	}
	if e := b.containers[id]; e != nil && e.seen.After(asked) {
		return nil
	}
	b.judge(b.put(c, asked), b.clock.Now())
	return nil
}

// Run keeps the picture until ctx ends. An error of containerd's ends nothing: it is asked again.
func (b *Board) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { b.follow(ctx) })
	wg.Go(func() { b.serve(ctx) })
	wg.Go(func() { b.scans(ctx) })
	wg.Go(func() { b.inquire(ctx) })
	<-ctx.Done()
	b.looks.ShutDown()
	b.asks.ShutDown()
	wg.Wait()
	return nil
}

// whole stands for a look at the whole node.
func whole() look { return look{refresh: true} }

// scans asks for a scan at each interval, the first at once.
func (b *Board) scans(ctx context.Context) {
	ticker := b.clock.NewTicker(b.config.ScanInterval)
	defer ticker.Stop()
	for {
		b.looks.Add(whole())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

// serve looks at what is to be looked at.
func (b *Board) serve(ctx context.Context) {
	for {
		l, stop := b.looks.Get()
		if stop {
			return
		}
		b.lookAt(ctx, l)
		b.looks.Done(l)
	}
}

func (b *Board) lookAt(ctx context.Context, l look) {
	var err error
	switch {
	case l == whole():
		if err = b.Scan(ctx); err != nil && !b.Ready() {
			b.looks.AddAfter(l, time.Second) // nothing begins before the first one
		}
	case l.refresh:
		if err = b.refresh(ctx, l.key.ID); err != nil {
			b.looks.AddAfter(l, time.Second)
		}
	default:
		b.mu.Lock()
		defer b.mu.Unlock()
		if e := b.containers[l.key.ID]; e != nil {
			b.judge(e, b.clock.Now())
		}
	}
	if err != nil && ctx.Err() == nil {
		b.config.Log.Error(err, "looking at the node", "container", l.key.ID)
	}
}

// follow has containers looked at that containerd says have changed. After a break in its word, all of them are.
func (b *Board) follow(ctx context.Context) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 200*time.Millisecond, 10*time.Second
	for {
		err := b.config.Node.Events(ctx, func() {
			wait.Reset()
			b.looks.AddAfter(whole(), settle)
		}, func(id string) {
			b.looks.AddAfter(look{key: Key{ID: id}, refresh: true}, settle)
		})
		if ctx.Err() != nil {
			return
		}
		b.config.Log.Error(err, "following containerd's events")
		timer := b.clock.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}
