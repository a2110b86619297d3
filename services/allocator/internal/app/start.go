package app

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	// startGCPercent is how much garbage may pile up while a process starts, of what is kept: most of what it keeps it reads then, and
	// each collection visits all of that again.
	startGCPercent = 60
	// fillAtOnce is the number of custom resources that are read in full without a delay: that takes the API server a second. More wait
	// for the reports of agents, which an allocator needs first, but not longer than fillTimeout.
	fillAtOnce  = 5000
	fillTimeout = 5 * time.Second
)

// start has the custom resources read in full, and returns the memory that a start takes beyond what follows: Go returns memory at its
// leisure. It lasts until ctx ends.
func (a *App) start(ctx context.Context, p *parts) error {
	percent := debug.SetGCPercent(startGCPercent)
	if percent < 0 || percent > startGCPercent { // by GOGC
		debug.SetGCPercent(percent)
	}
	ready := a.awaitOutlines(ctx, p)
	debug.SetGCPercent(percent) // the rest is not urgent
	if ready {
		close(p.fill)
		select {
		case <-p.source.sandboxes.Filled():
			debug.FreeOSMemory()
		case <-ctx.Done():
		}
	}
	<-ctx.Done()
	return nil
}

// awaitOutlines waits until the custom resources may be read in full, and returns whether that was before ctx ended.
func (a *App) awaitOutlines(ctx context.Context, p *parts) bool {
	select {
	case <-ctx.Done():
		return false
	case <-p.synced:
	}
	return p.store.Len() <= fillAtOnce || a.awaitReports(ctx, p, fillTimeout)
}

// awaitReports waits until all agents have reported to a process that knows of all, or have had the timeout to do so, and returns whether
// that was before ctx ended.
func (a *App) awaitReports(ctx context.Context, p *parts, timeout time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-p.synced:
	}
	ticker := a.clock.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !p.fleet.AllReported(timeout) {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C():
		}
	}
	return true
}
