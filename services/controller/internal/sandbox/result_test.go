package sandbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSooner(t *testing.T) {
	for _, tt := range []struct{ a, b, want time.Duration }{
		{0, 0, 0}, {0, 2, 2}, {2, 0, 2}, {1, 2, 1}, {2, 1, 1},
	} {
		require.Equal(t, tt.want, sooner(tt.a, tt.b), "%d, %d", tt.a, tt.b)
	}
}

func TestAfterIsNeverZero(t *testing.T) {
	require.Equal(t, time.Second, after(time.Second))
	require.Positive(t, after(0))
	require.Positive(t, after(-time.Second))
}

func TestMerge(t *testing.T) {
	first, second := &cause{"First", "1"}, &cause{"Second", "2"}
	for _, tt := range []struct {
		name       string
		a, b, want result
	}{
		{"nothing", result{}, result{}, result{}},
		{"the sooner requeue", result{requeue: 2 * time.Second}, result{requeue: time.Second}, result{requeue: time.Second}},
		{"a cause stays", result{cause: first}, result{}, result{cause: first}},
		{"a later cause replaces it", result{cause: first}, result{cause: second}, result{cause: second}},
		{"a later step can clear it", result{cause: first}, result{cause: &cause{}}, result{cause: &cause{}}},
		{"unplaced", result{unplaced: first}, result{unplaced: second}, result{unplaced: second}},
		{"blocked stays", result{blocked: first}, result{removing: true}, result{blocked: first, removing: true}},
		{"flags stay", result{removing: true, warned: true, finalized: true}, result{}, result{removing: true, warned: true, finalized: true}},
		{"flags of a later step", result{}, result{removing: true, warned: true, finalized: true}, result{removing: true, warned: true, finalized: true}},
	} {
		t.Run(tt.name, func(t *testing.T) { require.Equal(t, tt.want, tt.a.merge(tt.b)) })
	}
}

func TestObservationWithAPart(t *testing.T) {
	whole := observation{event: 1, lost: true, result: result{requeue: 5}}
	require.Equal(t, observation{event: 2, lost: true, result: result{requeue: 3, warned: true}},
		whole.with(observation{event: 2, result: result{requeue: 3, warned: true}}))
}
