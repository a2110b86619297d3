package rate_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/rate"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSchedule(t *testing.T) {
	s := rate.Schedule{Rate: 8, Duration: 10 * time.Second}
	require.Equal(t, 80, s.N())
	require.Zero(t, s.At(0))
	require.Equal(t, 125*time.Millisecond, s.At(1))
	require.Equal(t, 9875*time.Millisecond, s.At(79))
	require.Equal(t, 3, rate.Schedule{Rate: 0.1, Duration: 30 * time.Second}.N(), "0.1 * 30 is a little more than 3")
}

// Arrivals are evenly spaced, all of them within the duration, and the next one would not be.
func TestScheduleProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rate.Schedule{
			Rate:     rapid.Float64Range(0.5, 2000).Draw(t, "rate"),
			Duration: time.Duration(rapid.IntRange(1, 120).Draw(t, "seconds")) * time.Second,
		}
		n := s.N()
		require.Positive(t, n)
		require.Less(t, s.At(n-1), s.Duration)
		require.GreaterOrEqual(t, s.At(n)+time.Microsecond, s.Duration)
		i := rapid.IntRange(0, n-1).Draw(t, "i")
		require.InDelta(t, 1/s.Rate, (s.At(i+1) - s.At(i)).Seconds(), 1e-8)
	})
}

// search runs Highest on a system that holds up to a rate, and returns the result with the rates that were tried.
func search(t require.TestingT, b rate.Bounds, capacity float64) (float64, []float64) {
	var tried []float64
	got, err := rate.Highest(b, func(r float64) (bool, error) {
		tried = append(tried, r)
		return r <= capacity, nil
	})
	require.NoError(t, err)
	return got, tried
}

func TestHighest(t *testing.T) {
	b := rate.Bounds{Start: 8, Least: 1, Most: 2000, Precision: 0.05}
	got, tried := search(t, b, 100)
	require.Equal(t, []float64{8, 16, 32, 64, 128, 96, 112, 104, 100}, tried)
	require.InDelta(t, 100, got, 0)

	got, tried = search(t, b, 3)
	require.Equal(t, []float64{8, 4, 2, 3, 3.5, 3.25, 3.125}, tried)
	require.InDelta(t, 3, got, 0)

	got, tried = search(t, b, 0.5)
	require.Equal(t, []float64{8, 4, 2, 1}, tried)
	require.Zero(t, got, "not even the least holds")

	got, tried = search(t, rate.Bounds{Start: 8, Least: 1, Most: 20, Precision: 0.05}, 1000)
	require.Equal(t, []float64{8, 16, 20}, tried)
	require.InDelta(t, 20, got, 0)

	broken := errors.New("broken")
	_, err := rate.Highest(b, func(float64) (bool, error) { return true, broken })
	require.ErrorIs(t, err, broken)
}

// The result held, a rate within the precision above it did not, and the number of trials is bounded.
func TestHighestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rate.Bounds{Start: rapid.Float64Range(0.1, 3000).Draw(t, "start"), Least: 1, Most: 2000, Precision: rapid.Float64Range(0.01, 0.5).Draw(t, "precision")}
		capacity := rapid.Float64Range(0.1, 4000).Draw(t, "capacity")
		got, tried := search(t, b, capacity)
		require.LessOrEqual(t, len(tried), 12+11+int(math.Ceil(math.Log2(1/b.Precision)))+1)
		for _, r := range tried {
			require.GreaterOrEqual(t, r, b.Least)
			require.LessOrEqual(t, r, b.Most)
		}
		switch {
		case capacity < b.Least:
			require.Zero(t, got)
		case capacity >= b.Most:
			require.InDelta(t, b.Most, got, 0)
		default:
			require.LessOrEqual(t, got, capacity)
			require.Greater(t, got*(1+b.Precision)+1e-9, capacity)
		}
	})
}

func TestConfirm(t *testing.T) {
	var tried []float64
	try := func(capacity float64) func(float64) (bool, error) {
		tried = nil
		return func(r float64) (bool, error) {
			tried = append(tried, r)
			return r <= capacity, nil
		}
	}
	got, err := rate.Confirm(100, 0.1, 4, try(85))
	require.NoError(t, err)
	require.InDelta(t, 81, got, 1e-9)
	require.InDeltaSlice(t, []float64{100, 90, 81}, tried, 1e-9)
	got, err = rate.Confirm(100, 0.1, 4, try(1))
	require.NoError(t, err)
	require.Zero(t, got)
	require.Len(t, tried, 4)
	broken := errors.New("broken")
	_, err = rate.Confirm(100, 0.1, 4, func(float64) (bool, error) { return false, broken })
	require.ErrorIs(t, err, broken)
}

// As many answers may be slow as leave the quantile within the limit, and not one more.
func TestSlowAllowed(t *testing.T) {
	for _, n := range []int{1, 2, 99, 100, 101, 199, 200, 250, 6000, 12345} {
		samples := make([]float64, n)
		for i := range rate.SlowAllowed(n) {
			samples[i] = 1
		}
		require.Zero(t, stat.Quantile(samples, 0.99), n)
		samples[rate.SlowAllowed(n)] = 1
		require.InDelta(t, 1, stat.Quantile(samples, 0.99), 0, n)
	}
}

func TestTrial(t *testing.T) {
	const limit = 250 * time.Millisecond
	s := rate.Schedule{Rate: 10, Duration: 20 * time.Second} // 200 arrivals, 2 may be slow
	fill := func(slow int) interface {
		Answered(took time.Duration, path string)
		Fail(err error)
		Lost() bool
		End(skipped int) rate.Trial
	} {
		tally := rate.NewTally(s, limit)
		for i := range s.N() {
			took := limit
			if i < slow {
				took++
			}
			tally.Answered(took, "slot")
		}
		return tally
	}
	good := fill(2)
	require.False(t, good.Lost())
	trial := good.End(0)
	held, why := trial.Held(limit)
	require.True(t, held, why)
	require.Equal(t, map[string]int{"slot": 200}, trial.Paths)
	trial.Drain = 6 * time.Second
	held, why = trial.Held(limit)
	require.False(t, held)
	require.Contains(t, why, "deletions took 6s longer")

	slow := fill(3)
	require.True(t, slow.Lost())
	held, why = slow.End(0).Held(limit)
	require.False(t, held)
	require.Contains(t, why, "p99 is above 250ms")

	skipped := fill(0)
	require.False(t, skipped.Lost())
	held, _ = skipped.End(1).Held(limit)
	require.False(t, held)

	failed := fill(0)
	failed.Fail(errors.New("first"))
	failed.Fail(errors.New("second"))
	require.True(t, failed.Lost())
	trial = failed.End(0)
	require.Equal(t, "first", trial.Error)
	held, why = trial.Held(limit)
	require.False(t, held)
	require.Contains(t, why, "2 calls failed")

	short := rate.NewTally(s, limit)
	short.Answered(time.Millisecond, "cold")
	held, why = short.End(0).Held(limit)
	require.False(t, held)
	require.Contains(t, why, "1 of 200")
}

func TestComponents(t *testing.T) {
	for _, test := range []struct {
		program string
		args    []string
		want    string
	}{
		{"containerd", []string{"containerd", "--config", "x"}, rate.Containerd},
		{"fsb-local", []string{"etcd"}, rate.Etcd},
		{"fsb-local", []string{"kube-apiserver", "--x"}, rate.APIServer},
		{"fsb-local", []string{"kubelet"}, rate.Kubernetes},
		{"fsb-local", []string{"/x/fsb-local", "supervise"}, rate.Kubernetes},
		{"fsb-local", nil, ""},
		{"containerd-shim-runc-v2", []string{"x"}, ""},
		{"", nil, ""},
	} {
		require.Equal(t, test.want, rate.ComponentOf(test.program, test.args), test.program)
	}
	pod := func(labels map[string]string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
	}
	require.Equal(t, rate.Agents, rate.PodPart(pod(map[string]string{v1alpha1.LabelPool: "p", "app.kubernetes.io/name": "agent"})))
	require.Equal(t, rate.Allocator, rate.PodPart(pod(map[string]string{"app.kubernetes.io/name": "allocator"})))
	require.Equal(t, rate.OtherPods, rate.PodPart(pod(nil)))
}
