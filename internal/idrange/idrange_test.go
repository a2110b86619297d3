package idrange_test

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		first uint32
		count int
		want  string
	}{
		{idrange.DefaultFirst, idrange.DefaultCount, ""}, {idrange.Size, 1, ""}, {idrange.DefaultFirst, 0, "want at least 1"},
		{0, 10, "lower ones are the host's own"}, {idrange.DefaultFirst, 1 << 16, "want at most"},
	} {
		err := idrange.Ranges{First: c.first, Count: c.count}.Validate()
		if c.want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, c.want)
	}
}

// TestTake: agents take all ranges at the same time. Each range is given to one container.
func TestTake(t *testing.T) {
	const agents, each = 8, 16
	r := idrange.Ranges{Dir: filepath.Join(t.TempDir(), "ids"), First: idrange.DefaultFirst, Count: agents * each}
	var wg sync.WaitGroup
	var mu sync.Mutex
	taken := map[uint32]string{}
	for a := range agents {
		wg.Go(func() {
			for i := range each {
				id := strconv.Itoa(a) + "-" + strconv.Itoa(i)
				first, err := r.Take("agent", id)
				mu.Lock()
				if err != nil || taken[first] != "" {
					t.Errorf("%s got %d, which is that of %q: %v", id, first, taken[first], err)
				}
				taken[first] = id
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	_, err := r.Take("agent", "more")
	require.ErrorIs(t, err, idrange.ErrExhausted)
	held, err := r.List()
	require.NoError(t, err)
	require.Len(t, held, agents*each)
	for _, h := range held {
		require.Equal(t, taken[h.First], h.ID)
		require.Equal(t, "agent", h.Owner)
		require.Zero(t, (h.First-r.First)%idrange.Size)
		require.GreaterOrEqual(t, h.First, r.First)
		require.False(t, h.Since.IsZero())
	}
}

func TestRelease(t *testing.T) {
	r := idrange.Ranges{Dir: filepath.Join(t.TempDir(), "ids"), First: idrange.DefaultFirst, Count: 1}
	held, err := r.List()
	require.NoError(t, err)
	require.Empty(t, held)
	first, err := r.Take("", "a")
	require.NoError(t, err)
	require.NoError(t, r.Release(first, "b"), "the range of another one")
	_, err = r.Take("", "b")
	require.ErrorIs(t, err, idrange.ErrExhausted)
	require.NoError(t, r.Release(first, "a"))
	require.NoError(t, r.Release(first, "a"), "safe to repeat")
	_, err = r.Take("", "b")
	require.NoError(t, err)
	for _, id := range []string{"", "x/y", "x\x00"} {
		_, err = r.Take("o", id)
		require.Error(t, err)
		require.NotErrorIs(t, err, idrange.ErrExhausted)
	}
}

// TestListSkipsOthers: what is no range is not listed, and not removed.
func TestListSkipsOthers(t *testing.T) {
	r := idrange.Ranges{Dir: t.TempDir(), First: idrange.DefaultFirst, Count: 1}
	require.NoError(t, os.WriteFile(filepath.Join(r.Dir, "123"), nil, 0o600))
	require.NoError(t, os.Symlink("a/b", filepath.Join(r.Dir, "x")))
	require.NoError(t, os.Symlink("nothing", filepath.Join(r.Dir, "124")))
	held, err := r.List()
	require.NoError(t, err)
	require.Empty(t, held)
	require.NoError(t, r.Release(124, "nothing"))
	require.FileExists(t, filepath.Join(r.Dir, "123"))
	_, err = os.Lstat(filepath.Join(r.Dir, "124"))
	require.NoError(t, err)
}
