package archtest_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReasonsAreEmitted checks that every reason of internal/fault is used by a server: a reason that no server sends misleads
// clients.
func TestReasonsAreEmitted(t *testing.T) {
	root := filepath.Join("..", "..")
	raw, err := os.ReadFile(filepath.Join(root, "internal", "fault", "fault.go"))
	require.NoError(t, err)
	unused := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\t(\w+) +Reason = "`).FindAllStringSubmatch(string(raw), -1) {
		unused[m[1]] = true
	}
	require.NotEmpty(t, unused)
	use := regexp.MustCompile(`\bfault\.(\w+)`)
	for _, dir := range []string{"agent", "janitor", "gateway", "services", "internal/rpc", "internal/limit", "internal/ctrd"} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, m := range use.FindAllStringSubmatch(string(source), -1) {
				delete(unused, m[1])
			}
			return err
		}))
	}
	require.Empty(t, unused, "reasons that no server sends")
}
