package apparmor_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
)

// host returns a directory that stands for a host with AppArmor and a parser, which is a script.
func host(t *testing.T, parser string) apparmor.Host {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	h := apparmor.Host{
		Enabled: write("enabled", "Y\n", 0o444), Kernel: filepath.Join(dir, "kernel"), Policy: filepath.Join(dir, "policy"),
		Parsers: []string{filepath.Join(dir, "none"), write("data", "", 0o644), dir},
	}
	write("kernel/profiles", "unconfined-thing (unconfined)\n"+apparmor.Name()+"0 (enforce)\n", 0o644)
	if parser != "" {
		h.Parsers = append(h.Parsers, write("parser", "#!/bin/sh\n"+strings.ReplaceAll(parser, "DIR", dir)+"\n", 0o755))
	}
	return h
}

// load is a parser that does what the kernel would.
const load = `cat > DIR/text; echo "$*" >> DIR/calls
sed -n 's/^profile \([^ ]*\) .*/\1 (enforce)/p' DIR/text >> DIR/kernel/profiles`

func TestLoad(t *testing.T) {
	h := host(t, load)
	require.Equal(t, apparmor.Status{Profile: apparmor.Name()}, h.Load(t.Context()))
	dir := filepath.Dir(h.Enabled)
	text, err := os.ReadFile(filepath.Join(dir, "text"))
	require.NoError(t, err)
	require.Equal(t, apparmor.Text(false), string(text))
	require.Equal(t, apparmor.Status{Profile: apparmor.Name()}, h.Load(t.Context()))
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	require.NoError(t, err)
	require.Equal(t, "--replace --skip-cache\n", string(calls), "a profile that is loaded is not loaded again")
}

// TestLoadWithoutParser uses a profile that an administrator has loaded.
func TestLoadWithoutParser(t *testing.T) {
	h := host(t, "")
	require.Contains(t, h.Load(t.Context()).Off, "no apparmor_parser")
	require.NoError(t, os.WriteFile(filepath.Join(h.Kernel, "profiles"), []byte(apparmor.Name()+" (enforce)\n"), 0o600))
	require.Equal(t, apparmor.Status{Profile: apparmor.Name()}, h.Load(t.Context()))
}

// TestAbi: where the host defines version 3.0 of the language, the profile is of that version.
func TestAbi(t *testing.T) {
	h := host(t, load)
	require.NoError(t, os.MkdirAll(filepath.Join(h.Policy, "abi"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(h.Policy, "abi/3.0"), nil, 0o600))
	require.NotEmpty(t, h.Load(t.Context()).Profile)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(h.Enabled), "text"))
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(text), "abi <abi/3.0>,\nprofile "+apparmor.Name()+" "))
}

// TestNotLoaded has every reason for which sandboxes run without the profile.
func TestNotLoaded(t *testing.T) {
	for name, c := range map[string]struct {
		parser string
		change func(t *testing.T, h *apparmor.Host)
		want   string
	}{
		"no AppArmor":       {load, func(_ *testing.T, h *apparmor.Host) { h.Enabled += "-not" }, "the kernel does not use AppArmor"},
		"AppArmor off":      {load, func(t *testing.T, h *apparmor.Host) { set(t, &h.Enabled, "N\n") }, "the kernel does not use AppArmor"},
		"no securityfs":     {load, func(_ *testing.T, h *apparmor.Host) { h.Kernel += "-not" }, "no such file"},
		"parser fails":      {"echo 'syntax   error' >&2; exit 3", nil, "exit status 3: syntax error"},
		"parser does less":  {"cat >/dev/null", nil, "the kernel does not have the profile"},
		"complain mode":     {"echo '" + apparmor.Name() + " (complain)' > DIR/kernel/profiles", nil, "in the mode (complain)"},
		"endless complaint": {"yes | head -c 1000000 >&2; exit 1", nil, "y y y"},
	} {
		t.Run(name, func(t *testing.T) {
			h := host(t, c.parser)
			if c.change != nil {
				c.change(t, &h)
			}
			s := h.Load(t.Context())
			require.Empty(t, s.Profile)
			require.Contains(t, s.Off, c.want)
			require.Less(t, len(s.Off), 700)
		})
	}
}

func set(t *testing.T, path *string, text string) {
	t.Helper()
	*path = filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(*path, []byte(text), 0o600))
}

// TestParserThatHangs does not hold up the start of a shim beyond its deadline.
func TestParserThatHangs(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	s := host(t, "exec sleep 1000").Load(ctx)
	require.Empty(t, s.Profile)
	require.Contains(t, s.Off, "killed")
}

// TestStatusFile: what a shim has written is what its agent reads.
func TestStatusFile(t *testing.T) {
	dir := t.TempDir()
	require.Contains(t, apparmor.Read(dir).Off, "has not reported")
	for _, s := range []apparmor.Status{{Off: "no reason"}, {Profile: apparmor.Name()}} {
		require.NoError(t, apparmor.Write(dir, s))
		require.NoError(t, apparmor.Write(dir, s))
		require.Equal(t, s, apparmor.Read(dir))
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "no temporary file is left")
	for _, bad := range []string{"{}", "", `{"profile":"unconfined"}`} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, entries[0].Name()), []byte(bad), 0o600))
		require.Empty(t, apparmor.Read(dir).Profile, bad)
		require.NotEmpty(t, apparmor.Read(dir).Off, bad)
	}
	require.Error(t, apparmor.Write(filepath.Join(dir, "none"), apparmor.Status{}))
}
