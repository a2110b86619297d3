package rate

import (
	"math"
	"time"
)

// Schedule is when creates arrive: at a constant rate, whether or not earlier ones are answered.
type Schedule struct {
	// Rate is arrivals a second.
	Rate float64
	// Duration is the time from the first arrival until no more come.
	Duration time.Duration
}

// N is the number of arrivals.
func (s Schedule) N() int {
	// A product such as 0.1 * 30 is 3.0000000000000004, which is not a fourth arrival.
	return int(math.Ceil(s.Rate*s.Duration.Seconds() - 1e-9))
}

// At is the time of an arrival after the first one.
func (s Schedule) At(i int) time.Duration {
	return time.Duration(float64(i) / s.Rate * float64(time.Second))
}
