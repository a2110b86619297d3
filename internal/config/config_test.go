package config_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
)

func newCommand(t *testing.T, args ...string) *cobra.Command {
	t.Helper()
	cmd := &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return nil }}
	cmd.Flags().String("bind-address", ":1", "")
	cmd.Flags().Int("capacity", 5, "")
	cmd.Flags().StringSlice("list", nil, "")
	config.AddFileFlag(cmd.Flags())
	config.BindEnv(cmd.Flags(), "capacity", "AGENT_CAPACITY")
	cmd.SetArgs(args)
	require.NoError(t, cmd.Execute())
	return cmd
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestLoadPrecedence(t *testing.T) {
	file := writeFile(t, "bind-address: :file\ncapacity: 7\nlist: [a, b]\n")
	tests := []struct {
		name         string
		env          map[string]string
		args         []string
		bind, number string
	}{
		{"defaults", nil, nil, ":1", "5"},
		{"file", nil, []string{"--config", file}, ":file", "7"},
		{"environment over file", map[string]string{"FSB_BIND_ADDRESS": ":env", "AGENT_CAPACITY": "8"}, []string{"--config", file}, ":env", "8"},
		{"flag over all", map[string]string{"FSB_BIND_ADDRESS": ":env"}, []string{"--config", file, "--bind-address", ":flag"}, ":flag", "7"},
		{"file named by the environment", map[string]string{"FSB_CONFIG": file}, nil, ":file", "7"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for k, v := range tt.env {
				t.Setenv(k, v)
			}
			cmd := newCommand(t, tt.args...)
			require.NoError(t, config.Load(cmd, "FSB"))
			require.Equal(t, tt.bind, cmd.Flag("bind-address").Value.String())
			require.Equal(t, tt.number, cmd.Flag("capacity").Value.String())
		})
	}
}

func TestLoadErrorsNameTheSource(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"unknown field", "bindaddress: x\n", `unknown field "bindaddress"`},
		{"wrong type", "capacity: many\n", "--capacity"},
		{"nested", "capacity: {a: b}\n", `field "capacity"`},
		{"not yaml", "{", "reading configuration"},
		{"duplicate", "capacity: 1\ncapacity: 2\n", "capacity"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := config.Load(newCommand(t, "--config", writeFile(t, tt.text)), "FSB")
			require.ErrorContains(t, err, tt.want)
		})
	}
	t.Run("environment", func(t *testing.T) {
		t.Setenv("AGENT_CAPACITY", "many")
		require.ErrorContains(t, config.Load(newCommand(t), "FSB"), "AGENT_CAPACITY")
	})
	t.Run("missing file", func(t *testing.T) {
		require.ErrorContains(t, config.Load(newCommand(t, "--config", "/does/not/exist"), "FSB"), "/does/not/exist")
	})
}
