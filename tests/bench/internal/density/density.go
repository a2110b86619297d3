// Package density measures memory: of a free slot, of a sandbox that claimed one, and of one that was started cold, with
// their share of the shim, by the kernel's account of each process and by what a real filling takes from the machine.
package density

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

const (
	pool = "bench-density"
	// parallel is how many creates fill a pool at a time.
	parallel  = 4
	cleanTime = 4 * time.Minute
	// settleReads of the machine's free memory, a second apart, make one reading.
	settleReads = 5
)

// Options say how much is measured.
type Options struct {
	// N is how many places are filled.
	N   int
	Say func(format string, args ...any)
}

type suite struct {
	Options
	*mesh.Mesh
	report *report.Report
}

// Run measures and fills the report. What it made in the cluster, but for the empty namespace, is gone when it returns.
func Run(ctx context.Context, o Options, r *report.Report) (err error) {
	m, err := mesh.Connect(ctx, mesh.ViaLeader)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if v, err := m.Node.Version(ctx); err == nil {
		r.Environment.Containerd = v.Version
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		err = errors.Join(err, m.Remove(clean, pool))
	}()
	s := &suite{Options: o, Mesh: m, report: r}
	cold, err := s.cold(ctx)
	if err != nil {
		return fmt.Errorf("measuring cold sandboxes: %w", err)
	}
	free, claimed, err := s.slots(ctx, cold.agent)
	if err != nil {
		return fmt.Errorf("measuring slots: %w", err)
	}
	memory, err := host.Memory()
	if err != nil {
		return err
	}
	r.Fact("samples", fmt.Sprintf("%d free slots, %d claimed sandboxes, %d cold ones", free.n, claimed.n, cold.n))
	r.Fact("concurrency", fmt.Sprintf("%d creates at a time while filling; nothing runs while memory is read", parallel))
	r.Fact("cache", "image unpacked; pages shared by several processes count by their share (PSS)")
	r.Fact("sandbox", fmt.Sprintf("%v of %s", mesh.Command(), mesh.Image))
	r.Fact("available_mib", mib(memory.AvailableBytes))
	Sum(r, memory.AvailableBytes, free.Group("free_slot"), claimed.Group("claimed"), cold.Group("cold"))
	r.Judge(budget.Density())
	return nil
}

// reading is what one filling showed.
type reading struct {
	n            int
	bodies       []int64 // PSS of each container's processes
	shims        int
	shimPSS      int64 // each container's share of its shim
	taken, agent int64 // of the machine's free memory: by each container, and by the agent alone
}

// Group is the reading for Sum.
func (x reading) Group(name string) Group {
	return Group{Name: name, Bodies: x.bodies, Shim: x.shimPSS, Shims: x.shims, Taken: x.taken}
}

// cold fills a pool without slots. What its agent takes is known after this.
func (s *suite) cold(ctx context.Context) (reading, error) {
	none := 0
	if err := s.Remove(ctx, pool); err != nil {
		return reading{}, err
	}
	before, err := s.available(ctx)
	if err != nil {
		return reading{}, err
	}
	if _, err := s.Open(ctx, mesh.Pool{Name: pool, Places: s.N, Slots: &none}); err != nil {
		return reading{}, err
	}
	empty, err := s.available(ctx)
	if err != nil {
		return reading{}, err
	}
	if err := s.fill(ctx, false); err != nil {
		return reading{}, err
	}
	x, err := s.read(ctx, "cold", empty)
	x.agent = before - empty
	return x, errors.Join(err, s.Remove(ctx, pool))
}

// slots has a pool fill itself with slots and then has all of them claimed.
func (s *suite) slots(ctx context.Context, agent int64) (free, claimed reading, err error) {
	before, err := s.available(ctx)
	if err != nil {
		return free, claimed, err
	}
	kept, err := s.Open(ctx, mesh.Pool{Name: pool, Places: s.N})
	if err != nil {
		return free, claimed, err
	}
	if kept.Free == 0 {
		s.Say("the pool keeps no slots: %s", kept.Off)
		return free, claimed, nil
	}
	if free, err = s.read(ctx, "free_slot", before-agent); err != nil {
		return free, claimed, err
	}
	if err := s.fill(ctx, true); err != nil {
		return free, claimed, err
	}
	claimed, err = s.read(ctx, "claimed", before-agent)
	return free, claimed, err
}

// fill creates sandboxes until the pool is full; each must claim a slot, or none.
func (s *suite) fill(ctx context.Context, slot bool) error {
	tokens := make(chan struct{}, parallel)
	errs := make([]error, s.N)
	var wg sync.WaitGroup
	for i := range s.N {
		wg.Go(func() {
			tokens <- struct{}{}
			defer func() { <-tokens }()
			resp, err := s.Sandboxes.CreateSandbox(ctx, mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
			if err == nil && slot != (resp.GetStartPath() == sandboxv1.StartPath_START_PATH_SLOT) {
				err = fmt.Errorf("sandbox %s went by %s", resp.GetSandbox().GetName(), resp.GetStartPath())
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// read measures what the pool has, against the free memory of the machine with the agent alone.
func (s *suite) read(ctx context.Context, kind string, empty int64) (reading, error) {
	agent, err := s.AgentUID(ctx, pool)
	if err != nil {
		return reading{}, err
	}
	available, err := s.available(ctx)
	if err != nil {
		return reading{}, err
	}
	x, err := weigh(ctx, s.Node, agent)
	if err != nil {
		return x, err
	}
	if x.n == 0 {
		return x, fmt.Errorf("the agent has no container that runs")
	}
	x.taken = (empty - available) / int64(x.n)
	s.Say("%s: %d containers, %d shims", kind, x.n, x.shims)
	for i, b := range x.bodies {
		s.report.Sample(kind, i, time.Now(), mib(b+x.shimPSS), "MiB", "")
	}
	return x, nil
}

// available is the machine's free memory: the median of some readings, for it is never quite still.
func (s *suite) available(ctx context.Context) (int64, error) {
	var all []int64
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for range settleReads {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		m, err := host.Memory()
		if err != nil {
			return 0, err
		}
		all = append(all, m.AvailableBytes)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}
