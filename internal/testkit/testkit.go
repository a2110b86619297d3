// Package testkit holds what the tests of all components share. Its subpackages start real servers and fakes.
package testkit

import "time"

const (
	// Timeout bounds every wait for a condition in a test. It is long enough for a busy 2-core machine under the race
	// detector; a test that passes never waits for it.
	Timeout = 60 * time.Second
	// Tick is the interval at which a test checks a condition.
	Tick = 5 * time.Millisecond
)
