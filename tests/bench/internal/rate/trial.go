package rate

import (
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

const (
	// quantile of the latencies that has to be within the limit.
	quantile = 0.99
	// drainLimit bounds the time that sandboxes of a rate that holds need to be deleted after the last one was answered: otherwise
	// deletions would not keep up with creates.
	drainLimit = 5 * time.Second
)

// Trial is what a rate did.
type Trial struct {
	Schedule
	// Millis are the times from the scheduled arrival of a create to its answer.
	Millis []float64
	// Paths counts the ways by which sandboxes came to run.
	Paths map[string]int
	// Failed is how many creates or deletes failed; Error is the first of their errors.
	Failed int
	Error  string
	// Skipped is how many arrivals were left out, because the rate could no longer hold.
	Skipped int
	// Drain is the time from the last answer until all sandboxes were deleted.
	Drain time.Duration
}

// Held reports whether the rate held, and if not, why.
func (t Trial) Held(limit time.Duration) (held bool, why string) {
	switch p99 := stat.Quantile(t.Millis, quantile); {
	case t.Failed > 0:
		return false, fmt.Sprintf("%d calls failed", t.Failed)
	case t.Skipped > 0:
		return false, fmt.Sprintf("too many took longer than %v", limit)
	case len(t.Millis) < t.N():
		return false, fmt.Sprintf("%d of %d were answered", len(t.Millis), t.N())
	case p99 > millis(limit):
		return false, fmt.Sprintf("p99 is above %v", limit)
	case t.Drain > drainLimit:
		return false, fmt.Sprintf("deletions took %v longer", t.Drain.Round(time.Millisecond))
	}
	return true, ""
}

// slowAllowed is how many of n creates may take longer than the limit for the quantile, by nearest rank, to be within it.
func slowAllowed(n int) int { return n - int(math.Ceil(quantile*float64(n)-1e-9)) }

// tally collects a Trial while it runs. All methods may be called concurrently.
type tally struct {
	limit time.Duration

	mu    sync.Mutex
	trial Trial
	slow  int
}

func newTally(s Schedule, limit time.Duration) *tally {
	return &tally{limit: limit, trial: Trial{Schedule: s, Paths: map[string]int{}}}
}

// answered adds a create that was answered.
func (t *tally) answered(took time.Duration, path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trial.Millis = append(t.trial.Millis, millis(took))
	t.trial.Paths[path]++
	if took > t.limit {
		t.slow++
	}
}

// failed adds a call that failed.
func (t *tally) failed(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trial.Failed++; t.trial.Failed == 1 {
		t.trial.Error = err.Error()
	}
}

// lost reports whether the rate can no longer hold, however fast the remaining answers are.
func (t *tally) lost() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trial.Failed > 0 || t.slow > slowAllowed(t.trial.N())
}

// end returns the trial. No other method may be called after it.
func (t *tally) end(skipped int) Trial {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trial.Skipped = skipped
	return t.trial
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
