package app

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
)

// errClosed is the reason why a collector that observes, waits for leadership, or lost it deletes nothing.
var errClosed = errors.New("this collector does not enforce")

// reminder is the interval between log records about a tripped breaker.
const reminder = time.Minute

// gate permits or refuses every write. It is closed until this process leads and no other collector was found, and closed
// permanently once the breaker has tripped.
type gate struct {
	open    atomic.Bool
	leads   func() bool
	breaker *breaker.Breaker
	clock   clock.WithTicker
}

// permit returns nil if a write may proceed. A deletion is counted.
func (g *gate) permit(deletion *breaker.Intent) error {
	if !g.Enforcing() {
		return errClosed
	}
	if deletion == nil {
		return g.breaker.Tripped()
	}
	return g.breaker.Allow(g.clock.Now(), *deletion)
}

// Enforcing implements rpc.Guard.
func (g *gate) Enforcing() bool { return g.open.Load() && g.leads() }

// Tripped implements rpc.Guard.
func (g *gate) Tripped() error { return g.breaker.Tripped() }

// remind logs repeatedly that the breaker has tripped: a person must act.
func (g *gate) remind(ctx context.Context) error {
	ticker := g.clock.NewTicker(reminder)
	defer ticker.Stop()
	for {
		if err := g.breaker.Tripped(); err != nil {
			logr.FromContextOrDiscard(ctx).Error(err, "deletions have stopped; if they are intended, restart with a higher --max-delete-share")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

func (g *gate) register(r prometheus.Registerer) error {
	gauge := func(name, help string, holds func() bool) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			if holds() {
				return 1
			}
			return 0
		})
	}
	return errors.Join(
		r.Register(gauge("fastsandbox_gc_circuit_open", "Whether deletions have stopped because there were too many.",
			func() bool { return g.Tripped() != nil })),
		r.Register(gauge("fastsandbox_gc_enforcing", "Whether this process deletes.", g.Enforcing)))
}
