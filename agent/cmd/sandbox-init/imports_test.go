//go:build !integration

package main_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestImports keeps packages out of sandbox-init that cost each slot memory. Package os would also raise the limit of file
// descriptors, which the sandbox would inherit.
func TestImports(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", ".")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	deps := strings.Fields(string(out))
	require.Contains(t, deps, "golang.org/x/sys/unix")
	for _, heavy := range []string{"os", "net", "fmt", "encoding/json", "log", "context", "runtime/debug"} {
		require.False(t, slices.Contains(deps, heavy), "%s is linked into sandbox-init", heavy)
	}
}
