// Package rate measures the highest rate at which sandboxes can be created and deleted, and the CPU time that each takes, beside raw
// containerd in the same run. Creates arrive at a constant rate, whether or not earlier ones are answered, and each latency is
// counted from the arrival that was scheduled: a system that is late is late for those that wait, too. Each sandbox is deleted as soon as it
// runs. A rate holds if the 99th percentile is within a limit, no call fails, and deletions keep up.
package rate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/raw"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

const (
	pool = "bench-rate"
	// modelPool has the sandbox that raw containers are like.
	modelPool   = "bench-rate-model"
	connections = 4
	// leastRate and mostRate bound the search.
	leastRate, mostRate = 1, 2000
	// attempts is how many rates are tried for the whole duration, each belowStep lower than the one before.
	attempts  = 4
	belowStep = 0.1
	cleanTime = 4 * time.Minute
	// quietTime is waited before CPU time is measured: what the agent does ahead for an image in demand comes after the last slot.
	quietTime = 3 * time.Second
)

// Options say how much is measured.
type Options struct {
	// Start is the first rate that is tried, in creates a second.
	Start float64
	// Precision is that of the search.
	Precision float64
	// Limit is the greatest 99th percentile of the latencies at a rate that holds.
	Limit time.Duration
	// Probe is how long a rate is tried while searching, and Duration how long the one that was found.
	Probe, Duration time.Duration
	// Raw is how long raw containers are measured before and after that, each time, and Idle is the same for nothing.
	Raw, Idle time.Duration
	// Places is the capacity of the agent.
	Places int
	// Mesh is how to reach the cluster, and the runtime handler.
	Mesh mesh.Options
	Say  func(format string, args ...any)
}

type suite struct {
	Options
	*mesh.Mesh
	report  *report.Report
	clients []sandboxv1.SandboxServiceClient
	raw     *raw.Runner
	meter   *meter
	result  Measured
}

// Run measures and fills the report. When it returns, it has removed everything that it created in the cluster except the empty
// namespace.
func Run(ctx context.Context, o Options, r *report.Report) (err error) {
	m, err := mesh.Connect(ctx, o.Mesh)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if v, err := m.Node.Version(ctx); err == nil {
		r.Environment.Containerd = v.Version
	}
	logs, err := os.MkdirTemp("", "fsb-bench-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(logs)) }()
	s := &suite{Options: o, Mesh: m, report: r}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		if s.raw != nil {
			err = errors.Join(err, s.raw.Sweep(clean))
		}
		err = errors.Join(err, m.Remove(clean, pool), m.Remove(clean, modelPool))
	}()
	slots, err := s.prepare(ctx, logs)
	if err != nil {
		return err
	}
	if err := s.measure(ctx); err != nil {
		return err
	}
	s.conditions(slots)
	Sum(r, s.result, o.Limit)
	r.Judge(budget.Rate(m.Handler))
	return nil
}

// prepare makes the pools, the connections, and the model of the raw containers, which stays: they mount files of its.
func (s *suite) prepare(ctx context.Context, logs string) (mesh.Slots, error) {
	none := 0
	if _, err := s.Open(ctx, mesh.Pool{Name: modelPool, Places: 1, Slots: &none}); err != nil {
		return mesh.Slots{}, err
	}
	slots, err := s.Open(ctx, mesh.Pool{Name: pool, Places: s.Places})
	if err != nil {
		return slots, err
	}
	s.Say("pools are ready; %s keeps %d slots %s", pool, slots.Wanted, slots.Off)
	model, err := s.Sandboxes.CreateSandbox(ctx, mesh.Request(modelPool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
	if err != nil {
		return slots, fmt.Errorf("creating the sandbox that raw containers are like: %w", err)
	}
	if s.raw, err = raw.Like(ctx, s.Node, model.GetSandbox().GetStatus().GetSandboxId(), logs); err != nil {
		return slots, err
	}
	if err := s.raw.Sweep(ctx); err != nil {
		return slots, err
	}
	for range connections {
		conn, err := s.Dial(ctx)
		if err != nil {
			return slots, err
		}
		s.clients = append(s.clients, sandboxv1.NewSandboxServiceClient(conn))
	}
	s.meter, err = newMeter(ctx, s.Mesh)
	return slots, err
}

// measure searches the rate, and confirms it between raw containers.
func (s *suite) measure(ctx context.Context) error {
	if _, err := s.reference(ctx, time.Second); err != nil { // warms things up
		return err
	}
	found, err := Highest(Bounds{Start: s.Start, Least: leastRate, Most: mostRate, Precision: s.Precision}, func(rate float64) (bool, error) {
		t, _, err := s.trial(ctx, Schedule{rate, s.Probe})
		if err != nil {
			return false, err
		}
		return s.note(t), nil
	})
	if err != nil {
		return fmt.Errorf("searching the rate: %w", err)
	}
	if err := s.idle(ctx); err != nil || found == 0 {
		return err
	}
	s.result.Rate, err = Confirm(found, belowStep, attempts, func(rate float64) (bool, error) {
		if err := s.addReference(ctx); err != nil {
			return false, err
		}
		t, used, err := s.trial(ctx, Schedule{rate, s.Duration})
		if err != nil {
			return false, err
		}
		s.result.Used, s.result.Confirmed = used, t
		return s.note(t), nil
	})
	if err != nil {
		return fmt.Errorf("confirming the rate: %w", err)
	}
	if err := s.addReference(ctx); err != nil {
		return err
	}
	return s.idle(ctx)
}

// note keeps a trial for the report, and reports whether it held.
func (s *suite) note(t Trial) bool {
	held, why := t.Held(s.Limit)
	s.result.Trials = append(s.result.Trials, t)
	s.Say("%s", describe(t, held, why))
	return held
}

// idle measures what the cluster uses when nothing happens.
func (s *suite) idle(ctx context.Context) error {
	if err := s.ready(ctx); err != nil {
		return err
	}
	used, err := s.meter.during(func() error { return wait.For(ctx, s.Idle) })
	s.result.Idle = s.result.Idle.Add(used)
	return err
}

// ready waits until the pool has its slots and is quiet.
func (s *suite) ready(ctx context.Context) error {
	if _, err := s.AwaitSlots(ctx, pool); err != nil {
		return err
	}
	return wait.For(ctx, quietTime)
}
