// Package burst measures creates that come all at once: on a pool that has slots for all of them, for half, and for none.
package burst

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/raw"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

const (
	pool        = "bench-burst"
	connections = 4
	refillTime  = 2 * time.Minute
	refillTick  = 20 * time.Millisecond
	cleanTime   = 4 * time.Minute
	// idleTime is how long a pool is left alone before a burst. Its slots are ready then, and warm, too: what the agent does
	// ahead for the image in demand comes after the last slot.
	idleTime = 3 * time.Second
	// RawSeries is the baseline.
	RawSeries = "raw"
)

// Options say how much is measured.
type Options struct {
	// N is how many creates come at once.
	N int
	// Refill is how many slots are claimed, all at once, to measure how fast they come back; 0 for not.
	Refill int
	// Raw is the number of raw containers of the baseline.
	Raw int
	// Mesh is how to reach the cluster, and the runtime handler.
	Mesh mesh.Options
	Say  func(format string, args ...any)
}

type suite struct {
	Options
	*mesh.Mesh
	report  *report.Report
	clients []sandboxv1.SandboxServiceClient
	bursts  []Burst
	drained *Burst // to measure refills
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
	for range connections {
		conn, err := m.Dial(ctx)
		if err != nil {
			return err
		}
		s.clients = append(s.clients, sandboxv1.NewSandboxServiceClient(conn))
	}
	for _, x := range []struct {
		name  string
		slots int
	}{{"none", 0}, {"half", o.N / 2}, {"all", o.N}} {
		if err := s.scenario(ctx, x.name, x.slots); err != nil {
			return fmt.Errorf("with slots for %s: %w", x.name, err)
		}
	}
	if err := s.drain(ctx); err != nil {
		return fmt.Errorf("measuring refills: %w", err)
	}
	r.Fact("handler", m.Handler)
	r.Fact("samples", fmt.Sprintf("%d raw containers, and %d creates for each of 3 bursts", o.Raw, o.N))
	r.Fact("concurrency", fmt.Sprintf("%d at once on %d connections; raw containers one at a time", o.N, connections))
	r.Fact("cache", fmt.Sprintf("image pulled and unpacked; page cache warm; the pool has been idle for %v", idleTime))
	r.Fact("pool", fmt.Sprintf("one agent with a capacity of %d, twice the number of creates, so that slots are refilled", 2*o.N))
	r.Fact("image", mesh.Image)
	r.Fact("connection", s.Way)
	Sum(r, s.bursts, s.drained)
	r.Judge(budget.Burst(m.Handler))
	return nil
}

// scenario measures one burst. The first one, in which all go cold, gives the raw containers their model.
func (s *suite) scenario(ctx context.Context, name string, slots int) error {
	kept, err := s.Open(ctx, mesh.Pool{Name: pool, Places: 2 * s.N, Slots: &slots})
	if err != nil {
		return err
	}
	first, err := s.Sandboxes.CreateSandbox(ctx, mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
	if err != nil {
		return fmt.Errorf("creating a first sandbox: %w", err)
	}
	if slots == 0 {
		if err := s.baseline(ctx, first.GetSandbox().GetStatus().GetSandboxId()); err != nil {
			return err
		}
	}
	if err := s.Delete(ctx, first.GetSandbox()); err != nil {
		return err
	}
	if kept, err = s.AwaitSlots(ctx, pool); err != nil {
		return err
	}
	s.Say("%s: %d slots are ready", name, kept.Free)
	if err := wait.For(ctx, idleTime); err != nil {
		return err
	}
	b, made, err := s.burst(ctx, name, slots, kept.Free, s.N)
	if err != nil {
		return err
	}
	if err := s.refill(ctx, &b, kept.Wanted); err != nil {
		return err
	}
	s.bursts = append(s.bursts, b)
	s.Say("%s: %d ran after %.0f ms; refilled %.1f slots a second", name, len(b.Millis), b.Wall.Seconds()*1000, b.Refill)
	for _, x := range made {
		if err := s.AskDelete(ctx, x); err != nil {
			return err
		}
	}
	return s.Remove(ctx, pool)
}

// baseline measures raw containers, one at a time.
func (s *suite) baseline(ctx context.Context, model string) (err error) {
	logs, err := os.MkdirTemp("", "fsb-bench-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(logs)) }()
	runner, err := raw.Like(ctx, s.Node, model, logs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, runner.Sweep(context.WithoutCancel(ctx))) }()
	for i := range s.Raw + 2 {
		at := time.Now()
		took, remove, err := runner.Run(ctx)
		if err != nil {
			return err
		}
		if i >= 2 { // the first ones warm things up
			s.report.Sample(RawSeries, i-2, at, millis(took.Total()), "ms", "")
		}
		if err := remove(ctx); err != nil {
			return err
		}
	}
	return nil
}

// burst sends n creates at once and waits for all answers.
func (s *suite) burst(ctx context.Context, name string, slots, kept, n int) (Burst, []*sandboxv1.Sandbox, error) {
	type answer struct {
		resp       *sandboxv1.CreateSandboxResponse
		err        error
		began, end time.Time
	}
	answers := make([]answer, n)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() {
			req := mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
			a := &answers[i]
			<-start
			a.began = time.Now()
			a.resp, a.err = s.clients[i%len(s.clients)].CreateSandbox(ctx, req)
			a.end = time.Now()
		})
	}
	began := time.Now()
	close(start)
	wg.Wait()
	b := Burst{Name: name, Slots: slots, Kept: kept, Paths: map[string]int{}, ended: time.Now()}
	var made []*sandboxv1.Sandbox
	var errs []error
	for i, a := range answers {
		if a.err != nil {
			errs = append(errs, a.err)
			continue
		}
		made = append(made, a.resp.GetSandbox())
		path := pathOf(a.resp)
		b.Paths[path]++
		b.Millis = append(b.Millis, millis(a.end.Sub(a.began)))
		b.Done = append(b.Done, millis(a.end.Sub(began)))
		b.Wall = max(b.Wall, a.end.Sub(began))
		s.report.Sample(name, i, a.began, millis(a.end.Sub(a.began)), "ms", path)
	}
	if len(errs) > 0 {
		return b, made, fmt.Errorf("%d of %d creates failed, for instance: %w", len(errs), n, errs[0])
	}
	return b, made, nil
}

// refill waits until the pool has its slots again and measures how fast they came, from the last answer on.
func (s *suite) refill(ctx context.Context, b *Burst, wanted int) error {
	if wanted == 0 {
		return nil
	}
	first := -1
	err := mesh.Poll(ctx, refillTick, refillTime, func(ctx context.Context) error {
		now, err := s.Slots(ctx, pool)
		if err != nil {
			return err
		}
		if first < 0 {
			first = now.Free
		}
		if now.Free < wanted {
			return fmt.Errorf("%d of %d slots are ready", now.Free, wanted)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("refilling: %w", err)
	}
	b.RefillTime, b.Missing = time.Since(b.ended), wanted-first
	b.Refill = stat.Ratio(float64(wanted-first), b.RefillTime.Seconds())
	return nil
}

func pathOf(r *sandboxv1.CreateSandboxResponse) string {
	switch r.GetStartPath() {
	case sandboxv1.StartPath_START_PATH_SLOT:
		return "slot"
	case sandboxv1.StartPath_START_PATH_COLD:
		return "cold"
	}
	return "unknown"
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
