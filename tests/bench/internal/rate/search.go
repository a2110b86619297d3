package rate

// Bounds are those of a search.
type Bounds struct {
	// Start is the first rate that is tried, Least and Most are those that are never left.
	Start, Least, Most float64
	// Precision is the greatest distance between the result and a rate that did not hold, as a share of the result.
	Precision float64
}

// Highest searches the highest rate that holds: it doubles the rate until one does not hold, and then halves the distance between the
// highest that did and the lowest that did not. It ends after a number of probes that is logarithmic in the bounds. The result is zero
// if not even Least holds, and Most if that holds. The error is that of a probe.
func Highest(b Bounds, probe func(rate float64) (bool, error)) (float64, error) {
	low, high := 0.0, 0.0
	for rate := min(max(b.Start, b.Least), b.Most); ; {
		held, err := probe(rate)
		if err != nil {
			return 0, err
		}
		if held {
			low = rate
		} else {
			high = rate
		}
		switch {
		case high == 0 && low >= b.Most, low == 0 && high <= b.Least:
			return low, nil
		case high == 0:
			rate = min(2*low, b.Most)
		case low == 0:
			rate = max(high/2, b.Least)
		case high-low <= b.Precision*low:
			return low, nil
		default:
			rate = (low + high) / 2
		}
	}
}

// Confirm tries a rate for long, and then lower ones, each by a share below the one before it. The result is the first one that holds, or
// zero if none of so many attempts does.
func Confirm(rate, below float64, attempts int, try func(rate float64) (bool, error)) (float64, error) {
	for range attempts {
		held, err := try(rate)
		if err != nil {
			return 0, err
		}
		if held {
			return rate, nil
		}
		rate *= 1 - below
	}
	return 0, nil
}
