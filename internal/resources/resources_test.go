package resources_test

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEffective(t *testing.T) {
	type limits = resources.Limits
	for name, c := range map[string]struct{ own, pool, maximum, want limits }{
		// Without configuration, a sandbox had no limit of its own.
		"nothing is set":                {want: resources.Defaults()},
		"the sandbox's own":             {own: limits{1, 2, 3}, pool: limits{4, 5, 6}, want: limits{1, 2, 3}},
		"the pool's":                    {own: limits{MemoryBytes: 2}, pool: limits{4, 5, 6}, want: limits{4, 2, 6}},
		"the pool sets one":             {pool: limits{PIDs: 4096}, want: limits{1000, 512 << 20, 4096}},
		"a default above the maximum":   {maximum: limits{MemoryBytes: 1 << 20}, want: limits{1000, 1 << 20, 1024}},
		"the pool's above the maximum":  {pool: limits{PIDs: 900}, maximum: limits{PIDs: 800}, want: limits{1000, 512 << 20, 800}},
		"a maximum above every default": {maximum: limits{64_000, 1 << 40, 1 << 20}, want: resources.Defaults()},
		"its own is not changed":        {own: limits{PIDs: 900}, maximum: limits{PIDs: 800}, want: limits{1000, 512 << 20, 900}},
		"negative values are not set":   {own: limits{-1, -1, -1}, pool: limits{-1, -1, -1}, maximum: limits{-1, -1, -1}, want: resources.Defaults()},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, c.own.Effective(c.pool, c.maximum)) })
	}
}

func TestCheckNamesEachField(t *testing.T) {
	maximum := resources.Limits{CPUMillis: 2000, PIDs: 100}
	require.NoError(t, resources.Limits{}.Check("spec.resources", maximum))
	require.NoError(t, resources.Limits{CPUMillis: 2000, MemoryBytes: 1 << 40, PIDs: 100}.Check("spec.resources", maximum))
	err := resources.Limits{CPUMillis: 2001, MemoryBytes: 1 << 40, PIDs: 101}.Check("spec.resources", maximum)
	require.True(t, errdefs.IsInvalidArgument(err))
	require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
	require.EqualError(t, err, "spec.resources.cpu_millis: 2001 exceeds the pool's maximum of 2000; spec.resources.pids: 101 exceeds the pool's maximum of 100")
}

// TestEffectiveLimitsPassTheCheck: what is in force of a sandbox that passed the check is within the maximum, and set.
func TestEffectiveLimitsPassTheCheck(t *testing.T) {
	drawn := rapid.Custom(func(t *rapid.T) resources.Limits {
		n := rapid.Int64Range(-1, 1<<40)
		return resources.Limits{CPUMillis: n.Draw(t, "cpu"), MemoryBytes: n.Draw(t, "memory"), PIDs: n.Draw(t, "pids")}
	})
	rapid.Check(t, func(t *rapid.T) {
		own, pool, maximum := drawn.Draw(t, "own"), drawn.Draw(t, "pool"), drawn.Draw(t, "maximum")
		if own.Check("spec", maximum) != nil {
			return
		}
		got := own.Effective(pool, maximum)
		require.NoError(t, got.Check("spec", maximum))
		require.Positive(t, min(got.CPUMillis, got.MemoryBytes, got.PIDs))
		require.Equal(t, got, got.Effective(resources.Limits{}, resources.Limits{}), "the agent changes nothing")
	})
}
