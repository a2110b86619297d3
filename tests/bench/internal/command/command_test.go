package command_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/command"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func run(t *testing.T, args ...string) error {
	t.Helper()
	cmd := command.New()
	cmd.SetArgs(args)
	cmd.SetOut(&bytes.Buffer{})
	cmd.SetErr(&bytes.Buffer{})
	return cmd.ExecuteContext(t.Context())
}

func TestReport(t *testing.T) {
	dir := t.TempDir()
	into, results, plots := filepath.Join(dir, "docs", "performance.md"), filepath.Join(dir, "results"), filepath.Join(dir, "docs", "performance")
	require.NoError(t, os.MkdirAll(plots, 0o700))
	require.NoError(t, os.MkdirAll(results, 0o700))
	write := func(path, text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	args := []string{"report", "--from", results, "--into", into, "--plots", plots}
	write(into, "# Title\n\n<!-- results: begin -->\n\nold\n\n<!-- results: end -->\n\ntail\n")
	require.ErrorContains(t, run(t, args...), "no result")

	write(filepath.Join(results, "scale.md"), "### scale\n\nlater\n\n")
	write(filepath.Join(results, "create.md"), "### create\n\nfirst\n\n")
	write(filepath.Join(plots, "create.svg"), "<svg/>")
	want := "# Title\n\n<!-- results: begin -->\n\n### create\n\nfirst\n\n![create](performance/create.svg)\n\n### scale\n\nlater\n\n<!-- results: end -->\n\ntail\n"
	for range 2 { // the second run replaces the results of the first
		require.NoError(t, run(t, args...))
		got, err := os.ReadFile(into)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	write(into, "no marks\n")
	require.ErrorContains(t, run(t, args...), "marks")
}

// A suite that cannot reach a cluster says what is missing, and how to have it.
func TestWithoutACluster(t *testing.T) {
	for _, name := range []string{"KUBECONFIG", "FSB_ADDR"} {
		t.Setenv(name, "")
	}
	for _, suite := range []string{"create", "burst", "rate", "density"} {
		require.ErrorContains(t, run(t, suite, "-q", "--handler", "fsb"), "KUBECONFIG is not set", suite)
	}
	require.ErrorContains(t, run(t, "create", "-o", "yaml"), "yaml", "before anything is measured")
	require.Error(t, run(t, "nothing"))
}
