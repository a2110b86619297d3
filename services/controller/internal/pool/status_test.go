package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func TestCountsAreWrittenOnceAnInterval(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1e9, 0))
	p, pool := newPace(clock), types.NamespacedName{Namespace: "ns", Name: "p"}
	require.LessOrEqual(t, p.left(pool), time.Duration(0), "never written")
	p.wrote(pool)
	clock.Step(countsInterval / 4)
	require.Equal(t, 3*countsInterval/4, p.left(pool))
	clock.Step(countsInterval)
	require.LessOrEqual(t, p.left(pool), time.Duration(0))
	p.wrote(pool)
	p.forget(pool)
	require.LessOrEqual(t, p.left(pool), time.Duration(0))
}

func TestOnlyCountsMayWait(t *testing.T) {
	old := v1alpha1.SandboxPoolStatus{ReadyAgents: 1, Capacity: 5, FreeCapacity: 5, ReadySlots: 5}
	busier := old
	busier.ActiveSandboxes, busier.FreeCapacity, busier.ReadySlots = 1, 4, 4
	require.True(t, sameButCounts(old, busier))
	busier.ReadyAgents = 0
	require.False(t, sameButCounts(old, busier))
}
