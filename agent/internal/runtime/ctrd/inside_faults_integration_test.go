//go:build integration

package ctrd_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// shortTimeouts has calls find out soon that a sandbox is silent, and bound is when they have at the latest.
var shortTimeouts = inside.Timeouts{First: 100 * time.Millisecond, Quiet: 400 * time.Millisecond, Answer: time.Second} //nolint:gochecknoglobals // constant

const bound = 10 * time.Second

// inEachWay runs a test in a sandbox of each configuration.
func inEachWay(t *testing.T, test func(t *testing.T, server *containerd.Server, r *ctrd.Runtime, b runtime.Container)) {
	t.Helper()
	server := containerd.Start(t)
	server.Import(t, containerd.Busybox, containerd.Image(t))
	for name, way := range insideWays() {
		t.Run(name, func(t *testing.T) {
			r := newRuntime(t, server, way(t, server))
			b := box(t, server, true, containerd.Busybox, "sleep", "1000")
			require.NoError(t, launch(t.Context(), r, b))
			test(t, server, r, b)
			require.NoError(t, r.Delete(t.Context(), b.ID))
		})
	}
}

// refused requires a call to fail with a reason, within a bound.
func refused(t *testing.T, want fault.Reason, call func() error) {
	t.Helper()
	began := time.Now()
	err := call()
	require.Less(t, time.Since(began), bound)
	require.Error(t, err)
	require.Equal(t, want, fault.ReasonOf(inside.FileFault(err)), "%v", err)
}

// silent makes each kind of call in a sandbox in which nothing answers.
func silent(t *testing.T, s inside.Sandbox, want fault.Reason) {
	t.Helper()
	refused(t, want, func() error { _, err := s.List(t.Context()); return err })
	refused(t, want, func() error { _, err := s.Start(t.Context(), shell("true")); return err })
	refused(t, want, func() error { _, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Tag: "x"}}); return err })
	refused(t, want, func() error { _, err := s.Helper(t.Context(), ""); return err })
	refused(t, want, func() error {
		return s.Do(t.Context(), wire.TypeInput, &wire.Request{Target: wire.Target{Tag: "x"}, Data: "x"})
	})
	refused(t, want, func() error {
		in, err := s.Input(t.Context(), wire.Target{Tag: "x"})
		if err == nil {
			defer in.Close()
			_, err = in.Write([]byte("x"))
		}
		return err
	})
}

// TestInsidePaused pauses a sandbox before calls and during one. What ran runs on afterwards, and nothing of its output is lost.
func TestInsidePaused(t *testing.T) {
	inEachWay(t, func(t *testing.T, server *containerd.Server, r *ctrd.Runtime, b runtime.Container) {
		s := r.Supervisor(b.ID)
		s.Timeouts = shortTimeouts
		start := shell("echo one; read x; echo two")
		start.Tag, start.Input = "x", true
		stream, err := s.Start(t.Context(), start)
		require.NoError(t, err)
		defer stream.Close()
		first, err := stream.Next()
		require.NoError(t, err)
		require.Equal(t, "one\n", first.Data)
		killed := shell("sleep 4321")
		killed.Kill = true
		call, err := s.Start(t.Context(), killed)
		require.NoError(t, err)

		_, err = server.Client.TaskService().Pause(t.Context(), &tasks.PauseTaskRequest{ContainerID: b.ID})
		require.NoError(t, err)
		refused(t, fault.SandboxPaused, func() error { _, err := stream.Next(); return err })
		refused(t, fault.SandboxPaused, func() error { _, err := call.Next(); return err })
		require.NoError(t, call.Close())
		silent(t, s, fault.SandboxPaused)

		_, err = server.Client.TaskService().Resume(t.Context(), &tasks.ResumeTaskRequest{ContainerID: b.ID})
		require.NoError(t, err)
		again, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Tag: "x"}, From: first.Offset + uint64(len(first.Data))})
		require.NoError(t, err)
		require.NoError(t, again.Send(wire.TypeInput, &wire.Request{Data: "\n"}))
		e, err := again.Next()
		require.NoError(t, err)
		require.Equal(t, "two\n", e.Data)
		require.NoError(t, again.Close())
		ended, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Pid: call.Process().Pid}})
		require.NoError(t, err)
		_, _, exit := finished(t, ended)
		require.EqualValues(t, syscall.SIGKILL, exit.Signal, "its call has ended meanwhile")
	})
}

// TestInsidePausedBeforeTheFirstCall pauses a sandbox of an OCI runtime that has no supervisor yet.
func TestInsidePausedBeforeTheFirstCall(t *testing.T) {
	inEachWay(t, func(t *testing.T, server *containerd.Server, r *ctrd.Runtime, b runtime.Container) {
		s := r.Supervisor(b.ID)
		s.Timeouts = shortTimeouts
		_, err := server.Client.TaskService().Pause(t.Context(), &tasks.PauseTaskRequest{ContainerID: b.ID})
		require.NoError(t, err)
		silent(t, s, fault.SandboxPaused)
		_, err = server.Client.TaskService().Resume(t.Context(), &tasks.ResumeTaskRequest{ContainerID: b.ID})
		require.NoError(t, err)
		out, _, _ := ran(t, s, shell("echo again"))
		require.Equal(t, "again\n", out)
	})
}

// TestInsideUnresponsive stops a supervisor.
func TestInsideUnresponsive(t *testing.T) {
	inEachWay(t, func(t *testing.T, server *containerd.Server, r *ctrd.Runtime, b runtime.Container) {
		s := r.Supervisor(b.ID)
		s.Timeouts = shortTimeouts
		stream, err := s.Start(t.Context(), shell("sleep 1000"))
		require.NoError(t, err)
		defer stream.Close()
		pid := supervisorPid(t, server, b.ID)
		require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
		refused(t, fault.SandboxUnresponsive, func() error { _, err := stream.Next(); return err })
		silent(t, s, fault.SandboxUnresponsive)
		require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
		require.Eventually(t, func() bool { _, err := s.List(t.Context()); return err == nil }, testkit.Timeout, testkit.Tick)
	})
}

// TestInsideSilentHelper stops the helper of a user, who can do that: other users have theirs.
func TestInsideSilentHelper(t *testing.T) {
	inEachWay(t, func(t *testing.T, _ *containerd.Server, r *ctrd.Runtime, b runtime.Container) {
		s := r.Supervisor(b.ID)
		s.Timeouts = shortTimeouts
		h, err := s.Helper(t.Context(), "1000:1000")
		require.NoError(t, err)
		h.Close()
		stop := shell("kill -STOP -1")
		stop.User, stop.Timeout = "1000:1000", 1000
		_, _, _ = ran(t, s, stop)
		refused(t, fault.SandboxUnresponsive, func() error { _, err := s.Helper(t.Context(), "1000:1000"); return err })
		h, err = s.Helper(t.Context(), "")
		require.NoError(t, err)
		h.Close()
	})
}

// TestInsideSupervisorIsReplaced kills the supervisor of a container of runc as root of the sandbox can, and as a fault of the node would.
func TestInsideSupervisorIsReplaced(t *testing.T) {
	inEachWay(t, func(t *testing.T, server *containerd.Server, r *ctrd.Runtime, b runtime.Container) {
		s := r.Supervisor(b.ID)
		for i, kill := range []func(int){
			func(int) { _, err := s.Start(t.Context(), shell("kill -9 $PPID")); _ = err },
			func(pid int) { require.NoError(t, syscall.Kill(pid, syscall.SIGKILL)) },
		} {
			start := shell("sleep 1234")
			start.Tag = fmt.Sprintf("lost%d", i)
			stream, err := s.Start(t.Context(), start)
			require.NoError(t, err)
			pid := supervisorPid(t, server, b.ID)
			if isPidOne(t, pid) {
				return // the kernel keeps it from the first, and the sandbox ends with it otherwise
			}
			kill(pid)
			refused(t, fault.SandboxUnresponsive, func() error { _, err := stream.Next(); return err })
			_ = stream.Close()
			require.Eventually(t, func() bool {
				_, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Tag: start.Tag}})
				return fault.ReasonOf(inside.Fault(err, "")) == fault.ProcessLost
			}, testkit.Timeout, testkit.Tick)
			require.Eventually(t, func() bool { // it was killed as well
				out, _, _ := ran(t, s, shell("ps | grep -c '[s]leep 1234'"))
				return out == "0\n"
			}, testkit.Timeout, testkit.Tick)
		}
	})
}

// TestInsideSignalsTheMainProcess: with runc it is pid 1, to which no process of the sandbox could send this.
func TestInsideSignalsTheMainProcess(t *testing.T) {
	server := containerd.Start(t)
	server.Import(t, containerd.Busybox, containerd.Image(t))
	for name, way := range insideWays() {
		t.Run(name, func(t *testing.T) {
			r := newRuntime(t, server, way(t, server))
			b := box(t, server, true, containerd.Busybox, "sh", "-c", "trap 'exit 7' USR1; echo ready; while :; do sleep 0.1; done")
			require.NoError(t, launch(t.Context(), r, b))
			require.Eventually(t, func() bool {
				log, err := os.ReadFile(b.LogPath)
				return err == nil && strings.Contains(string(log), "ready")
			}, testkit.Timeout, 10*time.Millisecond)
			s := r.Supervisor(b.ID)
			list, err := s.List(t.Context())
			require.NoError(t, err)
			require.Equal(t, wire.MainTag, list[0].Tag)
			require.WithinDuration(t, time.Now(), time.Unix(0, int64(list[0].Started)), testkit.Timeout)
			target := wire.Target{Tag: wire.MainTag}
			requireFailure(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: target, Signal: 99}), wire.StageProcess, syscall.EINVAL)
			require.NoError(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: target, Signal: uint32(syscall.SIGUSR1)}))
			exit, err := r.Wait(t.Context(), b.ID)
			require.NoError(t, err)
			require.EqualValues(t, 7, exit.Code)
			require.NoError(t, r.Delete(t.Context(), b.ID))
		})
	}
}

// TestInsideUnsupported calls into a sandbox of an agent without a directory for the programs.
func TestInsideUnsupported(t *testing.T) {
	server := containerd.Start(t)
	server.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, server, nil)
	b := box(t, server, false, containerd.Busybox, "sleep", "1000")
	require.NoError(t, launch(t.Context(), r, b))
	refused(t, fault.CallUnsupported, func() error { _, err := r.Supervisor(b.ID).List(t.Context()); return err })
	require.NoError(t, r.Delete(t.Context(), b.ID))
	refused(t, fault.PhaseConflict, func() error { _, err := r.Supervisor(b.ID).List(t.Context()); return err })
}

// supervisorPid returns the pid of a container's supervisor on the host.
func supervisorPid(t *testing.T, server *containerd.Server, id string) int {
	t.Helper()
	resp, err := server.Client.TaskService().ListPids(t.Context(), &tasks.ListPidsRequest{ContainerID: id})
	require.NoError(t, err)
	for _, p := range resp.GetProcesses() {
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.GetPid())); err == nil && strings.HasPrefix(string(name), "sandbox-init") {
			return int(p.GetPid())
		}
	}
	info, err := server.Client.TaskService().Get(t.Context(), &tasks.GetRequest{ContainerID: id})
	require.NoError(t, err)
	return int(info.GetProcess().GetPid())
}

// isPidOne reports whether a process of the host is pid 1 of its namespace.
func isPidOne(t *testing.T, pid int) bool {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(ids)
			return fields[len(fields)-1] == "1"
		}
	}
	t.Fatal("no NSpid")
	return false
}
