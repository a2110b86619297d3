package app

import (
	"context"
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/disk"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/meter"
	agentrpc "github.com/fast-sandbox/fast-sandbox/agent/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// meters is what measures sandboxes.
type meters struct {
	runtime *ctrd.Runtime
	pool    string

	view  sandbox.View
	meter *meter.Meter
	disk  *disk.Watcher
}

// start makes the parts that need the manager, before that has any sandbox, and returns the registry of all metrics.
func (m *meters) start(manager *sandbox.Manager, maxDisk runtime.DiskUsage, hub *status.Hub) (*prometheus.Registry, error) {
	m.view = sandbox.NewView(manager)
	m.meter = meter.New(meter.Config{Runtime: ctrd.NewFigures(m.runtime), Running: m.running, Pool: m.pool, Clock: clock.RealClock{}})
	m.disk = disk.New(disk.Config{Runtime: m.runtime, Sandboxes: manager, Limit: maxDisk, Clock: clock.RealClock{}})
	registry := obs.NewRegistry()
	if err := errors.Join(registry.Register(hub), registry.Register(m.meter)); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return registry, nil
}

func (m *meters) running() []meter.Container {
	var out []meter.Container
	for _, s := range m.view.Running() {
		out = append(out, agentrpc.MeterOf(s))
	}
	return out
}

// ended is called when the process of a sandbox has ended.
func (m *meters) ended(ctx context.Context, s sandbox.Started) {
	m.meter.Ended(ctx, agentrpc.MeterOf(s))
}

// service returns UsageService.
func (m *meters) service(s *agentrpc.Service, info *agentv1.AgentInfo) *agentrpc.Usages {
	return agentrpc.NewUsages(s, agentrpc.UsagesConfig{Sandboxes: m.view, Meter: m.meter, Disk: m.disk, Info: info})
}
