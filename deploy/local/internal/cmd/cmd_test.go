package cmd

import (
	"bytes"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// Every command explains itself and shows an example.
func TestHelp(t *testing.T) {
	var names []string
	var visit func(*cobra.Command)
	visit = func(cmd *cobra.Command) {
		require.NotEmpty(t, cmd.Short, cmd.Name())
		require.Contains(t, cmd.Example, "fsb-local", cmd.Name())
		names = append(names, cmd.Name())
		for _, child := range cmd.Commands() {
			visit(child)
		}
	}
	visit(newRoot())
	require.ElementsMatch(t, []string{
		"fsb-local", "up", "down", "status", "env", "load-image", "logs", "restart", "supervise",
	}, names)
}

func TestEnv(t *testing.T) {
	root := newRoot()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"env", "--data-dir", "/srv/it's"})
	require.NoError(t, root.Execute())
	require.Contains(t, out.String(), `export KUBECONFIG='/srv/it'\''s/kubeconfig'`+"\n")
	require.NotContains(t, out.String(), "PATH=/")
}

func TestRefusals(t *testing.T) {
	for name, args := range map[string][]string{
		"unknown command":   {"upp"},
		"superfluous":       {"up", "now"},
		"unknown output":    {"status", "-o", "xml"},
		"unknown component": {"logs", "kubelett"},
		"no archive":        {"load-image"},
	} {
		t.Run(name, func(t *testing.T) {
			root := newRoot()
			root.SetArgs(args)
			require.Error(t, root.Execute())
		})
	}
}
