// Package meter shares readings of what sandboxes use between all that want them, and adds the figures up for metrics. It reads only when it is
// asked: by a call, by a scrape of the metrics, and once when a process has ended. All methods may be called concurrently.
//
// Lock order: Meter.sweeping, then Meter.mu. The first orders work and is held over I/O, the second is not.
package meter

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/usage"
)

// readTimeout bounds a reading. It takes some hundred microseconds, unless containerd has to be asked and does not answer.
const readTimeout = 5 * time.Second

// Container is a container whose process was started.
type Container struct {
	ID string
	// OwnNetwork reports whether it has a network of its own.
	OwnNetwork bool
	// Started is when its process was started.
	Started time.Time
}

// Runtime reads what containers use. ctrd.Figures implements it.
type Runtime interface {
	// Usage reads what a container uses; its network only if network is set. NotFound: it has ended.
	Usage(ctx context.Context, id string, network bool) (usage.Usage, error)
}

// Config is what a Meter needs.
type Config struct {
	Runtime Runtime
	// Running returns the containers whose processes run, and may also return some for which Ended was called a moment ago.
	Running func() []Container
	// Pool of all of them.
	Pool  string
	Clock clock.PassiveClock
}

// Reading is what a container used at a time.
type Reading struct {
	usage.Usage
	At time.Time
}

// Meter reads and adds up. Make it with New.
type Meter struct {
	config Config
	// born is when this process began to count. What sandboxes have used before was counted by an earlier one.
	born    time.Time
	flight  singleflight.Group
	metrics *metrics

	sweeping sync.Mutex

	mu sync.Mutex
	// readings are the last ones, by container.
	readings map[string]Reading
	sums     sums
}

// New returns a Meter. It does no I/O.
func New(cfg Config) *Meter {
	return &Meter{
		config: cfg, born: cfg.Clock.Now(), readings: map[string]Reading{}, metrics: newMetrics(cfg.Pool),
		sums: sums{counted: map[string]counted{}, done: map[string]struct{}{}},
	}
}

// Read returns a reading that is not older than maxAge. Concurrent calls for one container share one. NotFound: it has ended.
func (m *Meter) Read(ctx context.Context, c Container, maxAge time.Duration) (Reading, error) {
	if r, ok := m.fresh(c.ID, maxAge); ok {
		return r, nil
	}
	result := m.flight.DoChan(c.ID, func() (any, error) {
		if r, ok := m.fresh(c.ID, maxAge); ok { // the reading that this call has just missed
			return r, nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readTimeout) // others may wait for it, too
		defer cancel()
		return m.read(ctx, c)
	})
	select {
	case <-ctx.Done():
		return Reading{}, ctx.Err()
	case r := <-result:
		if r.Err != nil {
			return Reading{}, r.Err
		}
		reading, _ := r.Val.(Reading)
		return reading, nil
	}
}

// fresh returns the last reading if it is not older than maxAge.
func (m *Meter) fresh(id string, maxAge time.Duration) (Reading, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.readings[id]
	return r, ok && m.config.Clock.Since(r.At) <= maxAge
}

// read reads, and keeps the reading.
func (m *Meter) read(ctx context.Context, c Container) (Reading, error) {
	// The time is that before the figures are read: a reading is never said to be younger than it is.
	at := m.config.Clock.Now()
	u, err := m.config.Runtime.Usage(ctx, c.ID, c.OwnNetwork)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		delete(m.readings, c.ID)
		return Reading{}, err
	}
	r := Reading{u, at}
	m.readings[c.ID] = r
	return r, nil
}
