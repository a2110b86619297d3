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

// Watch runs a monitor until ctx ends.
func Watch(ctx context.Context, r runtime.Runtime, m *sandbox.Manager, s *status.Hub, c clock.WithTicker) error {
	return WatchUsers(ctx, r, m, s, c, nil)
}

// WatchUsers is Watch with what the runtime says of user namespaces.
func WatchUsers(ctx context.Context, r runtime.Runtime, m *sandbox.Manager, s *status.Hub, c clock.WithTicker, users func() (bool, string)) error {
	return (&monitor{runtime: r, manager: m, status: s, ready: func(bool) {}, clock: c, users: users}).run(ctx)
}
