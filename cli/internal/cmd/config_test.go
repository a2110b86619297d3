package cmd_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestConfigLayers(t *testing.T) {
	b := start(t, mesh())
	b.config = filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(b.config, []byte("addr: file:1\nnamespace: of-file\npool: of-file\ntimeout: 7s\ncacert: ca.crt\ninsecure: false\n"), 0o600))
	b.env = map[string]string{"FSB_ADDR": "env:1", "FSB_NAMESPACE": "of-env"}
	r := b.run(t, "config", "view", "-n", "of-flag")
	require.Zero(t, r.code, r.err)
	for _, want := range []string{
		`addr +env:1 +environment FSB_ADDR`,
		`namespace +of-flag +flag --namespace`,
		`pool +of-file +file ` + b.config,
		`timeout +7s +file`,
		`cacert +` + filepath.Join(filepath.Dir(b.config), "ca.crt"), // relative to the file
		`cert +<none> +default`,
		`insecure +false +file`,
	} {
		require.Regexp(t, want, r.out)
	}
	require.Contains(t, b.run(t, "config", "view", "-o", "yaml").out, "namespace: of-env\n")

	other := filepath.Join(t.TempDir(), "other.yaml")
	require.NoError(t, os.WriteFile(other, []byte("addr: other:1\n"), 0o600))
	b.env = map[string]string{"FSB_CONFIG": other}
	require.Regexp(t, `addr +other:1`, b.run(t, "config", "view").out)
	require.Regexp(t, `addr +file:1`, b.run(t, "config", "view", "--config", b.config).out)
}

func TestInvalidConfiguration(t *testing.T) {
	for content, word := range map[string]string{
		"adr: x\n":              `unknown field "adr"`,
		"addr: x\naddr: y\n":    `key "addr" already set`,
		"pool: [a]\n":           `field "pool": want a plain value`,
		"timeout: soon\n":       `timeout is "soon"`,
		"insecure: perhaps\n":   `insecure is "perhaps"`,
		"output: xml\n":         `output is "xml"`,
		"no yaml: [\n":          "reading configuration",
		"adr: x\nnamespac: y\n": `unknown field "adr"; file`,
	} {
		t.Run(content, func(t *testing.T) {
			b := start(t, &fake{})
			b.config = filepath.Join(t.TempDir(), "config.yaml")
			require.NoError(t, os.WriteFile(b.config, []byte(content), 0o600))
			r := b.run(t, "list")
			require.Equal(t, 2, r.code, r.err)
			require.Contains(t, r.err, word)
			require.Contains(t, r.err, "config.yaml")
		})
	}
	b := start(t, &fake{})
	b.env["FSB_INSECURE"] = "perhaps"
	require.Contains(t, b.run(t, "list").err, "environment FSB_INSECURE")
}
