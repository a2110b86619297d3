package config_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// load loads the settings of a command line, an environment and a configuration file; no file if content is empty.
func load(t *testing.T, content string, env map[string]string, args ...string) (*config.Settings, string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if content != "" {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	config.AddFlags(fs)
	require.NoError(t, fs.Parse(args))
	s, err := config.Load(fs, func(name string) string { return env[name] }, file)
	return s, file, err
}

func TestDefaults(t *testing.T) {
	s, _, err := load(t, "", nil)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:9090", s.Addr)
	require.Equal(t, "default", s.Namespace)
	require.Empty(t, s.Pool, "the server knows the default pool of the namespace")
	require.Equal(t, time.Minute, s.Timeout)
	require.False(t, s.TLS.Insecure)
	require.Empty(t, s.File)
	for _, v := range s.Values {
		require.Equal(t, "default", v.Source, v.Key)
	}
}

// TestPrecedence checks each pair of neighboring sources.
func TestPrecedence(t *testing.T) {
	env := map[string]string{"FSB_ADDR": "env:1", "FSB_NAMESPACE": "of-env"}
	s, file, err := load(t, "addr: file:1\nnamespace: of-file\npool: of-file\ntimeout: 7s\ninsecure: true\n", env, "--addr", "flag:1")
	require.NoError(t, err)
	sources := map[string]string{}
	for _, v := range s.Values {
		sources[v.Key] = v.Value + " from " + v.Source
	}
	require.Equal(t, map[string]string{
		"addr": "flag:1 from flag --addr", "namespace": "of-env from environment FSB_NAMESPACE", "pool": "of-file from file " + file,
		"timeout": "7s from file " + file, "insecure": "true from file " + file, "output": " from default",
		"cacert": " from default", "cert": " from default", "key": " from default", "token-file": " from default",
	}, sources)
	require.Equal(t, "flag:1", s.Addr)
	require.True(t, s.TLS.Insecure)
	require.Equal(t, file, s.File)
}

// TestEmptyValues checks that an empty flag counts, while an empty environment variable does not.
func TestEmptyValues(t *testing.T) {
	s, _, err := load(t, "namespace: of-file\noutput: json\n", map[string]string{"FSB_NAMESPACE": ""}, "--output", "")
	require.NoError(t, err)
	require.Equal(t, "of-file", s.Namespace)
	require.Empty(t, s.Output)
}

func TestPathsAreRelativeToTheFile(t *testing.T) {
	s, file, err := load(t, "cacert: ca.crt\ncert: /abs/tls.crt\n", map[string]string{"FSB_KEY": "tls.key"})
	require.NoError(t, err)
	require.Equal(t, filepath.Join(filepath.Dir(file), "ca.crt"), s.TLS.CAFile)
	require.Equal(t, "/abs/tls.crt", s.TLS.CertFile)
	require.Equal(t, "tls.key", s.TLS.KeyFile)
}

func TestWhichFile(t *testing.T) {
	other := filepath.Join(t.TempDir(), "other.yaml")
	require.NoError(t, os.WriteFile(other, []byte("addr: other:1\n"), 0o600))
	s, _, err := load(t, "addr: default:1\n", map[string]string{"FSB_CONFIG": other})
	require.NoError(t, err)
	require.Equal(t, "other:1", s.Addr)
	s, _, err = load(t, "", map[string]string{"FSB_CONFIG": "/nonexistent"}, "--config", other)
	require.NoError(t, err)
	require.Equal(t, "other:1", s.Addr)
	_, _, err = load(t, "addr: default:1\n", map[string]string{"FSB_CONFIG": "/nonexistent"})
	require.ErrorContains(t, err, "reading configuration", "a file that is set must exist")
}

func TestErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		content string
		env     map[string]string
		args    []string
		want    []string
	}{
		"unknown keys":     {"adr: x\nnamespac: y\n", nil, nil, []string{`unknown field "adr"`, `unknown field "namespac"`}},
		"list":             {"pool: [a]\n", nil, nil, []string{`field "pool": want a plain value`}},
		"no value":         {"pool:\n", nil, nil, []string{`field "pool": want a plain value`}},
		"not YAML":         {"a: [\n", nil, nil, []string{"reading configuration"}},
		"duplicate key":    {"addr: x\naddr: y\n", nil, nil, []string{`key "addr" already set`}},
		"all at once":      {"timeout: soon\ninsecure: perhaps\n", map[string]string{"FSB_OUTPUT": "xml"}, nil, []string{"timeout is \"soon\"", "insecure is \"perhaps\"", "environment FSB_OUTPUT: output is \"xml\""}},
		"negative timeout": {"", nil, []string{"--timeout", "-1s"}, []string{"flag --timeout: timeout is \"-1s\""}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := load(t, tc.content, tc.env, tc.args...)
			for _, want := range tc.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestDefaultFile(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", "/xdg")
	require.Equal(t, "/xdg/fast-sandbox/config.yaml", config.DefaultFile())
	t.Setenv("XDG_CONFIG_HOME", "")
	t.Setenv("HOME", "")
	require.Empty(t, config.DefaultFile())
}
