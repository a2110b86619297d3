package scale

import (
	"context"
	"sync"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

const (
	// life is how long a sandbox of the load is kept.
	life = 5 * time.Second
	// callTime bounds each call of the load.
	callTime = 10 * time.Second
	// progressEvery is the interval of progress messages.
	progressEvery = 10 * time.Second
)

// load creates sandboxes at a rate that does not depend on how fast the calls are answered, and deletes each after a while.
type load struct {
	testbed *testbed
	target  *allocator

	mu      sync.Mutex
	creates []Timed
	errs    []string
	deletes int
}

func (w *testbed) newLoad(target *allocator) *load { return &load{testbed: w, target: target} }

// run runs for the testbed's Duration and then until all is deleted again.
func (l *load) run(ctx context.Context) {
	interval := time.Duration(float64(time.Second) / l.testbed.Rate)
	began := time.Now()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	lastProgress := began
	for n := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		passed := time.Since(began)
		if passed >= l.testbed.Duration {
			return
		}
		if time.Since(lastProgress) >= progressEvery {
			lastProgress = time.Now()
			l.progress()
		}
		for ; n < int(passed/interval); n++ { // a ticker drops ticks that come too late
			wg.Go(func() { l.one(ctx) })
		}
	}
}

func (l *load) progress() {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := ""
	if n := len(l.errs); n > 0 {
		last = ", the last: " + l.errs[n-1]
	}
	l.testbed.Say("%d creates, %d deletes, %d errors%s", len(l.creates), l.deletes, len(l.errs), last)
}

// one is the life of one sandbox.
func (l *load) one(ctx context.Context) {
	req := request()
	began := time.Now()
	call, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	_, err := l.target.sandboxes.CreateSandbox(call, req)
	took := time.Since(began)
	l.mu.Lock()
	if err != nil {
		l.errs = append(l.errs, err.Error())
	} else {
		l.creates = append(l.creates, Timed{At: began, Took: took})
	}
	l.mu.Unlock()
	if wait.For(ctx, life) != nil {
		return
	}
	remove, cancelRemove := context.WithTimeout(ctx, callTime)
	defer cancelRemove()
	_, err = l.target.sandboxes.DeleteSandbox(remove, &sandboxv1.DeleteSandboxRequest{Namespace: namespace, Name: req.GetName()})
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.deletes++
	} else {
		l.errs = append(l.errs, err.Error())
	}
}

// watchUsage measures both allocators for a time, each second.
func watchUsage(ctx context.Context, leading, standby *allocator, d time.Duration) (Usage, error) {
	began := time.Now()
	first, err := leading.Usage()
	if err != nil {
		return Usage{}, err
	}
	other, err := standby.Usage()
	if err != nil {
		return Usage{}, err
	}
	u := Usage{}
	last, lastAt := first, began
	for time.Since(began) < d {
		if err := wait.For(ctx, min(time.Second, d-time.Since(began))); err != nil {
			return u, err
		}
		p, err := leading.Usage()
		if err != nil {
			return u, err
		}
		now := time.Now()
		u.Points = append(u.Points, UsagePoint{At: now, Cores: (p.CPUSeconds - last.CPUSeconds) / now.Sub(lastAt).Seconds(), RSS: mib(p.RSSBytes)})
		u.RSS = max(u.RSS, mib(p.RSSBytes))
		u.Cores = (p.CPUSeconds - first.CPUSeconds) / now.Sub(began).Seconds()
		last, lastAt = p, now
	}
	p, err := standby.Usage()
	if err != nil {
		return u, err
	}
	u.StandbyCores = (p.CPUSeconds - other.CPUSeconds) / time.Since(began).Seconds()
	u.StandbyRSS = mib(p.RSSBytes)
	return u, nil
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
