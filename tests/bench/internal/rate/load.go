package rate

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

const (
	// callTime bounds each call.
	callTime = 10 * time.Second
	// emptyTime bounds the deletion of all sandboxes of a trial.
	emptyTime = time.Minute
	emptyTick = 200 * time.Millisecond
)

// trial tries a rate. The CPU time is that from the first arrival until all sandboxes are deleted and all slots are there again: a slot that
// was used has to be paid for.
func (s *suite) trial(ctx context.Context, schedule Schedule) (t Trial, used Usage, err error) {
	if err := s.ready(ctx); err != nil {
		return t, used, err
	}
	used, err = s.meter.during(func() error {
		t = s.load(ctx, schedule)
		answered := time.Now()
		err := mesh.Poll(ctx, emptyTick, emptyTime, func(ctx context.Context) error { return s.Empty(ctx, pool, t.Failed > 0 || t.Skipped > 0) })
		if err != nil {
			return fmt.Errorf("waiting for the end of all sandboxes: %w", err)
		}
		t.Drain = time.Since(answered)
		_, err = s.AwaitSlots(ctx, pool)
		return err
	})
	return t, used, err
}

// load has creates arrive until the schedule ends, or the rate can no longer hold, and waits for the answers.
func (s *suite) load(ctx context.Context, schedule Schedule) Trial {
	tally, n := newTally(schedule, s.Limit), schedule.N()
	began := time.Now()
	sent := 0
	var wg sync.WaitGroup
	for ; sent < n && !tally.lost(); sent++ {
		at := began.Add(schedule.At(sent))
		if wait.For(ctx, time.Until(at)) != nil {
			break
		}
		client := s.clients[sent%len(s.clients)]
		wg.Go(func() { s.one(ctx, client, at, tally) })
	}
	wg.Wait()
	return tally.end(n - sent)
}

// one creates a sandbox that arrived at a time, and deletes it as soon as it runs.
func (s *suite) one(ctx context.Context, client sandboxv1.SandboxServiceClient, at time.Time, tally *tally) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	resp, err := client.CreateSandbox(ctx, mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
	took := time.Since(at)
	if err != nil {
		tally.failed(fmt.Errorf("creating a sandbox: %w", err))
		return
	}
	tally.answered(took, strings.ToLower(strings.TrimPrefix(resp.GetStartPath().String(), "START_PATH_")))
	if err := s.AskDelete(ctx, resp.GetSandbox()); err != nil {
		tally.failed(err)
	}
}
