// Package scale measures one real allocator, with a standby beside it, against a real API server and many simulated agents
// over real gRPC with mutual TLS: what it costs, how fast it creates, and how soon the standby takes over.
package scale

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

// Options set the amount of measurements.
type Options struct {
	// Bin is where the built binaries are.
	Bin string
	// Agents, Sandboxes on each, and their heartbeats.
	Agents, Sandboxes int
	Heartbeat         time.Duration
	// Rate of creates per second, and as many deletes, for Duration.
	Rate     float64
	Duration time.Duration
	Say      func(format string, args ...any)
}

const (
	// idleTime is how long the allocator is measured without creates.
	idleTime = 15 * time.Second
	// settleTime lets both allocators become idle after they have started: the standby reads the reports of all agents.
	settleTime = 30 * time.Second
)

// Run measures and fills the report. Everything that it started has ended when it returns.
func Run(ctx context.Context, o Options, r *report.Report) (err error) {
	bin, err := filepath.Abs(o.Bin)
	if err != nil {
		return fmt.Errorf("finding the binaries: %w", err)
	}
	dir, err := os.MkdirTemp("", "fsb-bench-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	w, err := newTestbed(o, bin, dir)
	defer func() { err = errors.Join(err, w.close()) }()
	if err != nil {
		return err
	}
	if err := w.populate(ctx); err != nil {
		return err
	}
	finalizing, stop := context.WithCancel(ctx)
	finalized := make(chan error, 1)
	go func() { finalized <- w.finalize(finalizing) }()
	defer func() {
		stop()
		err = errors.Join(err, <-finalized)
	}()
	m, err := w.measure(ctx)
	if err != nil {
		return err
	}
	conditions(r, o, m)
	Sum(r, m)
	r.Judge(budget.Scale())
	return nil
}

// measure starts the allocators and measures them.
func (w *testbed) measure(ctx context.Context) (*Measured, error) {
	m := &Measured{}
	first, err := w.start()
	if err != nil {
		return nil, err
	}
	if m.Start, err = w.awaitAll(ctx, first); err != nil {
		return nil, err
	}
	w.Say("the first allocator knows of all agents after %.1f s", m.Start.Seconds())
	if m.Lists, err = w.awaitLists(ctx, first); err != nil {
		return nil, err
	}
	w.Say("it answers lists after %.1f s", m.Lists.Seconds())
	second, err := w.start()
	if err != nil {
		return nil, err
	}
	if _, err := w.awaitAll(ctx, second); err != nil {
		return nil, err
	}
	leading, standby, err := w.leaderOf(ctx, first, second)
	if err != nil {
		return nil, err
	}
	if err := wait.For(ctx, settleTime); err != nil {
		return nil, err
	}
	if m.Idle, err = watchUsage(ctx, leading, standby, idleTime); err != nil {
		return nil, err
	}
	w.Say("idle: %.3f cores, %.0f MiB", m.Idle.Cores, m.Idle.RSS)
	load := w.newLoad(leading)
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		load.run(ctx)
	}()
	m.Busy, err = watchUsage(ctx, leading, standby, w.Duration)
	<-loaded
	m.Creates, m.Errors, m.Deletes = load.creates, load.errs, load.deletes
	if err != nil {
		return nil, err
	}
	w.Say("under load: %.3f cores, %.0f MiB, %d creates, %d errors", m.Busy.Cores, m.Busy.RSS, len(m.Creates), len(m.Errors))
	m.Takeover, err = w.takeover(ctx, leading, standby)
	return m, err
}

func conditions(r *report.Report, o Options, m *Measured) {
	r.Fact("agents", o.Agents)
	r.Fact("sandboxes", o.Agents*o.Sandboxes)
	r.Fact("heartbeat", o.Heartbeat.String())
	r.Fact("samples", fmt.Sprintf("%d creates and %d deletes in %s", len(m.Creates), m.Deletes, o.Duration))
	r.Fact("concurrency", fmt.Sprintf("%g creates a second, whether or not earlier ones are answered, and as many deletes", o.Rate))
	r.Fact("cache", "the Registry is warm; custom resources of all sandboxes are in the API server")
	r.Fact("security", "mutual TLS everywhere; each simulated agent has a certificate of its own")
	r.Fact("beside_it", fmt.Sprintf("on the same %d cores: etcd (which does not sync), kube-apiserver, a standby allocator, all agents and the clients", runtime.NumCPU()))
	r.Fact("lease", fmt.Sprintf("duration %s, retry %s", leader.DefaultLeaseDuration, leader.DefaultRetryPeriod))
}
