package app_test

import (
	"context"
	"errors"
	"math"
	"runtime/debug"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
)

// limiter bounds nothing. It returns the lower of the asked bound and its own.
type limiter struct {
	own   int64
	err   error
	asked []int64
}

func (l *limiter) LimitOwnMemory(_ context.Context, bytes int64) (int64, error) {
	l.asked = append(l.asked, bytes)
	return min(bytes, l.own), l.err
}

func TestAgentLimitsItsOwnMemory(t *testing.T) {
	for name, c := range map[string]struct {
		flag  int64
		l     limiter
		asked []int64
		gc    int64 // the garbage collector's limit
	}{
		"limited":                      {1000, limiter{own: math.MaxInt64}, []int64{1000}, 900},
		"the container has less":       {1000, limiter{own: 100}, []int64{1000}, 90},
		"off":                          {0, limiter{own: 100}, nil, math.MaxInt64},
		"in no container of the Pod":   {1000, limiter{err: errdefs.ErrNotFound}, []int64{1000}, math.MaxInt64},
		"the cgroup cannot be written": {1000, limiter{err: errors.New("read-only")}, []int64{1000}, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			before := debug.SetMemoryLimit(math.MaxInt64)
			t.Cleanup(func() { debug.SetMemoryLimit(before) })
			(&app.Config{MemoryBytes: c.flag}).LimitMemory(t.Context(), &c.l)
			require.Equal(t, c.asked, c.l.asked)
			require.Equal(t, c.gc, debug.SetMemoryLimit(-1))
		})
	}
}
