package rpc

import "time"

// DeltaDelay is how long a delta that is not urgent waits.
const DeltaDelay = deltaDelay

// UntilNext is for tests.
func UntilNext(now time.Time, interval time.Duration, id string) time.Duration {
	return untilNext(now, interval, id)
}
