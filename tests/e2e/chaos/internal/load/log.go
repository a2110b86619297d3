// Package load carries a plan's lives out by the public API as a good client does, and keeps the log of what it was told:
// it repeats what had no answer under the same request_id, waits as long as typed errors say, and deletes by name what a
// create has left unclear. It judges nothing.
package load

import (
	"slices"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// Log is the clients' log. It may be used concurrently.
type Log struct {
	mu        sync.Mutex
	calls     []audit.Call
	latencies []time.Duration
	internal  int
}

// add takes a call that has come to its end.
func (l *Log) add(c audit.Call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, c)
}

// took keeps how long an acknowledged create took, from when it was due to its answer, repetitions included.
func (l *Log) took(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.latencies = append(l.latencies, d)
}

// defect counts an answer that no client should ever get.
func (l *Log) defect() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.internal++
}

// Calls is a copy of all calls that have come to their end.
func (l *Log) Calls() []audit.Call {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.calls)
}

// Internal is how many answers said INTERNAL.
func (l *Log) Internal() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.internal
}

// Quantile is the latency that a share of the acknowledged creates did not exceed; zero if there were none.
func (l *Log) Quantile(share float64) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.latencies) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(l.latencies))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}
