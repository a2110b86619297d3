package strike

import "github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"

// Hooks for tests.
var (
	PodOf     = podOf
	Processes = processes
	Signal    = signal
)

// Has reports whether a kind of fault can be injected.
func Has(k plan.Kind) bool { return faults()[k] != nil }
