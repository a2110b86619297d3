package ctrd_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

// FuzzImageConfig combines the configuration of an arbitrary image with a request. The command is one that can be executed; each of
// the request's variables has its value, and only that one.
func FuzzImageConfig(f *testing.F) {
	f.Add([]byte(`{"architecture":"amd64","os":"linux","config":{"User":"1000","Env":["PATH=/bin","A=1","A=2"],"Entrypoint":["sh"],"Cmd":["-c","x"],"WorkingDir":"/w"},"rootfs":{"type":"layers","diff_ids":["sha256:0"]}}`), "", "A", "mine")
	f.Add([]byte(`{"config":{"Env":["","=","PATH","A=b\u0000C=d"],"Cmd":["\u0000"]}}`), "x", "PATH", "")
	f.Add([]byte(`{"config":null}`), "", "", "")
	f.Add([]byte(`{"config":{"Entrypoint":[""]}}`), "", "HOSTNAME", "h")
	f.Fuzz(func(t *testing.T, raw []byte, arg, name, value string) {
		var image ocispec.Image
		if json.Unmarshal(raw, &image) != nil {
			return
		}
		c := runtime.Container{Hostname: "host", Env: map[string]string{}}
		if arg != "" {
			c.Args = []string{arg}
		}
		if name != "" && !strings.ContainsAny(name, "=\x00") { // admission refuses others
			c.Env[name] = value
		}
		before := slices.Clone(image.Config.Env)
		if line, err := ctrd.CommandLine(c, image.Config); err == nil {
			require.NotEmpty(t, line[0])
			require.NotContains(t, strings.Join(line, ""), "\x00")
			if arg != "" {
				require.Equal(t, arg, line[len(line)-1])
			}
		}
		env := ctrd.Environment(c, image.Config, "/home")
		require.Equal(t, before, image.Config.Env, "the image is shared")
		values := map[string][]string{}
		for _, kv := range env {
			k, v, _ := strings.Cut(kv, "=")
			values[k] = append(values[k], v)
		}
		for k, v := range c.Env {
			require.Equal(t, []string{v}, values[k])
		}
		for _, k := range []string{"PATH", "HOSTNAME", "HOME"} {
			require.NotEmpty(t, values[k])
		}
		for _, kv := range before {
			k, _, _ := strings.Cut(kv, "=")
			require.NotEmpty(t, values[k])
		}
		require.LessOrEqual(t, len(env), len(before)+3+len(c.Env))
		if err := ctrd.CheckProcess(nil, env); err == nil {
			require.NotContains(t, strings.Join(env, ""), "\x00")
		}
	})
}

// FuzzDockerConfig reads credentials. They are those of the registry that was asked for, always the same ones, and none for a registry
// that the file does not name.
func FuzzDockerConfig(f *testing.F) {
	f.Add([]byte(`{"auths":{"r.example":{"auth":"dXNlcjpwYTpzcw=="},"https://token.example/v1/":{"identitytoken":"tok"}}}`), "r.example")
	f.Add([]byte(`{"auths":{"https://index.docker.io/v1/":{"username":"a","password":"b"},"docker.io":{"username":"c","password":"d"}}}`), "docker.io")
	f.Add([]byte(`{"auths":{"r.example":{"auth":"%"},"http://r.example/a":{"username":"u"}}}`), "r.example")
	f.Add([]byte(`{"auths":{"":{"username":"missing"},"://":{"username":"x"}},"credsStore":"x"}`), "")
	f.Add([]byte(`{"auths":null}`), "r.example:5000")
	path := filepath.Join(f.TempDir(), "config.json")
	f.Fuzz(func(t *testing.T, raw []byte, host string) {
		require.NoError(t, os.WriteFile(path, raw, 0o600))
		c, err := ctrd.ReadDockerConfig(path)
		if err != nil {
			require.False(t, json.Valid(raw) && string(raw) == "{}")
			return
		}
		name, secret, err := c.Credentials(host)
		for range 8 {
			name2, secret2, err2 := c.Credentials(host)
			require.Equal(t, []string{name, secret}, []string{name2, secret2})
			require.Equal(t, err == nil, err2 == nil)
		}
		if err != nil {
			require.Empty(t, name+secret)
			require.NotContains(t, err.Error(), `"auth"`)
		}
		name, secret, err = c.Credentials("not-in-this-file.example")
		if !strings.Contains(string(raw), "not-in-this-file") && !strings.Contains(string(raw), "\\u") {
			require.NoError(t, err)
			require.Empty(t, name+secret)
		}
	})
}
