// Package create measures single creates: raw containerd, a fast create that claims a slot, one on the cold path, a strong
// one, and a Pod of plain Kubernetes, interleaved round by round on one cluster, so that all series see the same machine.
package create

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/raw"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

// Names of the series.
const (
	Raw  = "raw"
	Slot = "slot"
	// HostUsers is Slot in a pool without user namespaces.
	HostUsers = "slot_host_users"
	Cold      = "cold"
	Strong    = "strong"
	Pod       = "pod"
	// Strayed are creates that were to claim a slot and went cold.
	Strayed = "slot_went_cold"
)

const (
	slotPool      = "bench-slot"
	hostUsersPool = "bench-host-users"
	coldPool      = "bench-cold"
	capacity      = 8
	// warmups are rounds that count nothing.
	warmups = 2
)

// AllSeries are those that a round has. Only handler fsb has user namespaces: with others, HostUsers is left out.
func AllSeries() []string { return []string{Raw, Slot, HostUsers, Cold, Strong, Pod} }

// Options say how much is measured.
type Options struct {
	// Rounds is the number of rounds; each has one sample of every series, but of Pods only each PodEvery-th has.
	Rounds, PodEvery int
	// Series are those to measure, for finding out what one does to another; all of them are a result.
	Series []string
	// Pause is the greatest pause before a sample; each is random, for the kubelet looks around once a second, and a
	// fixed one would lock onto its phase.
	Pause time.Duration
	// Seed of pauses and order.
	Seed uint64
	// Mesh is how to reach the cluster, and the runtime handler.
	Mesh mesh.Options
	// Say prints progress.
	Say func(format string, args ...any)
}

// suite is one run.
type suite struct {
	Options
	*mesh.Mesh
	raw    *raw.Runner
	report *report.Report
	random *rand.Rand
	stages map[string]*Breakdown
	paths  map[string]int
}

// Run measures and fills the report. When it returns, it has removed everything that it created in the cluster except the empty
// namespace.
func Run(ctx context.Context, o Options, r *report.Report) (err error) {
	for _, name := range o.Series {
		if !slices.Contains(AllSeries(), name) {
			return fmt.Errorf("there is no series %q: there are %s", name, strings.Join(AllSeries(), ", "))
		}
	}
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
	defer func() { // also when the run was interrupted
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Minute)
		defer cancel()
		err = errors.Join(err, m.Remove(clean, slotPool), m.Remove(clean, hostUsersPool), m.Remove(clean, coldPool))
	}()
	if m.Handler != budget.Own {
		o.Series = slices.DeleteFunc(slices.Clone(o.Series), func(name string) bool { return name == HostUsers })
	}
	s := &suite{
		Options: o, Mesh: m, report: r, random: rand.New(rand.NewPCG(o.Seed, 1)),
		stages: map[string]*Breakdown{}, paths: map[string]int{},
	}
	slots, err := s.prepare(ctx, logs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.raw.Sweep(context.WithoutCancel(ctx))) }()
	for i := range warmups + o.Rounds {
		if err := s.round(ctx, i-warmups); err != nil {
			return fmt.Errorf("in round %d: %w", i-warmups, err)
		}
	}
	s.conditions(slots)
	s.sum()
	return nil
}

// prepare makes the pools, and the model of the raw containers.
func (s *suite) prepare(ctx context.Context, logs string) (mesh.Slots, error) {
	none := 0
	slots, err := s.Open(ctx, mesh.Pool{Name: slotPool, Places: capacity})
	if err != nil {
		return slots, err
	}
	if _, err := s.Open(ctx, mesh.Pool{Name: coldPool, Places: capacity, Slots: &none}); err != nil {
		return slots, err
	}
	if slices.Contains(s.Series, HostUsers) {
		if _, err := s.Open(ctx, mesh.Pool{Name: hostUsersPool, Places: capacity, HostUsers: true}); err != nil {
			return slots, err
		}
	}
	s.Say("pools are ready; %s keeps %d slots %s", slotPool, slots.Wanted, slots.Off)
	// An agent that has just started may still be busy with what was there before it.
	resp, err := s.Sandboxes.CreateSandbox(ctx, mesh.Request(coldPool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
	if err != nil {
		return slots, fmt.Errorf("creating the sandbox that raw containers are like: %w", err)
	}
	if resp.GetStartPath() == sandboxv1.StartPath_START_PATH_SLOT {
		return slots, fmt.Errorf("pool %s has slots although it was to have none", coldPool)
	}
	if s.raw, err = raw.Like(ctx, s.Node, resp.GetSandbox().GetStatus().GetSandboxId(), logs); err != nil {
		return slots, err
	}
	// The model stays until its pool goes: raw containers mount files of its, such as /etc/hostname.
	return slots, s.raw.Sweep(ctx)
}

// round takes one sample of each series in a random order. Rounds below zero are not counted.
func (s *suite) round(ctx context.Context, n int) error {
	series := slices.DeleteFunc(slices.Clone(s.Series), func(name string) bool { return name == Pod && n >= 0 && n%s.PodEvery != 0 })
	s.random.Shuffle(len(series), func(i, j int) { series[i], series[j] = series[j], series[i] })
	for _, name := range series {
		if err := s.pause(ctx); err != nil {
			return err
		}
		var err error
		switch name {
		case Raw:
			err = s.one(ctx, n)
		case Pod:
			err = s.pod(ctx, n)
		case HostUsers:
			err = s.sandbox(ctx, n, name, hostUsersPool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
		case Cold:
			err = s.sandbox(ctx, n, name, coldPool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
		case Strong:
			err = s.sandbox(ctx, n, name, slotPool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG)
		default:
			err = s.sandbox(ctx, n, name, slotPool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
		}
		if err != nil {
			return fmt.Errorf("measuring %s: %w", name, err)
		}
	}
	if n >= 0 && (n+1)%10 == 0 {
		s.Say("%d of %d rounds", n+1, s.Rounds)
	}
	return nil
}

// pause waits for a random time.
func (s *suite) pause(ctx context.Context) error {
	return wait.For(ctx, time.Duration(s.random.Int64N(int64(s.Pause)+1)))
}

func (s *suite) add(series string, n int, at time.Time, took time.Duration, note string) {
	if n >= 0 {
		s.report.Sample(series, n, at, millis(took), "ms", note)
	}
}

// one is a raw container.
func (s *suite) one(ctx context.Context, n int) error {
	at := time.Now()
	took, remove, err := s.raw.Run(ctx)
	if err != nil {
		return err
	}
	s.add(Raw, n, at, took.Total(), fmt.Sprintf("container %.1f task %.1f start %.1f", millis(took.Container), millis(took.Task), millis(took.Start)))
	return remove(ctx)
}

// sandbox is one of ours. A fast create in the pool with slots that went cold is a sample of another series.
func (s *suite) sandbox(ctx context.Context, n int, series, pool string, mode sandboxv1.ConsistencyMode) error {
	if _, err := s.AwaitSlots(ctx, pool); err != nil {
		return err
	}
	req := mesh.Request(pool, mode)
	at := time.Now()
	resp, err := s.Sandboxes.CreateSandbox(ctx, req)
	took := time.Since(at)
	if err != nil {
		return fmt.Errorf("creating a sandbox: %w", err)
	}
	path := strings.ToLower(strings.TrimPrefix(resp.GetStartPath().String(), "START_PATH_"))
	if (series == Slot || series == HostUsers) && resp.GetStartPath() != sandboxv1.StartPath_START_PATH_SLOT {
		series = Strayed
	}
	if series == Cold && resp.GetStartPath() == sandboxv1.StartPath_START_PATH_SLOT {
		return fmt.Errorf("a create in pool %s, which has no slots, claimed one", pool)
	}
	s.add(series, n, at, took, path)
	if n >= 0 {
		s.paths[series+" "+path]++
		if s.stages[series] == nil {
			s.stages[series] = NewBreakdown()
		}
		s.stages[series].Add(took, resp.GetTimings())
	}
	return s.Delete(ctx, resp.GetSandbox())
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
