package leader

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
)

// Timing has the intervals of an election.
type Timing struct {
	// LeaseDuration is how long other processes wait for a leader that does not renew. RenewDeadline, which is shorter, bounds
	// one renewal; controller-runtime's elector ends a leader that cannot renew in that time. RetryPeriod is the interval of
	// attempts.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
}

// DefaultTiming returns the timing of every component.
func DefaultTiming() Timing {
	return Timing{LeaseDuration: DefaultLeaseDuration, RenewDeadline: DefaultRenewDeadline, RetryPeriod: DefaultRetryPeriod}
}

// certainAge is how long after a write of the Lease its writer certainly leads. It is a little longer than the default interval of
// renewals.
func (t Timing) certainAge() time.Duration { return t.LeaseDuration / 8 }

// vacantAge is how long a holder that has ended keeps the Lease. It is twice certainAge, so that clocks and pauses that a process
// cannot notice have a margin.
func (t Timing) vacantAge() time.Duration { return 2 * t.certainAge() }

// AddFlags adds the flags with their defaults.
func (t *Timing) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&t.LeaseDuration, "lease-duration", DefaultLeaseDuration, "`time` without a renewal after which a leader is replaced")
	fs.DurationVar(&t.RenewDeadline, "lease-renew-deadline", DefaultRenewDeadline, "`time` within which the Lease must be renewed")
	fs.DurationVar(&t.RetryPeriod, "lease-retry-period", DefaultRetryPeriod, "`interval` of attempts to acquire or renew the Lease")
}

// Validate returns every problem, each naming its flag.
func (t Timing) Validate() []error {
	var problems []error
	if t.LeaseDuration < time.Second {
		problems = append(problems, fmt.Errorf("--lease-duration is %s, want at least 1s", t.LeaseDuration))
	}
	if t.RenewDeadline >= t.LeaseDuration {
		problems = append(problems, fmt.Errorf("--lease-renew-deadline is %s, want less than --lease-duration", t.RenewDeadline))
	}
	// client-go lets intervals grow by a fifth, and refuses what would leave no second attempt.
	if t.RetryPeriod <= 0 || t.RetryPeriod*6/5 >= t.RenewDeadline {
		problems = append(problems, fmt.Errorf("--lease-retry-period is %s, want more than 0 and less than 5/6 of --lease-renew-deadline", t.RetryPeriod))
	}
	return problems
}
