// Package density measures memory: of a free slot, of a sandbox that claimed one, and of one that was started cold, with
// their share of the shim, by the memory that the kernel accounts to each process, and by the memory that filling an agent takes.
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
	// N is the number of capacity units that are filled.
	N int
	// Mesh is how to reach the cluster, and the runtime handler.
	Mesh mesh.Options
	Say  func(format string, args ...any)
}

type suite struct {
	Options
	*mesh.Mesh
	report *report.Report
	// strayed is how many creates did not go the way that was to be measured.
	strayed int
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
	r.Fact("handler", m.Handler)
	r.Fact("samples", fmt.Sprintf("%d free slots, %d claimed sandboxes, %d cold ones", free.n, claimed.n, cold.n))
	r.Fact("strayed", fmt.Sprintf("%d creates did not go the way that was to be measured, and are not among these", s.strayed))
	r.Fact("concurrency", fmt.Sprintf("%d creates at a time while filling; nothing runs while memory is read", parallel))
	r.Fact("cache", "image unpacked; pages shared by several processes count by their share (PSS)")
	r.Fact("sandbox", fmt.Sprintf("%v of %s", mesh.Command(), mesh.Image))
	r.Fact("available_mib", mib(memory.AvailableBytes))
	Sum(r, memory.AvailableBytes, free.Group("free_slot"), claimed.Group("claimed"), cold.Group("cold"))
	r.Judge(budget.Density(m.Handler))
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
	made, err := s.fill(ctx, sandboxv1.StartPath_START_PATH_COLD)
	if err != nil {
		return reading{}, err
	}
	x, err := s.read(ctx, "cold", made, empty)
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
	if free, err = s.read(ctx, "free_slot", nil, before-agent); err != nil {
		return free, claimed, err
	}
	made, err := s.fill(ctx, sandboxv1.StartPath_START_PATH_SLOT)
	if err != nil {
		return free, claimed, err
	}
	claimed, err = s.read(ctx, "claimed", made, before-agent)
	return free, claimed, err
}

// fill creates sandboxes until the pool is full, and returns the uids of those that came to run by the path.
func (s *suite) fill(ctx context.Context, path sandboxv1.StartPath) (map[string]bool, error) {
	tokens := make(chan struct{}, parallel)
	answers, errs := make([]*sandboxv1.CreateSandboxResponse, s.N), make([]error, s.N)
	var wg sync.WaitGroup
	for i := range s.N {
		wg.Go(func() {
			tokens <- struct{}{}
			defer func() { <-tokens }()
			answers[i], errs[i] = s.Sandboxes.CreateSandbox(ctx, mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("filling the pool: %w", err)
	}
	made := map[string]bool{}
	for _, a := range answers {
		if a.GetStartPath() == path {
			made[a.GetSandbox().GetUid()] = true
		}
	}
	if len(made) < s.N {
		s.strayed += s.N - len(made)
		s.Say("%d of %d did not come to run by %s", s.N-len(made), s.N, path)
	}
	return made, nil
}

// read measures what the pool has, against the free memory of the machine with the agent alone: the sandboxes with these
// uids, or, without any, the slots.
func (s *suite) read(ctx context.Context, kind string, uids map[string]bool, empty int64) (reading, error) {
	agent, err := s.AgentUID(ctx, pool)
	if err != nil {
		return reading{}, err
	}
	available, err := s.available(ctx)
	if err != nil {
		return reading{}, err
	}
	x, err := weigh(ctx, s.Node, agent, uids)
	if err != nil {
		return x, err
	}
	if x.n == 0 {
		return x, errors.New("the agent has no such container that runs")
	}
	x.taken = (empty - available) / int64(s.N) // the same number exists on either path
	s.Say("%s: %d containers, %d shims", kind, x.n, x.shims)
	for i, b := range x.bodies {
		s.report.Sample(kind, i, time.Now(), mib(b+x.shimPSS), "MiB", "")
	}
	return x, nil
}

// available is the machine's free memory: the median of some readings, because it always changes a little.
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
