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

// errClosed is why nothing is deleted by a collector that observes, waits for its turn, or was deposed.
var errClosed = errors.New("this collector does not enforce")

// reminder is the time between complaints of a breaker that has tripped.
const reminder = time.Minute

// gate is what every write has to pass: it is closed until this process leads and was found to be alone, and for good once
// the breaker has tripped.
type gate struct {
	open    atomic.Bool
	leads   func() bool
	breaker *breaker.Breaker
	clock   clock.WithTicker
}

// permit lets a write pass; a deletion, if it is one, is counted.
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

// shout says again and again that the breaker has tripped: it is a person's turn.
func (g *gate) shout(ctx context.Context) error {
	ticker := g.clock.NewTicker(reminder)
	defer ticker.Stop()
	for {
		if err := g.breaker.Tripped(); err != nil {
			logr.FromContextOrDiscard(ctx).Error(err, "deletions have stopped: if they are meant, restart with another --max-delete-share")
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
