package rate

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// SlowAllowed, Tally, ComponentOf and PodPart are exported for tests.
var (
	SlowAllowed = slowAllowed
	NewTally    = newTally
	ComponentOf = componentOf
)

// PodPart is the part of a Pod.
func PodPart(p *corev1.Pod) string { return podPart(p) }

// Answered adds a create that was answered.
func (t *tally) Answered(took time.Duration, path string) { t.answered(took, path) }

// Fail adds a call that failed.
func (t *tally) Fail(err error) { t.failed(err) }

// Lost reports whether the rate can no longer hold.
func (t *tally) Lost() bool { return t.lost() }

// End returns the trial.
func (t *tally) End(skipped int) Trial { return t.end(skipped) }
