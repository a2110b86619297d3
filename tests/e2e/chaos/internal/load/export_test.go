package load

import "time"

// Classify returns the reason of an error, and how long it asks to wait.
func Classify(err error) (reason string, wait time.Duration) {
	_, reason, wait, _ = classify(err)
	return reason, wait
}
