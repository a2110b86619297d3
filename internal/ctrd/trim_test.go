package ctrd_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// TestTrimLogs has logs that no agent bounds: before, a sandbox filled the node's disk as soon as its agent was gone.
func TestTrimLogs(t *testing.T) {
	const limit = 64 << 10
	root := t.TempDir()
	put := func(id string, size int, bound string) string {
		dir := filepath.Join(root, id)
		require.NoError(t, os.MkdirAll(dir, 0o700))
		path := filepath.Join(dir, ctrd.OutputFile)
		text := strings.Repeat("x", size-5) + "\nlast"
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		if bound != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, ctrd.LimitFile), []byte(bound), 0o600))
		}
		return path
	}
	allocated := func(path string) int64 {
		var st syscall.Stat_t
		require.NoError(t, syscall.Stat(path, &st))
		return st.Blocks * 512
	}
	const id = "00000000-0000-0000-0000-00000000000"
	large := put(id+"1-1", 1<<20, "65536")
	slot := put("slot.0123456789abcdef0123", 1<<20, "65536")
	kept := map[string]string{ // why
		put(id+"2-1", 2*limit, "65536"):        "its agent trims it, soon",
		put(id+"3-1", 1<<20, ""):               "of an earlier version",
		put(id+"4-1", 1<<20, "x"):              "the limit is torn",
		put("not-ours", 1<<20, "65536"):        "another program's",
		put(id+"5-1", 1<<20, "1048576"):        "within its limit",
		put(".new-"+id+"6-1", 1<<20, "100000"): "is being created",
	}
	before := map[string]int64{}
	for path := range kept {
		before[path] = allocated(path)
	}
	trimmed, err := ctrd.TrimLogs(root)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{id + "1-1", "slot.0123456789abcdef0123"}, trimmed)
	for _, path := range []string{large, slot} {
		require.LessOrEqual(t, allocated(path), int64(limit))
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Len(t, raw, 1<<20, "offsets keep their meaning")
		require.True(t, strings.HasSuffix(string(raw), strings.Repeat("x", limit/2)+"\nlast"), "the newest output is kept")
	}
	for path, why := range kept {
		require.Equal(t, before[path], allocated(path), why)
	}
	trimmed, err = ctrd.TrimLogs(root)
	require.NoError(t, err)
	require.Empty(t, trimmed)
	trimmed, err = ctrd.TrimLogs(filepath.Join(root, "missing"))
	require.NoError(t, err)
	require.Empty(t, trimmed)
}
