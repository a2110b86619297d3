package feed_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/feed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEveryListenerReceivesAll(t *testing.T) {
	var f feed.Feed
	f.Publish(feed.Deletion{Cause: "before"})
	a, stopA := f.Listen()
	b, stopB := f.Listen()
	f.Publish(feed.Deletion{Cause: "1"})
	stopB()
	f.Publish(feed.Deletion{Cause: "2"})
	stopA()
	require.Len(t, a, 2)
	require.Equal(t, "1", (<-a).Cause)
	require.Equal(t, "2", (<-a).Cause)
	require.Len(t, b, 1)
}

func TestSlowListenerLearnsHowManyItMissed(t *testing.T) {
	var f feed.Feed
	items, stop := f.Listen()
	defer stop()
	for range cap(items) + 3 {
		f.Publish(feed.Deletion{})
	}
	for range cap(items) {
		require.Zero(t, (<-items).Missed)
	}
	f.Publish(feed.Deletion{})
	require.Equal(t, 3, (<-items).Missed)
	f.Publish(feed.Deletion{})
	require.Zero(t, (<-items).Missed)
}
