package pressure

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Samples are those of a neighbor. The methods may be called concurrently.
type Samples struct {
	mu   sync.Mutex
	list []load.Line
	err  error
}

// Follow reads the samples of a neighbor until ctx ends. If the stream breaks, which attacks on the mesh may cause, it reads the output
// again. done is closed at the end.
func Follow(ctx context.Context, t *mesh.Tenant, name string) (s *Samples, done <-chan struct{}) {
	s = &Samples{}
	end := make(chan struct{})
	go func() {
		defer close(end)
		for ctx.Err() == nil {
			err := t.Output(ctx, name, s.add)
			s.mu.Lock()
			s.err = err
			s.mu.Unlock()
			_ = mesh.Wait(ctx, retryTime)
		}
	}()
	return s, end
}

// retryTime is the time between two attempts to read the output.
const retryTime = 200 * time.Millisecond

func (s *Samples) add(line []byte) {
	var l load.Line
	if json.Unmarshal(line, &l) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch l.Kind {
	case load.KindSample:
		if n := len(s.list); n == 0 || s.list[n-1].At < l.At { // it is not read again
			s.list = append(s.list, l)
		}
	case load.KindFailed:
		s.err = fmt.Errorf("the neighbor has failed: %s", l.Text)
	}
}

// minSamples is how many samples a window needs. Undisturbed there are about 30 a second.
const minSamples = 20

// Window has quantiles of the work of a neighbor, and the median of what waits for the disk, in microseconds.
type Window struct {
	P50, P90, P99, Sync float64
	Samples             int
}

// Window returns the samples between two times.
func (s *Samples) Window(from, to time.Time) (Window, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var work, disk []int64
	for _, l := range s.list {
		if l.At < from.UnixNano() || l.At > to.UnixNano() {
			continue
		}
		work = append(work, l.Micros)
		if l.SyncMicros > 0 {
			disk = append(disk, l.SyncMicros)
		}
	}
	if len(work) < minSamples {
		return Window{Samples: len(work)}, suite.Brokenf("the neighbor has sent %d samples in %s: %w", len(work), to.Sub(from), s.err)
	}
	return Window{quantile(work, 0.5), quantile(work, 0.9), quantile(work, 0.99), quantile(disk, 0.5), len(work)}, nil
}

func quantile(list []int64, q float64) float64 {
	if len(list) == 0 {
		return 0
	}
	slices.Sort(list)
	return float64(list[min(int(q*float64(len(list))), len(list)-1)])
}

// MaxRatio is how much longer the work of a neighbor may take under pressure.
const MaxRatio = 2.0

// Compare returns how much longer the work takes in the second window, by the 90th percentile, and evidence if that is too much.
func Compare(calm, storm Window) (ratio float64, evidence string, refused error) {
	if calm.P90 <= 0 {
		return 0, "", suite.Brokenf("the neighbor's work takes no time")
	}
	ratio = storm.P90 / calm.P90
	text := fmt.Sprintf("the neighbor's work took %.1f ms before and %.1f ms meanwhile (p90), %.2f times as long", calm.P90/1000, storm.P90/1000, ratio)
	if ratio > MaxRatio {
		return ratio, text, nil
	}
	return ratio, "", fmt.Errorf("%s", text)
}
