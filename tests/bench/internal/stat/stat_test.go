package stat_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOf(t *testing.T) {
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(i+1))
	}
	rand.Shuffle(len(hundred), func(i, j int) { hundred[i], hundred[j] = hundred[j], hundred[i] })
	before := slices.Clone(hundred)
	require.Equal(t, stat.Summary{N: 100, Min: 1, P50: 50, P90: 90, P99: 99, Max: 100, Mean: 50.5}, stat.Of(hundred))
	require.Equal(t, before, hundred, "the samples keep their order")
	require.Equal(t, stat.Summary{N: 1, Min: 7, P50: 7, P90: 7, P99: 7, Max: 7, Mean: 7}, stat.Of([]float64{7}))
	require.Equal(t, stat.Summary{N: 10, Min: 1, P50: 5, P90: 9, P99: 10, Max: 10, Mean: 5.5}, stat.Of([]float64{10, 9, 8, 7, 6, 5, 4, 3, 2, 1}))
	require.Zero(t, stat.Of(nil))
	require.Zero(t, stat.Quantile(nil, 0.5))
	require.Zero(t, stat.Ratio(3, 0))
	require.InDelta(t, 1.5, stat.Ratio(3, 2), 1e-12)
}

// A quantile is a sample; at least the share q of all is not above it, and less than that share is below it.
func TestQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Float64Range(0, 1000), 1, 300).Draw(t, "samples")
		percent := rapid.IntRange(1, 100).Draw(t, "percent")
		got := stat.Quantile(samples, float64(percent)/100)
		require.Contains(t, samples, got)
		below, upTo := 0, 0
		for _, x := range samples {
			if x < got {
				below++
			}
			if x <= got {
				upTo++
			}
		}
		require.GreaterOrEqual(t, upTo*100, percent*len(samples))
		require.Less(t, below*100, percent*len(samples))
	})
}
