package seccomp_test

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the tables of numbers from golang.org/x/sys")

// TestNumbersMatchSys keeps the tables of system calls equal to those of the golang.org/x/sys that go.mod names.
func TestNumbersMatchSys(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys")
	cmd.Stderr = os.Stderr
	dir, err := cmd.Output()
	require.NoError(t, err)
	constant := regexp.MustCompile(`(?m)^\tSYS_(\w+)\s*=\s*(\d+)$`)
	for _, goarch := range []string{"amd64", "arm64"} {
		source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+goarch+".go"))
		require.NoError(t, err)
		var b bytes.Buffer
		fmt.Fprintf(&b, "// Code generated from golang.org/x/sys by go test -update; DO NOT EDIT.\n\npackage seccomp\n\n")
		fmt.Fprintf(&b, "func numbers%s() map[string]uint32 {\nreturn map[string]uint32{\n", strings.ToUpper(goarch))
		found := constant.FindAllSubmatch(source, -1)
		require.Greater(t, len(found), 300)
		for _, m := range found {
			fmt.Fprintf(&b, "%q: %s,\n", strings.ToLower(string(m[1])), m[2])
		}
		fmt.Fprintf(&b, "}\n}\n")
		want, err := format.Source(b.Bytes())
		require.NoError(t, err)
		// The file name has no architecture suffix: each table is needed on both.
		path := "zz_generated_numbers_of_" + goarch + "_calls.go"
		if *update {
			require.NoError(t, os.WriteFile(path, want, 0o644))
		}
		have, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, string(want), string(have), "go test ./agent/internal/slot/seccomp -update")
	}
}
