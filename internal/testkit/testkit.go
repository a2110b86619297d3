// Package testkit holds what tests of all components share. Its subpackages start real servers.
package testkit

import "time"

const (
	// Timeout bounds every wait for a condition in a test. It is long enough for a busy 2-core machine under the race
	// detector; a test that passes never waits for it.
	Timeout = 60 * time.Second
	// Tick is how often a test looks at a condition.
	Tick = 5 * time.Millisecond
)
