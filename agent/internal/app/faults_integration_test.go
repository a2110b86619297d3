//go:build integration

package app_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

func (a *agent) report(t testing.TB, r *agentv1.SandboxRecord) *agentv1.SandboxReport {
	for _, s := range a.snapshot(t).GetSandboxes() {
		if s.GetRecord().GetFence().GetSandboxUid() == r.GetFence().GetSandboxUid() {
			return s
		}
	}
	return nil
}

func (a *agent) waitState(t testing.TB, r *agentv1.SandboxRecord, want agentv1.SandboxState) *agentv1.SandboxReport {
	t.Helper()
	var got *agentv1.SandboxReport
	require.Eventually(t, func() bool { got = a.report(t, r); return got.GetState() == want }, testkit.Timeout, testkit.Tick, "want %s", want)
	return got
}

func TestInvalidRequestsLeaveNothing(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("unknown")))
	registry := containerd.NewRegistry(t, "", "", nil)
	a := startAgent(t, s, nil)
	for _, c := range []struct {
		name   string
		change func(*sandboxv1.SandboxSpec)
		reason fault.Reason
	}{
		{"image", func(s *sandboxv1.SandboxSpec) { s.Image = registry.Host + "/nope:1" }, fault.ImageNotFound},
		{"reference", func(s *sandboxv1.SandboxSpec) { s.Image = "NO" }, fault.InvalidField},
		{"command", func(s *sandboxv1.SandboxSpec) { s.Command = []string{"nope"} }, fault.CommandNotFound},
		{"not executable", func(s *sandboxv1.SandboxSpec) { s.Command = []string{"/data.txt"} }, fault.CommandNotExecutable},
		{"working dir", func(s *sandboxv1.SandboxSpec) { s.WorkingDir = "/data.txt" }, fault.WorkingDirInvalid},
		{"user", func(s *sandboxv1.SandboxSpec) { s.Image = "nouser:test" }, fault.UserNotFound},
		{"memory", func(s *sandboxv1.SandboxSpec) { s.Resources = &sandboxv1.ResourceLimits{MemoryBytes: 5} }, fault.InvalidField},
		{"port", func(s *sandboxv1.SandboxSpec) { s.Ports = []int32{70000} }, fault.InvalidField},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := a.create(t.Context(), record("bad", c.change))
			require.Equal(t, c.reason, fault.ReasonOf(err), "%v", err)
			require.True(t, a.snapshot(t).GetAccepting())
			left, err := s.Leaks(t.Context())
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

func TestCreateFollowedAtOnceByDelete(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	jobs := make(chan int)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range jobs {
				r := record(fmt.Sprintf("sb-%d", i), nil)
				ctx, cancel := context.WithCancel(context.Background())
				created := make(chan struct{})
				go func() { defer close(created); _, _ = a.create(ctx, r) }()
				if i%4 == 0 {
					cancel()
				}
				if i%2 == 0 {
					<-created
				}
				a.delete(t, r.GetFence(), 0)
				<-created
				cancel()
			}
		})
	}
	for i := range 40 {
		jobs <- i
	}
	close(jobs)
	wg.Wait()
	require.Empty(t, a.snapshot(t).GetSandboxes())
	s.CheckClean(t)
}

func TestRestartAdopts(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	run := record("runs", sh("echo first; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo last; exit 5"))
	end := record("ends", sh("echo done"))
	acked := a.mustCreate(t, run)
	a.mustCreate(t, end)
	_, err := a.MarkPersisted(t.Context(), &agentv1.MarkPersistedRequest{Fence: run.GetFence()})
	require.NoError(t, err)
	a.waitState(t, end, agentv1.SandboxState_SANDBOX_STATE_STOPPED)
	a.stop()

	a = startAgent(t, s, nil)
	got := a.report(t, run)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, got.GetState())
	require.True(t, got.GetPersisted())
	require.Equal(t, acked.GetStartTime().AsTime(), got.GetStartTime().AsTime())
	require.Equal(t, run.GetSpec().GetCommand(), got.GetRecord().GetSpec().GetCommand())
	got = a.report(t, end)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_STOPPED, got.GetState())
	require.Zero(t, got.GetExitCode())
	require.Equal(t, "done\n", a.logs(t, &agentv1.StreamLogsRequest{Fence: end.GetFence()}))
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, a.mustCreate(t, run).GetState(), "a repeated create returns it")

	// It ends while no agent runs.
	a.stop()
	touchInside(t, s, run.GetFence().GetSandboxUid()+"-1", "/tmp/go")
	a = startAgent(t, s, nil)
	got = a.waitState(t, run, agentv1.SandboxState_SANDBOX_STATE_STOPPED)
	require.Equal(t, int32(5), got.GetExitCode())
	require.Equal(t, "first\nlast\n", a.logs(t, &agentv1.StreamLogsRequest{Fence: run.GetFence(), Follow: true}))
	a.delete(t, run.GetFence(), 0)
	a.delete(t, end.GetFence(), 0)
}

// touchInside creates a file in a running container, through its process's view of its root.
func touchInside(t testing.TB, s *containerd.Server, id, path string) {
	t.Helper()
	c, err := s.Client.LoadContainer(t.Context(), id)
	require.NoError(t, err)
	task, err := c.Task(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join("/proc", fmt.Sprint(task.Pid()), "root", path), nil, 0o600))
}

func TestContainerdRestart(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	stays, ends := record("stays", nil), record("ends", sh("while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 6"))
	a.mustCreate(t, stays)
	a.mustCreate(t, ends)
	s.Kill(t)
	require.Eventually(t, func() bool { return !a.snapshot(t).GetAccepting() }, testkit.Timeout, testkit.Tick)
	require.Contains(t, a.snapshot(t).GetNotAcceptingReason(), "RUNTIME_UNAVAILABLE")
	_, err := a.create(t.Context(), record("none", nil))
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err))
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, a.report(t, stays).GetState())
	s.Up(t)
	require.Eventually(t, func() bool { return a.snapshot(t).GetAccepting() }, testkit.Timeout, testkit.Tick)
	touchInside(t, s, ends.GetFence().GetSandboxUid()+"-1", "/tmp/go")
	require.Equal(t, int32(6), a.waitState(t, ends, agentv1.SandboxState_SANDBOX_STATE_STOPPED).GetExitCode())
	a.delete(t, stays.GetFence(), 0)
	a.delete(t, ends.GetFence(), 0)
}

func TestHungShimDoesNotBlockDelete(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	r := record("wedged", nil)
	a.mustCreate(t, r)
	require.NoError(t, syscall.Kill(shimOf(t, r.GetFence().GetSandboxUid()+"-1"), syscall.SIGSTOP))
	begun := time.Now()
	stages := a.delete(t, r.GetFence(), 0)
	require.Equal(t, agentv1.DeleteStage_DELETE_STAGE_REMOVED, stages[len(stages)-1])
	require.Less(t, time.Since(begun), 40*time.Second)
	s.CheckClean(t)
}

func TestKilledShimIsCleanedUp(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	r := record("killed", nil)
	a.mustCreate(t, r)
	require.NoError(t, syscall.Kill(shimOf(t, r.GetFence().GetSandboxUid()+"-1"), syscall.SIGKILL))
	a.waitState(t, r, agentv1.SandboxState_SANDBOX_STATE_STOPPED)
	a.delete(t, r.GetFence(), 0)
	s.CheckClean(t)
}

func shimOf(t testing.TB, id string) int {
	t.Helper()
	for _, shim := range containerd.Shims() {
		if shim.Of(id) {
			return shim.PID
		}
	}
	t.Fatalf("no shim of %s", id)
	return 0
}

func TestGraceAndLimits(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	traps := record("traps", sh("trap 'echo bye; exit 9' TERM; echo ready; while :; do sleep 0.05; done"))
	a.mustCreate(t, traps)
	require.Eventually(t, func() bool {
		return a.logs(t, &agentv1.StreamLogsRequest{Fence: traps.GetFence()}) == "ready\n"
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, []agentv1.DeleteStage{agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT, agentv1.DeleteStage_DELETE_STAGE_REMOVED},
		a.delete(t, traps.GetFence(), time.Minute))
	ignores := record("ignores", nil)
	a.mustCreate(t, ignores)
	require.Equal(t, []agentv1.DeleteStage{
		agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT, agentv1.DeleteStage_DELETE_STAGE_SIGKILL_SENT, agentv1.DeleteStage_DELETE_STAGE_REMOVED,
	}, a.delete(t, ignores.GetFence(), time.Hour), "a process that ignores SIGTERM gets no grace period")

	hungry := record("hungry", func(s *sandboxv1.SandboxSpec) {
		s.Command = []string{"tail", "/dev/zero"}
		s.Resources = &sandboxv1.ResourceLimits{MemoryBytes: 32 << 20}
	})
	a.mustCreate(t, hungry)
	got := a.waitState(t, hungry, agentv1.SandboxState_SANDBOX_STATE_STOPPED)
	require.Equal(t, "OOMKilled", got.GetReason())
	require.Equal(t, int32(137), got.GetExitCode())
	a.delete(t, hungry.GetFence(), 0)

	forks := record("forks", func(s *sandboxv1.SandboxSpec) {
		s.Command = []string{"sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do sleep 3 & done; echo no limit"}
		s.Resources = &sandboxv1.ResourceLimits{Pids: 5, CpuMillis: 500}
	})
	a.mustCreate(t, forks)
	out := a.logs(t, &agentv1.StreamLogsRequest{Fence: forks.GetFence(), Follow: true})
	require.Contains(t, out, "can't fork")
	a.delete(t, forks.GetFence(), 0)
}

// TestStderrOutlivesStdout closes stdout long before stderr: the shim must not close the log with it.
func TestStderrOutlivesStdout(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	r := record("words", sh("echo first; exec 1>&-; sleep 0.3; echo last >&2"))
	a.mustCreate(t, r)
	require.Equal(t, "first\nlast\n", a.logs(t, &agentv1.StreamLogsRequest{Fence: r.GetFence(), Follow: true}))
	a.delete(t, r.GetFence(), 0)
}

func TestLogsAreBoundedWithRealShim(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, func(c *app.Config) { c.LogMaxBytes = 256 << 10 })
	r := record("loud", sh("i=0; while [ $i -lt 60000 ]; do echo line $i xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; i=$((i+1)); done; sleep 1; echo the end"))
	a.mustCreate(t, r)
	a.waitState(t, r, agentv1.SandboxState_SANDBOX_STATE_STOPPED)
	var st syscall.Stat_t
	require.NoError(t, syscall.Stat(filepath.Join(s.LogRoot, r.GetFence().GetSandboxUid()+"-1", "output.log"), &st))
	require.Greater(t, st.Size, int64(2<<20))
	require.LessOrEqual(t, st.Blocks*512, int64(320<<10))
	tail := int64(2)
	require.Equal(t, "line 59999 xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\nthe end\n",
		a.logs(t, &agentv1.StreamLogsRequest{Fence: r.GetFence(), TailLines: &tail}))
	all := a.logs(t, &agentv1.StreamLogsRequest{Fence: r.GetFence()})
	require.True(t, strings.HasPrefix(all, "line "))
	require.NotContains(t, all, "\x00")
	a.delete(t, r.GetFence(), 0)
}

func TestFenceOfAnotherAgent(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	r := record("x", nil)
	r.Fence.AgentUid = "other"
	_, err := a.create(t.Context(), r)
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	require.Equal(t, fault.FenceMismatch, fault.ReasonOf(err))
}
