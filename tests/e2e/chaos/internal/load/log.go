// Package load runs a plan's lives through the public API as a well-behaved client does, and keeps the log of the answers:
// it repeats a request without an answer under the same request_id, waits as long as typed errors say, and deletes by name
// when the outcome of a create stays unknown. It judges nothing. Runner.Run must be called once; a Log may be used concurrently.
package load

import (
	"slices"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// Log is the clients' log.
type Log struct {
	mu        sync.Mutex
	calls     []audit.Call
	latencies []time.Duration
	internal  int
}

// add appends a call that has ended.
func (l *Log) add(c audit.Call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, c)
}

// addLatency appends the latency of an acknowledged create, from when it was due to its answer, repetitions included.
func (l *Log) addLatency(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.latencies = append(l.latencies, d)
}

// addInternal counts an INTERNAL error, which no client should ever receive.
func (l *Log) addInternal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.internal++
}

// Calls returns a copy of all calls that have ended.
func (l *Log) Calls() []audit.Call {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.calls)
}

// Internal returns the number of INTERNAL errors.
func (l *Log) Internal() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.internal
}

// Quantile returns the latency that a share of the acknowledged creates did not exceed; zero if there were none.
func (l *Log) Quantile(share float64) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.latencies) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(l.latencies))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}
