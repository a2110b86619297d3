// Package stat summarizes samples with gonum. Quantiles are by nearest rank: each is a value that was measured. Everything
// may be called concurrently.
package stat

import (
	"slices"

	gonum "gonum.org/v1/gonum/stat"
)

// Summary describes a series of samples, in their unit.
type Summary struct {
	N    int     `json:"n"`
	Min  float64 `json:"min"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
}

// Of summarizes samples. Without samples everything is zero.
func Of(samples []float64) Summary {
	if len(samples) == 0 {
		return Summary{}
	}
	sorted := slices.Sorted(slices.Values(samples))
	return Summary{
		N: len(sorted), Min: sorted[0], P50: rank(sorted, 0.5), P90: rank(sorted, 0.9), P99: rank(sorted, 0.99),
		Max: sorted[len(sorted)-1], Mean: Mean(sorted),
	}
}

// Quantile returns the least sample that a share q of all samples does not exceed; zero without samples.
func Quantile(samples []float64, q float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	return rank(slices.Sorted(slices.Values(samples)), q)
}

func rank(sorted []float64, q float64) float64 {
	// In floating point a share such as 0.07 of 100 is 7.000000000000001, which must not be rounded up to 8.
	return gonum.Quantile(max(q-1e-12, 0), gonum.Empirical, sorted, nil)
}

// Mean returns the arithmetic mean; zero without samples.
func Mean(samples []float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	return gonum.Mean(samples, nil)
}

// Ratio returns a/b, or zero if b is zero: reports show a ratio to nothing as not measured.
func Ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
