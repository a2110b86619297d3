package keylock_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/keylock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOneAtATime(t *testing.T) {
	m := keylock.New[string]()
	counter := 0
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			unlock, err := m.Lock(context.Background(), "k")
			if err == nil {
				counter++ // the race detector would tell
				unlock()
				unlock() // again does nothing
			}
		})
	}
	wg.Wait()
	require.Equal(t, 50, counter)
}

func TestKeysAreIndependentAndWaitersMayLeave(t *testing.T) {
	m := keylock.New[string]()
	unlock, err := m.Lock(context.Background(), "a")
	require.NoError(t, err)
	other, err := m.Lock(context.Background(), "b")
	require.NoError(t, err)
	other()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	_, err = m.Lock(ctx, "a")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = m.Lock(ctx, "c")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	unlock()
	unlock, err = m.Lock(context.Background(), "a")
	require.NoError(t, err, "a caller that left holds nothing")
	unlock()
}
