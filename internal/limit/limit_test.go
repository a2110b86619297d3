package limit_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newLimits(t *testing.T, o limit.Options) (*limit.Limits, *clocktesting.FakeClock) {
	t.Helper()
	c := clocktesting.NewFakeClock(time.Unix(1_700_000_000, 0))
	l, err := limit.New(o, c, nil)
	require.NoError(t, err)
	return l, c
}

// requireExceeded requires the error of a limit, which says what the limit is, and when to retry.
func requireExceeded(t *testing.T, err error, name, allowed string) time.Duration {
	t.Helper()
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
	var f *fault.Error
	require.ErrorAs(t, err, &f)
	require.Equal(t, fault.CallerLimitExceeded, f.Reason())
	require.Equal(t, name, f.Metadata()["limit"])
	require.Equal(t, allowed, f.Metadata()["allowed"])
	after, ok := fault.RetryAfter(err)
	require.True(t, ok)
	return after
}

func TestRequests(t *testing.T) {
	l, c := newLimits(t, limit.Options{Rate: 10, Burst: 3})
	for range 3 {
		require.NoError(t, l.Request("alice"))
	}
	err := l.Request("alice")
	require.Equal(t, 100*time.Millisecond, requireExceeded(t, err, "requests", "10"))
	require.ErrorContains(t, err, `user "alice" may have 10 requests a second`)
	require.NoError(t, l.Request("bob"), "each user has its own")
	for range 50 {
		require.Error(t, l.Request("alice"))
	}
	c.Step(100 * time.Millisecond)
	require.NoError(t, l.Request("alice"), "what was refused does not count")
	require.Error(t, l.Request("alice"))
	c.Step(time.Hour)
	for range 3 {
		require.NoError(t, l.Request("alice"))
	}
	require.Error(t, l.Request("alice"))
}

func TestOpenCalls(t *testing.T) {
	for name, enter := range map[string]func(l *limit.Limits, user string) (func(), error){
		"creates": func(l *limit.Limits, user string) (func(), error) { return l.Create(user) },
		"streams": func(l *limit.Limits, user string) (func(), error) { return l.Stream(user) },
	} {
		t.Run(name, func(t *testing.T) {
			l, c := newLimits(t, limit.Options{Creates: 2, Streams: 2})
			first, err := enter(l, "alice")
			require.NoError(t, err)
			second, err := enter(l, "alice")
			require.NoError(t, err)
			c.Step(24 * time.Hour)
			_, err = enter(l, "alice")
			requireExceeded(t, err, name, "2")
			other, err := enter(l, "bob")
			require.NoError(t, err)
			other()
			first()
			first()
			third, err := enter(l, "alice")
			require.NoError(t, err)
			_, err = enter(l, "alice")
			require.Error(t, err, "what ends twice counts once")
			second()
			third()
			require.Zero(t, l.Open())
		})
	}
	t.Run("one does not count as the other", func(t *testing.T) {
		l, _ := newLimits(t, limit.Options{Creates: 1, Streams: 1})
		_, err := l.Create("alice")
		require.NoError(t, err)
		_, err = l.Stream("alice")
		require.NoError(t, err)
	})
}

func TestConcurrentCallsDoNotExceedALimit(t *testing.T) {
	l, _ := newLimits(t, limit.Options{Rate: 1, Burst: 20, Creates: 7})
	var requests, creates atomic.Int64
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			if l.Request("alice") == nil {
				requests.Add(1)
			}
			if _, err := l.Create("alice"); err == nil {
				creates.Add(1)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 20, requests.Load())
	require.EqualValues(t, 7, creates.Load())
}

func TestNoLimit(t *testing.T) {
	none, _ := newLimits(t, limit.Options{})
	for name, l := range map[string]*limit.Limits{"zero": none, "nil": nil} {
		t.Run(name, func(t *testing.T) {
			for range 1000 {
				require.NoError(t, l.Request("alice"))
				_, err := l.Create("alice")
				require.NoError(t, err)
				_, err = l.Stream("alice")
				require.NoError(t, err)
			}
		})
	}
}

// TestMemoryIsBounded: strangers cannot fill it, for a user exists only after authentication, and many users cannot either.
func TestMemoryIsBounded(t *testing.T) {
	l, _ := newLimits(t, limit.Options{Rate: 1, Burst: 1})
	for i := range limit.MaxUsers + 100 {
		require.NoError(t, l.Request(fmt.Sprint(i)))
	}
	require.Equal(t, limit.MaxUsers, l.Users())
}

// counters returns the values of a registry's counters, by name and the values of their labels.
func counters(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	require.NoError(t, err)
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			if m.GetCounter() != nil {
				all[name] = m.GetCounter().GetValue()
			}
		}
	}
	return all
}

func TestRefusalsAreCounted(t *testing.T) {
	r := prometheus.NewRegistry()
	l, err := limit.New(limit.Options{Creates: 1}, clock.RealClock{}, r)
	require.NoError(t, err)
	for range 3 {
		_, _ = l.Create("alice")
	}
	require.Equal(t, map[string]float64{"fastsandbox_caller_limited_total creates": 2}, counters(t, r))
	_, err = limit.New(limit.Options{}, clock.RealClock{}, r)
	require.ErrorContains(t, err, "registering")
}

func TestFlags(t *testing.T) {
	var o limit.Options
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(nil))
	require.Empty(t, o.Validate())
	require.NoError(t, fs.Parse([]string{"--caller-rate=-1", "--caller-burst=-1", "--caller-creates=-1", "--caller-streams=-1"}))
	require.Len(t, o.Validate(), 3)
	require.NoError(t, fs.Parse([]string{"--caller-rate=0", "--caller-burst=0", "--caller-creates=0", "--caller-streams=0"}))
	require.Empty(t, o.Validate())
	require.NoError(t, fs.Parse([]string{"--caller-rate=0.5"}))
	require.Len(t, o.Validate(), 1)
}

// BenchmarkRequest is the cost of the limits for one request, of one user and of many.
func BenchmarkRequest(b *testing.B) {
	for _, users := range []int{1, 1000} {
		b.Run(fmt.Sprintf("users=%d", users), func(b *testing.B) {
			l, err := limit.New(limit.Options{Rate: 1e9, Burst: 1e9, Creates: 1000}, clock.RealClock{}, nil)
			require.NoError(b, err)
			names := make([]string, users)
			for i := range names {
				names[i] = fmt.Sprintf("system:serviceaccount:namespace-%d:default", i)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				name := names[i%users]
				i++
				if err := l.Request(name); err != nil {
					b.Fatal(err)
				}
				done, err := l.Create(name)
				if err != nil {
					b.Fatal(err)
				}
				done()
			}
		})
	}
}
