package ctrd_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

// TestProbeTriesAgain: a failure stands for half a minute, and a success for good. Only a recheck tries again: what a create asks does not.
func TestProbeTriesAgain(t *testing.T) {
	failed, answer := errors.New("no memory"), error(nil)
	tries := 0
	clock := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	p := ctrd.NewProbe(clock, func() error { tries++; return answer })
	pass := func(d time.Duration) { clock.SetTime(clock.Now().Add(d)) }

	answer = failed
	require.Equal(t, failed, p.Recheck())
	require.Equal(t, 1, tries, "the first recheck tries once")
	pass(29 * time.Second)
	require.Equal(t, failed, p.Recheck())
	require.Equal(t, 1, tries)
	pass(time.Second)
	require.Equal(t, failed, p.Result())
	require.Equal(t, 1, tries)
	require.Equal(t, failed, p.Recheck())
	require.Equal(t, 2, tries, "failed again")
	answer = nil
	require.Equal(t, failed, p.Recheck(), "the second failure stands as long")
	pass(30 * time.Second)
	require.NoError(t, p.Recheck())
	require.NoError(t, p.Result())
	answer = failed
	pass(time.Hour)
	require.NoError(t, p.Recheck())
	require.NoError(t, p.Result())
	require.Equal(t, 3, tries)
}

// TestProbeTriesOnceAtATime: while one caller tries again, others get the last result.
func TestProbeTriesOnceAtATime(t *testing.T) {
	failed := errors.New("no memory")
	clock := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	trying, proceed := make(chan struct{}), make(chan struct{})
	first := true
	p := ctrd.NewProbe(clock, func() error {
		if first {
			first = false
			return failed
		}
		close(trying)
		<-proceed
		return nil
	})
	require.Equal(t, failed, p.Result())
	clock.SetTime(clock.Now().Add(time.Minute))
	var wg sync.WaitGroup
	wg.Go(func() { _ = p.Recheck() })
	<-trying
	require.Equal(t, failed, p.Recheck())
	require.Equal(t, failed, p.Result())
	close(proceed)
	wg.Wait()
	require.NoError(t, p.Result())
}
