package v1alpha1

import (
	"cmp"
	"fmt"
	"strconv"
	"time"
)

// DefaultTTLAfterFinished is how long a Sandbox is kept after its process has ended if neither the Sandbox nor its pool sets
// ttlAfterFinished.
const DefaultTTLAfterFinished = time.Hour

// maxGracePeriodSeconds is the maximum of terminationGracePeriodSeconds.
const maxGracePeriodSeconds = 3600

// DefaultPoolOf returns the pool of Sandboxes that do not name one, given the annotations of their Namespace.
func DefaultPoolOf(namespaceAnnotations map[string]string) string {
	return cmp.Or(namespaceAnnotations[AnnotationDefaultPool], DefaultPool)
}

// Pool returns the pool whose agents run the Sandbox, or "" if the Sandbox names none and has not been placed yet.
func (s *Sandbox) Pool() string { return cmp.Or(s.Spec.PoolRef, s.Status.Pool) }

// DeleteGracePeriod returns the grace period of the delete call, or nil if it set none. An annotation that is not a number
// of seconds from 0 to 3600 is an error.
func (s *Sandbox) DeleteGracePeriod() (*time.Duration, error) {
	raw, ok := s.Annotations[AnnotationDeleteGracePeriod]
	if !ok {
		return nil, nil
	}
	seconds, err := strconv.ParseInt(raw, 10, 64)
	if err != nil || seconds < 0 || seconds > maxGracePeriodSeconds {
		return nil, fmt.Errorf("decoding annotation %s: %q is not a number from 0 to %d", AnnotationDeleteGracePeriod, raw, maxGracePeriodSeconds)
	}
	d := time.Duration(seconds) * time.Second
	return &d, nil
}
