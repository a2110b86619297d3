//go:build integration

package ctrd_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// versions is a node with several versions of the shim, and a janitor.
type versions struct {
	server    *containerd.Server
	change    func(*ctrd.Config)
	dir       string // of the versions
	clock     *clocktesting.FakePassiveClock
	during    func() // called while the janitor looks
	collector *shim.Collector
}

func newVersions(t *testing.T) *versions {
	t.Helper()
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	v := &versions{server: s, change: own(t, s), dir: filepath.Join(s.Dir, "slots"), clock: clocktesting.NewFakePassiveClock(time.Unix(1000, 0))}
	remover := &shared.Remover{Client: s.Client, ProcRoot: "/proc"}
	v.collector = shim.NewCollector(shim.Config{Dir: v.dir, Grace: time.Minute, Clock: v.clock, InUse: func(ctx context.Context, names []string) (map[string]bool, error) {
		if v.during != nil {
			v.during()
		}
		return remover.ShimsInUse(ctx, names)
	}})
	return v
}

// agent returns the runtime of an agent with a version of the shim: the program, and what is appended to it.
func (v *versions) agent(t *testing.T, version string) *ctrd.Runtime {
	t.Helper()
	return newRuntime(t, v.server, func(c *ctrd.Config) {
		v.change(c)
		program, err := os.ReadFile(c.Shim)
		require.NoError(t, err)
		member, err := os.ReadFile(filepath.Join(filepath.Dir(c.Shim), shim.Member))
		require.NoError(t, err)
		dir := t.TempDir()
		c.Shim = filepath.Join(dir, "shim")
		require.NoError(t, os.WriteFile(c.Shim, append(program, version...), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, shim.Member), member, 0o700))
	})
}

// collect collects twice, with more than the grace period in between, and returns what was removed.
func (v *versions) collect(t *testing.T) (removed []string) {
	t.Helper()
	for range 2 {
		names, err := v.collector.Collect(t.Context())
		require.NoError(t, err)
		removed = append(removed, names...)
		v.clock.SetTime(v.clock.Now().Add(2 * time.Minute))
	}
	return removed
}

func (v *versions) installed(t *testing.T) map[string]bool {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(v.dir, "shim-*"))
	require.NoError(t, err)
	out := map[string]bool{}
	for _, f := range found {
		out[filepath.Base(f)] = true
	}
	return out
}

// added returns the version that was installed by do.
func (v *versions) added(t *testing.T, do func()) string {
	t.Helper()
	before := v.installed(t)
	do()
	for name := range v.installed(t) {
		if !before[name] {
			return name
		}
	}
	require.Fail(t, "nothing was installed")
	return ""
}

// TestUnusedShimsAreRemoved: a version stays while an agent uses it, and while a container of an earlier agent does.
func TestUnusedShimsAreRemoved(t *testing.T) {
	v := newVersions(t)
	first, next := v.agent(t, "1"), v.agent(t, "2")
	var ids []string
	old := v.added(t, func() { ids = started(t, v.server, first, 2) })
	current := v.added(t, func() { require.NoError(t, next.Ping(t.Context())) })
	require.Empty(t, v.collect(t), "both agents run")
	first.Close()
	require.Empty(t, v.collect(t), "the earlier agent's containers run")
	require.NoError(t, next.Delete(t.Context(), ids[0]))
	require.Empty(t, v.collect(t), "one of its containers runs")

	// The containers of the version, and containerd, work as before.
	v.server.Kill(t)
	v.server.Up(t)
	require.NoError(t, next.Delete(t.Context(), ids[1]))
	var removed []string
	require.Eventually(t, func() bool { // the process of the shim is ending
		removed = v.collect(t)
		return len(removed) > 0
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, []string{old}, removed)
	require.Equal(t, map[string]bool{current: true}, v.installed(t), "the agent runs, and has no container yet")
	for _, id := range started(t, v.server, next, 2) {
		require.NoError(t, next.Delete(t.Context(), id))
	}
}

// TestShimInstalledDuringACollection: an agent that starts while its version is judged tries again, and its containers start.
func TestShimInstalledDuringACollection(t *testing.T) {
	v := newVersions(t)
	earlier := v.agent(t, "1")
	version := v.added(t, func() { require.NoError(t, earlier.Ping(t.Context())) })
	earlier.Close()
	next := v.agent(t, "1")
	asked := 0
	v.during = func() {
		asked++
		err := next.Ping(t.Context())
		require.True(t, errdefs.IsUnavailable(err), "%v", err)
		require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err))
		b := box(t, v.server, false, containerd.Busybox, "true")
		err = next.Create(t.Context(), b, func(runtime.Stage) {})
		require.True(t, errdefs.IsUnavailable(err), "%v", err)
		require.NoError(t, next.Delete(t.Context(), b.ID))
	}
	require.Equal(t, []string{version}, v.collect(t))
	require.Equal(t, 2, asked)
	v.during = nil
	require.NoError(t, next.Ping(t.Context()))
	require.Empty(t, v.collect(t))
	for _, id := range started(t, v.server, next, 2) {
		require.NoError(t, next.Delete(t.Context(), id))
	}
}

// TestShimOfAProcessStays: a process executes a version that no record names.
func TestShimOfAProcessStays(t *testing.T) {
	v := newVersions(t)
	busybox, err := os.ReadFile("/bin/busybox")
	require.NoError(t, err)
	i, err := shim.Install(v.dir, busybox, nil)
	require.NoError(t, err)
	i.Close()
	cmd := exec.Cmd{Path: i.Path, Args: []string{"sleep", "1000"}}
	require.NoError(t, cmd.Start())
	ended := false
	end := func() {
		if !ended {
			ended = true
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
		}
	}
	defer end()
	require.Empty(t, v.collect(t))
	end()
	require.Equal(t, []string{shim.Version(i.Path)}, v.collect(t))
}
