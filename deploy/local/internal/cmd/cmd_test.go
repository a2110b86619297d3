package cmd

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
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
		"fsb-local", "up", "down", "status", "env", "load-image", "digests", "logs", "restart", "supervise",
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

// TestDigestsAsAComponent: the output is a kustomize component with each image by its digest.
func TestDigestsAsAComponent(t *testing.T) {
	bin, images := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, "one"), []byte("one"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(images, "one.yaml"), []byte("name: docker.io/fast-sandbox/one:dev\nfiles: [{from: one, to: /one}]\n"), 0o600))
	root := newRoot()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"digests", "--bin-dir", bin, "--images", images, "--registry", "registry.example/team/"})
	require.NoError(t, root.Execute())
	var component struct {
		Kind   string   `json:"kind"`
		Images []pinned `json:"images"`
	}
	require.NoError(t, yaml.Unmarshal(out.Bytes(), &component))
	require.Equal(t, "Component", component.Kind)
	require.Len(t, component.Images, 1)
	require.Equal(t, "docker.io/fast-sandbox/one", component.Images[0].Name)
	require.Equal(t, "registry.example/team/one", component.Images[0].NewName)
	require.Regexp(t, "^sha256:[0-9a-f]{64}$", component.Images[0].Digest)
}
