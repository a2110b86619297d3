package leader

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
)

// Timing is how fast an election is.
type Timing struct {
	// LeaseDuration is how long others wait for a leader that says nothing. RenewDeadline, less than that, bounds one attempt
	// to renew; for an elector of controller-runtime's it is when a leader that cannot renew ends. RetryPeriod is the interval
	// of attempts.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
}

// DefaultTiming is that of every component.
func DefaultTiming() Timing {
	return Timing{LeaseDuration: DefaultLeaseDuration, RenewDeadline: DefaultRenewDeadline, RetryPeriod: DefaultRetryPeriod}
}

// AddFlags adds the flags with their defaults.
func (t *Timing) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&t.LeaseDuration, "lease-duration", DefaultLeaseDuration, "`time` that a leader may say nothing before it is replaced")
	fs.DurationVar(&t.RenewDeadline, "lease-renew-deadline", DefaultRenewDeadline, "`time` in which the Lease must be renewed")
	fs.DurationVar(&t.RetryPeriod, "lease-retry-period", DefaultRetryPeriod, "`interval` of attempts to get or renew the Lease")
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
