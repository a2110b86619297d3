package pressure

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fill adds samples of a time, one for each 25 ms.
func fill(t *testing.T, s *Samples, from time.Time, n int, micros int64) (to time.Time) {
	t.Helper()
	for i := range n {
		to = from.Add(time.Duration(i) * 25 * time.Millisecond)
		raw, err := json.Marshal(load.Line{Kind: load.KindSample, At: to.UnixNano(), Micros: micros, SyncMicros: micros * 2})
		require.NoError(t, err)
		s.add(raw)
	}
	return to
}

func TestSamples(t *testing.T) {
	s, begin := &Samples{}, time.Unix(1000, 0)
	calmEnd := fill(t, s, begin, 40, 3000)
	storm := begin.Add(time.Minute)
	for name, c := range map[string]struct {
		micros    int64
		succeeded bool
	}{"as before": {3000, false}, "less than twice": {5900, false}, "more than twice": {6100, true}} {
		t.Run(name, func(t *testing.T) {
			s := &Samples{list: append([]load.Line(nil), s.list...)}
			stormEnd := fill(t, s, storm, 40, c.micros)
			calm, err := s.Window(begin, calmEnd)
			require.NoError(t, err)
			require.Equal(t, Window{3000, 3000, 3000, 6000, 40}, calm)
			during, err := s.Window(storm, stormEnd)
			require.NoError(t, err)
			ratio, evidence, refused := Compare(calm, during)
			require.InDelta(t, float64(c.micros)/3000, ratio, 0.01)
			require.Equal(t, c.succeeded, evidence != "")
			require.Equal(t, c.succeeded, refused == nil)
		})
	}
	_, err := s.Window(storm, storm.Add(time.Second))
	o := suite.NewOutcome("x", "", "", err)
	require.Contains(t, o.Broken, "0 samples", "a neighbor that is silent proves nothing")
	s.add([]byte("no JSON"))
	before := len(s.list)
	fill(t, s, begin, 40, 3000)
	require.Len(t, s.list, before, "samples that are read again")
}

func TestQuantile(t *testing.T) {
	list := []int64{5, 1, 4, 2, 3, 6, 7, 8, 9, 10}
	require.InDelta(t, 10, quantile(list, 0.99), 0)
	require.InDelta(t, 10, quantile(list, 0.9), 0)
	require.InDelta(t, 6, quantile(list, 0.5), 0)
	require.Zero(t, quantile(nil, 0.5))
}

// TestBombs: each has a name of its own, and says when it is not bounded.
func TestBombs(t *testing.T) {
	names := map[string]bool{}
	for _, b := range bombs() {
		require.False(t, names[b.load])
		names[b.load] = true
		require.Equal(t, b.bounded != nil, b.bound != "", b.load)
	}
	for _, b := range bombs() {
		if b.load != load.Fork {
			continue
		}
		for count, succeeded := range map[int64]bool{1000: false, 1500: true} {
			evidence, _ := b.bounded(t.Context(), nil, &running{lines: []load.Line{{Count: count}, {Count: 3}}})
			require.Equal(t, succeeded, evidence != "")
		}
	}
}
