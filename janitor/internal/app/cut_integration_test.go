//go:build integration

package app_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func unmount(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, unix.Unmount(path, unix.MNT_DETACH))
}

// dieVariable tells the process of TestRemoveAndDie what to remove and at which step to die.
const dieVariable = "FSB_TEST_REMOVE_AND_DIE"

// TestRemoveAndDie is the process that TestKilledRemovalIsCompleted kills; on its own it does nothing.
func TestRemoveAndDie(t *testing.T) {
	parts := strings.Split(config.Env(dieVariable), " ")
	if len(parts) != 5 {
		return
	}
	id, at, socket, dir, cgroup := parts[0], parts[1], parts[2], parts[3], parts[4]
	client, err := ctrd.Dial(socket, ctrd.DefaultNamespace)
	require.NoError(t, err)
	w := &testEnv{Server: &containerd.Server{Dir: dir, LogRoot: dir + "/log", Socket: socket, CgroupParent: cgroup, Client: client}}
	r := w.remover()
	r.Before = func(s ctrd.Step) {
		if string(s) == at {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	}
	require.NoError(t, r.Remove(context.Background(), id))
}

// TestKilledRemovalIsCompleted kills a removal before each of its steps, and has another process complete it.
func TestKilledRemovalIsCompleted(t *testing.T) {
	w := &testEnv{Server: containerd.Start(t), t: t}
	w.Import(t, containerd.Busybox, containerd.Image(t))
	for _, state := range []verdict.Container{verdict.Running, verdict.Created} {
		for _, step := range ctrd.Steps() {
			id := claimed("one", "agent")
			x := w.container(id.ContainerID(), id.Labels(), state)
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRemoveAndDie$")
			cmd.Env = append(config.Environ(""), dieVariable+"="+strings.Join([]string{x.id, string(step), w.Socket, w.Dir, w.CgroupParent}, " "))
			out, err := cmd.CombinedOutput()
			require.Error(t, err)
			require.Equal(t, "signal: killed", err.Error(), "%s before %s: %s", state, step, out)
			require.True(t, w.left()["container "+x.id], "the record goes last")
			require.NoError(t, w.remover().Remove(t.Context(), x.id), "%s after a kill before %s", state, step)
			require.Empty(t, w.left(), "%s after a kill before %s", state, step)
		}
	}
	w.CheckClean(t)
}

// janitorVariable tells the process of TestJanitorProcess which node to keep.
const janitorVariable = "FSB_TEST_JANITOR"

// TestJanitorProcess is the process that TestJanitorIsKilledRepeatedly kills; on its own it does nothing.
func TestJanitorProcess(t *testing.T) {
	parts := strings.Split(config.Env(janitorVariable), " ")
	if len(parts) != 4 {
		return
	}
	w := &testEnv{Server: &containerd.Server{Socket: parts[1], Dir: parts[2], LogRoot: parts[2] + "/log", CgroupParent: parts[3]}, t: t}
	cfg := w.settings(func(c *app.Config) {
		c.Policy.Grace, c.Workers, c.Kubeconfig = 100*time.Millisecond, 2, parts[0]
	})
	require.NoError(t, app.Run(t.Context(), cfg))
}

// TestJanitorIsKilledRepeatedly while it sweeps. In the end the orphans are removed, and nothing else.
func TestJanitorIsKilledRepeatedly(t *testing.T) {
	const each, kills = 24, 12
	w := newTestEnv(t)
	alive, gone := w.pod("agent-alive"), w.pod("agent-gone")
	var kept, lost []thing
	for i := range each {
		k, l := claimed(fmt.Sprintf("kept-%d", i), alive), claimed(fmt.Sprintf("lost-%d", i), []string{alive, gone}[i%2])
		w.sandbox(k)
		kept = append(kept, w.container(k.ContainerID(), k.Labels(), verdict.Running))
		lost = append(lost, w.container(l.ContainerID(), l.Labels(), verdict.Running)) // its agent or its Sandbox is gone
	}
	w.deletePod("agent-gone")
	variable := janitorVariable + "=" + strings.Join([]string{w.kubeconfig, w.Socket, w.Dir, w.CgroupParent}, " ")
	for i := range kills {
		cmd := exec.Command(os.Args[0], "-test.run=^TestJanitorProcess$")
		cmd.Env = append(config.Environ(""), variable)
		require.NoError(t, cmd.Start())
		before := len(w.left())
		require.Eventually(t, func() bool { return len(w.left()) < before || before <= 5*each }, testkit.Timeout, time.Millisecond)
		require.NoError(t, cmd.Process.Kill())
		require.Error(t, cmd.Wait())
		t.Logf("killed for the %d. time: %d things left", i+1, len(w.left()))
	}
	j := w.start(func(c *app.Config) { c.Policy.Grace = 100 * time.Millisecond })
	w.requireOnly(kept, lost)
	require.Eventually(t, func() bool { return len(j.verdicts(t)) == len(kept) }, testkit.Timeout, testkit.Tick, "no remnants: %v", j.verdicts(t))
	j.stop()
	w.sweepAway(kept)
}
