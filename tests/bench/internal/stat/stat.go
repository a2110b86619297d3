// Package stat sums samples up. It is pure. Quantiles are by nearest rank: each is a value that was measured.
package stat

import (
	"math"
	"slices"
)

// Summary is what is told of a series of samples, in their unit.
type Summary struct {
	N    int     `json:"n"`
	Min  float64 `json:"min"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
}

// Of sums samples up; without any, all is zero.
func Of(samples []float64) Summary {
	if len(samples) == 0 {
		return Summary{}
	}
	sorted := slices.Clone(samples)
	slices.Sort(sorted)
	return Summary{
		N: len(sorted), Min: sorted[0], P50: rank(sorted, 0.5), P90: rank(sorted, 0.9), P99: rank(sorted, 0.99),
		Max: sorted[len(sorted)-1], Mean: Mean(sorted),
	}
}

// Quantile is the least sample that a share q of all samples does not exceed; zero without samples.
func Quantile(samples []float64, q float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	sorted := slices.Clone(samples)
	slices.Sort(sorted)
	return rank(sorted, q)
}

func rank(sorted []float64, q float64) float64 {
	// A share such as 0.9 of 10 is 9.000000000000002 in floating point, and must not be rounded up to 10.
	i := int(math.Ceil(q*float64(len(sorted))-1e-9)) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

// Mean is the arithmetic mean; zero without samples.
func Mean(samples []float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	sum := 0.0
	for _, x := range samples {
		sum += x
	}
	return sum / float64(len(samples))
}

// Ratio is a over b, and zero if b is: a ratio to nothing is told as not measured.
func Ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
