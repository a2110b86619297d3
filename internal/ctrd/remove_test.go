package ctrd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// TestLogIsRemovedWhileIndexed creates a file in the directory while it is being removed, as an agent that indexes the log
// does. This made deletes fail now and then.
func TestLogIsRemovedWhileIndexed(t *testing.T) {
	r := &ctrd.Remover{LogRoot: t.TempDir()}
	for i := range 500 {
		id := fmt.Sprintf("u%d-1", i)
		dir := filepath.Join(r.LogRoot, id)
		require.NoError(t, os.Mkdir(dir, 0o700))
		for _, name := range []string{"output.log", "owner", "hostname", "started"} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := os.Stat(filepath.Join(dir, "output.log")); err == nil {
				_ = os.WriteFile(filepath.Join(dir, "index"), []byte("entry"), 0o600) // it may be gone by now
			}
		})
		require.NoError(t, r.RemoveLog(id))
		wg.Wait()
		require.NoError(t, os.RemoveAll(dir))
	}
	require.NoError(t, r.RemoveLog("unknown-1"))
	require.NoError(t, (&ctrd.Remover{}).RemoveLog("u"))
}
