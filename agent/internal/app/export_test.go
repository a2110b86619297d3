package app

import (
	"context"

	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
)

// SlowPings is how many pings in a row may time out.
const SlowPings = slowPings

// LimitMemory bounds the agent's own memory.
func (c *Config) LimitMemory(ctx context.Context, l memoryLimiter) { c.limitMemory(ctx, l) }

// Hooks of a monitor. Each may be nil.
type Hooks struct {
	Users func() (on bool, offReason string)
	Ready func(bool)
}

// Watch runs a monitor until ctx ends.
func Watch(ctx context.Context, r runtime.Runtime, m *sandbox.Manager, s *status.Hub, c clock.WithTicker, h Hooks) error {
	if h.Ready == nil {
		h.Ready = func(bool) {}
	}
	return (&monitor{runtime: r, manager: m, status: s, ready: h.Ready, clock: c, users: h.Users}).run(ctx)
}
