//go:build integration

package ctrd_test

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// finished follows a stream to its end.
func finished(t *testing.T, s *inside.Stream) (stdout, stderr string, exit *wire.Exit) {
	t.Helper()
	defer s.Close()
	var out, errs strings.Builder
	next := uint64(0)
	for {
		e, err := s.Next()
		require.NoError(t, err)
		if e.Exit != nil {
			return out.String(), errs.String(), e.Exit
		}
		require.Equal(t, next, e.Offset, "nothing is lost")
		next += uint64(len(e.Data))
		if e.Stream == wire.Stderr {
			errs.WriteString(e.Data)
		} else {
			out.WriteString(e.Data)
		}
	}
}

// ran runs a process to its end.
func ran(t *testing.T, s inside.Sandbox, start *wire.Start) (stdout, stderr string, exit *wire.Exit) {
	t.Helper()
	stream, err := s.Start(t.Context(), start)
	require.NoError(t, err)
	return finished(t, stream)
}

func shell(script string) *wire.Start { return &wire.Start{Args: []string{"sh", "-c", script}} }

// requireFailure requires a failure of a stage with an errno.
func requireFailure(t *testing.T, err error, stage wire.Stage, errno syscall.Errno) {
	t.Helper()
	failure, ok := errors.AsType[*wire.Failure](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []any{stage, errno}, []any{failure.Stage, failure.Errno}, "%v", err)
}

// insideWays are the configurations in which calls into sandboxes are served: our own shim, with and without user namespaces, and runc.
func insideWays() map[string]func(*testing.T, *containerd.Server) func(*ctrd.Config) {
	ways := ownWays()
	ways["runc"] = func(_ *testing.T, s *containerd.Server) func(*ctrd.Config) { return slotsOfRunc(s) }
	return ways
}

// forSandboxes runs a test in a sandbox that has taken the cold path, and in one that was a slot, in all configurations.
func forSandboxes(t *testing.T, test func(t *testing.T, s inside.Sandbox, box runtime.Container)) {
	t.Helper()
	server := containerd.Start(t)
	server.Import(t, containerd.Busybox, containerd.Image(t))
	for name, way := range insideWays() {
		r := newRuntime(t, server, way(t, server))
		for _, slot := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, slot %t", name, slot), func(t *testing.T) {
				b := box(t, server, slot, containerd.Busybox, "sleep", "1000")
				b.Env = map[string]string{"A": "of the sandbox", "B": "2"}
				b.Limits = resources.Limits{PIDs: 64, MemoryBytes: 128 << 20}
				require.NoError(t, launch(t.Context(), r, b))
				if !slot {
					require.NoError(t, r.SlotClaimed(b.ID))
				}
				test(t, r.Supervisor(b.ID), b)
				require.NoError(t, r.Delete(t.Context(), b.ID))
			})
		}
	}
}

func TestInsideRuns(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		out, errs, exit := ran(t, s, shell("echo out; echo err >&2; exit 7"))
		require.Equal(t, []string{"out\n", "err\n"}, []string{out, errs})
		require.EqualValues(t, 7, exit.Code)
		require.Positive(t, exit.MaxRSS)
		_, _, exit = ran(t, s, shell("kill -9 $$"))
		require.EqualValues(t, []uint32{137, 9}, []uint32{exit.Code, exit.Signal})

		env := shell("echo $A,$B,$C,$HOME,$PWD")
		env.Env, env.Cwd = []string{"B=3", "C=4"}, "/tmp"
		out, _, _ = ran(t, s, env)
		require.Equal(t, "of the sandbox,3,4,/,/tmp\n", strings.Replace(out, "/root", "/", 1))
		env.OnlyEnv = true
		env.Args[0] = "/bin/sh"
		out, _, _ = ran(t, s, env)
		require.True(t, strings.HasPrefix(out, ",3,4,"), out)

		user := shell("id; grep -E 'Cap|NoNew|Seccomp:' /proc/self/status")
		user.User = "1234:99"
		out, _, _ = ran(t, s, user)
		require.Contains(t, out, "uid=1234 gid=99")
		require.Contains(t, out, "CapEff:\t0000000000000000")
		require.Contains(t, out, "Seccomp:\t2")

		start := shell("cat; exit 3")
		start.Input = true
		stream, err := s.Start(t.Context(), start)
		require.NoError(t, err)
		require.NoError(t, stream.Send(wire.TypeInput, &wire.Request{Data: strings.Repeat("x", 300_000)}))
		require.NoError(t, stream.Send(wire.TypeCloseInput, &wire.Request{}))
		out, _, exit = finished(t, stream)
		require.Len(t, out, 300_000)
		require.EqualValues(t, 3, exit.Code)
	})
}

func TestInsideRefuses(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, b runtime.Container) {
		start := func(r *wire.Start) error {
			stream, err := s.Start(t.Context(), r)
			if err == nil {
				_ = stream.Close()
			}
			return err
		}
		requireFailure(t, start(&wire.Start{Args: []string{"nosuch"}}), wire.StageLookup, syscall.ENOENT)
		requireFailure(t, start(&wire.Start{Args: []string{"/etc"}}), wire.StageLookup, syscall.EACCES)
		requireFailure(t, start(&wire.Start{Args: []string{"true"}, Cwd: "/nosuch"}), wire.StageCwd, syscall.ENOENT)
		requireFailure(t, start(&wire.Start{Args: []string{"true"}, User: "nobodyknows"}), wire.StageUser, syscall.ENOENT)
		requireFailure(t, start(&wire.Start{Args: []string{"true", strings.Repeat("x", 2<<20)}}), wire.StageExec, syscall.E2BIG)
		requireFailure(t, start(&wire.Start{Args: []string{"true"}, Tag: "main"}), wire.StageProcess, syscall.EINVAL)
		_, _, exit := ran(t, s, shell("mkdir -p /closed && chmod 700 /closed"))
		require.Zero(t, exit.Code)
		requireFailure(t, start(&wire.Start{Args: []string{"true"}, Cwd: "/closed", User: "1000:1000"}), wire.StageCwd, syscall.EACCES)

		tagged := shell("sleep 1000")
		tagged.Tag = "one"
		stream, err := s.Start(t.Context(), tagged)
		require.NoError(t, err)
		defer stream.Close()
		requireFailure(t, start(tagged), wire.StageProcess, syscall.EEXIST)
		target := wire.Target{Tag: "one"}
		requireFailure(t, s.Do(t.Context(), wire.TypeInput, &wire.Request{Target: target, Data: "x"}), wire.StageProcess, syscall.EPIPE)
		requireFailure(t, s.Do(t.Context(), wire.TypeResize, &wire.Request{Target: target, Terminal: wire.Terminal{Rows: 1, Columns: 1}}), wire.StageTerminal, syscall.ENOTTY)
		requireFailure(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: target, Signal: 99}), wire.StageProcess, syscall.EINVAL)
		requireFailure(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: wire.Target{Pid: 99999}, Signal: 9}), wire.StageProcess, syscall.ESRCH)
		require.NoError(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: target, Signal: 9, Group: true}))
		_, _, exit = finished(t, stream)
		require.EqualValues(t, 9, exit.Signal)
		requireFailure(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: target, Signal: 9}), wire.StageProcess, syscall.ESRCH)
		list, err := s.List(t.Context())
		require.NoError(t, err)
		require.Equal(t, []string{wire.MainTag, "sleep"}, []string{list[0].Tag, list[0].Args[0]})
	})
}

func TestInsideTerminal(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		start := shell("stty size; read line; stty size; echo got $line; tty; exit 5")
		start.Terminal = &wire.Terminal{Rows: 30, Columns: 100}
		start.Tag, start.User = "shell", "1000:1000"
		stream, err := s.Start(t.Context(), start)
		require.NoError(t, err)
		first, err := stream.Next()
		require.NoError(t, err)
		require.Equal(t, "30 100\r\n", first.Data)
		require.Equal(t, wire.Console, first.Stream)
		require.NoError(t, s.Do(t.Context(), wire.TypeResize, &wire.Request{Target: wire.Target{Tag: "shell"}, Terminal: wire.Terminal{Rows: 40, Columns: 132}}))
		require.NoError(t, s.Do(t.Context(), wire.TypeInput, &wire.Request{Target: wire.Target{Tag: "shell"}, Data: "hello\r"}))
		var out strings.Builder
		for {
			e, err := stream.Next()
			require.NoError(t, err)
			if e.Exit != nil {
				require.EqualValues(t, 5, e.Exit.Code)
				break
			}
			out.WriteString(e.Data)
		}
		require.Contains(t, out.String(), "40 132")
		require.Contains(t, out.String(), "got hello")
		require.Contains(t, out.String(), "/dev/pts/")
	})
}

func TestInsideFollows(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		const size = 3 << 20
		start := shell(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo done >&2; sleep 1000", size))
		start.Tag, start.Buffer = "writer", 64<<10
		stream, err := s.Start(t.Context(), start)
		require.NoError(t, err)
		pid := stream.Process().Pid
		require.NoError(t, stream.Close())
		// Without one that follows, what is not kept is lost, and the process runs on.
		require.Eventually(t, func() bool {
			list, err := s.List(t.Context())
			require.NoError(t, err)
			return list[len(list)-1].End == size+5
		}, testkit.Timeout, 10*time.Millisecond)
		again, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Pid: pid}})
		require.NoError(t, err)
		require.EqualValues(t, size+5-64<<10, again.Process().First)
		e, err := again.Next()
		require.NoError(t, err)
		require.Equal(t, again.Process().First, e.Offset)
		require.NoError(t, again.Close())
		require.NoError(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: wire.Target{Tag: "writer"}, Signal: 9, Group: true}))

		// One that follows without a loss gets all, and does not wait for one that reads nothing.
		slow := shell(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo done >&2", size))
		slow.Buffer = 64 << 10
		stream, err = s.Start(t.Context(), slow)
		require.NoError(t, err)
		other, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Pid: stream.Process().Pid}, Lossy: true})
		require.NoError(t, err)
		out, errs, _ := finished(t, stream)
		require.Equal(t, size, len(out))
		require.Equal(t, "done\n", errs)
		_ = other.Close()
	})
}

// TestInsideFollowersAreEqual has one that reads nothing stop a process, until it goes.
func TestInsideFollowersAreEqual(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		const size = 8 << 20
		start := shell(fmt.Sprintf("sleep 0.2; head -c %d /dev/zero", size))
		start.Buffer = 64 << 10
		reader, err := s.Start(t.Context(), start)
		require.NoError(t, err)
		idle, err := s.Follow(t.Context(), &wire.Follow{Target: wire.Target{Pid: reader.Process().Pid}})
		require.NoError(t, err)
		read := make(chan int, 1)
		go func() {
			n := 0
			for {
				e, err := reader.Next()
				if err != nil || e.Exit != nil {
					read <- n
					return
				}
				n += len(e.Data)
			}
		}()
		select {
		case <-read:
			t.Fatal("the process did not wait for the one that does not read")
		case <-time.After(500 * time.Millisecond):
		}
		require.NoError(t, idle.Close())
		require.Equal(t, size, <-read)
	})
}

func TestInsideTimeoutKillsTheGroup(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		start := shell("trap '' TERM; sleep 1000 & sleep 1000")
		start.Timeout = 200
		_, _, exit := ran(t, s, start)
		require.True(t, exit.TimedOut)
		require.EqualValues(t, 9, exit.Signal)
		// The others of the group have been killed, too, and may end later.
		require.Eventually(t, func() bool {
			out, _, _ := ran(t, s, shell("ps | grep -c '[s]leep'"))
			return out == "1\n" // that of the sandbox
		}, testkit.Timeout, testkit.Tick)
	})
}

// TestInsideOrphansAreReaped has processes that leave children behind, and that leave their output open.
func TestInsideOrphansAreReaped(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		began := time.Now()
		out, _, _ := ran(t, s, shell("(sleep 1000 &) ; (true &) ; (true &) ; echo started"))
		require.Equal(t, "started\n", out)
		require.Less(t, time.Since(began), testkit.Timeout, "it does not wait for what has its output")
		require.Eventually(t, func() bool {
			out, _, _ := ran(t, s, shell("cat /proc/[0-9]*/stat"))
			return !strings.Contains(out, ") Z ")
		}, testkit.Timeout, 20*time.Millisecond)
	})
}

// TestInsideFullOfProcesses fills the pids of a sandbox: calls are refused, nothing ends, and all works again afterwards.
func TestInsideFullOfProcesses(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		var pids []uint32
		for full := false; !full; {
			stream, err := s.Start(t.Context(), &wire.Start{Args: []string{"sleep", "1000"}})
			if full = err != nil; full {
				requireFailure(t, err, wire.StageExec, syscall.EAGAIN)
				break
			}
			pids = append(pids, stream.Process().Pid)
			_ = stream.Close()
			require.Less(t, len(pids), 64)
		}
		for range 2000 { // also while unused memory is collected
			_, err := s.List(t.Context())
			require.NoError(t, err)
		}
		for _, pid := range pids {
			require.NoError(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: wire.Target{Pid: pid}, Signal: 9}))
		}
		require.Eventually(t, func() bool {
			other, err := s.Start(t.Context(), shell("echo again"))
			if err != nil {
				return false
			}
			out, _, _ := finished(t, other)
			return out == "again\n"
		}, testkit.Timeout, 20*time.Millisecond)
	})
}

// TestInsideMemoryIsCollected makes calls whose answers are large. The supervisor collects what they leave: the sandbox would run out of memory.
func TestInsideMemoryIsCollected(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		for range 150 {
			_, _, _ = ran(t, s, &wire.Start{Args: []string{"true", strings.Repeat("x", 200)}})
		}
		for range 2000 {
			processes, err := s.List(t.Context())
			require.NoError(t, err)
			require.Greater(t, len(processes), 100)
		}
		out, _, _ := ran(t, s, shell("grep VmRSS /proc/$PPID/status"))
		var kib int
		_, err := fmt.Sscanf(out, "VmRSS: %d kB", &kib)
		require.NoError(t, err, out)
		require.Less(t, kib, 24<<10)
	})
}

// TestInsideSupervisorIsClosed tries, as root of the sandbox, to end, read and trace its supervisor. Root can end one that has joined.
func TestInsideSupervisorIsClosed(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, b runtime.Container) {
		out, _, _ := ran(t, s, shell("echo $PPID"))
		pid := strings.TrimSpace(out)
		for sig := 1; sig <= 64; sig++ {
			try := shell("kill -" + strconv.Itoa(sig) + " " + pid)
			if pid != "1" {
				try.User = "1000:1000"
			}
			_, _, _ = ran(t, s, try)
		}
		for _, try := range []string{
			"head -c 1 /proc/PID/mem", "head -c 1 /proc/PID/environ", "head -c 1 /proc/PID/maps", "head -c 1 /proc/PID/auxv", "readlink /proc/PID/fd/3",
			"ls /proc/PID/root/", "readlink /proc/PID/exe",
		} {
			out, _, exit := ran(t, s, shell(strings.ReplaceAll(try, "PID", pid)))
			require.NotZero(t, exit.Code, "%s: %s", try, out)
		}
		out, _, _ = ran(t, s, shell("cat /proc/"+pid+"/task/*/status"))
		require.NotEmpty(t, out)
		for _, line := range strings.Split(out, "\n") {
			name, value, _ := strings.Cut(line, ":\t")
			switch name {
			case "CapPrm", "CapEff":
				require.Zero(t, capabilities(t, value)&(1<<21|1<<19|1<<12), "admin, ptrace, net admin: %s", line)
			case "CapInh", "CapAmb":
				require.Zero(t, capabilities(t, value), line)
			case "NoNewPrivs":
				require.Equal(t, "1", value)
			case "Seccomp":
				require.Equal(t, "2", value)
			}
		}
		_, err := s.List(t.Context())
		require.NoError(t, err)
	})
}

func capabilities(t *testing.T, hex string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(hex, 16, 64)
	require.NoError(t, err)
	return n
}

// TestInsideEndsWithTheSandbox ends a sandbox while calls run.
func TestInsideEndsWithTheSandbox(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, b runtime.Container) {
		stream, err := s.Start(t.Context(), shell("sleep 1000"))
		require.NoError(t, err)
		// Pid 1 of an OCI runtime is the sandbox's own process, and ignores what it does not handle.
		require.NoError(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: wire.Target{Tag: wire.MainTag}, Signal: uint32(syscall.SIGKILL)}))
		_, err = stream.Next()
		require.Error(t, err)
		require.True(t, errdefs.IsUnavailable(err), "%v", err)
		require.Eventually(t, func() bool {
			_, err = s.List(t.Context())
			return err != nil
		}, testkit.Timeout, testkit.Tick)
		reason := fault.ReasonOf(inside.Fault(err, ""))
		require.Contains(t, []fault.Reason{fault.PhaseConflict, fault.SandboxUnresponsive}, reason, "%v", err)
	})
}

// TestInsideOutlivesTheAgent follows a process again after another runtime, as that of an agent that has started again.
func TestInsideOutlivesTheAgent(t *testing.T) {
	for name, way := range insideWays() {
		t.Run(name, func(t *testing.T) { outlivesTheAgent(t, way) })
	}
}

func outlivesTheAgent(t *testing.T, way func(*testing.T, *containerd.Server) func(*ctrd.Config)) {
	t.Helper()
	server := containerd.Start(t)
	server.Import(t, containerd.Busybox, containerd.Image(t))
	change := way(t, server)
	r := newRuntime(t, server, change)
	b := box(t, server, true, containerd.Busybox, "sleep", "1000")
	require.NoError(t, launch(t.Context(), r, b))
	start := shell("for i in 1 2 3 4 5; do echo $i; sleep 0.2; done; exit 9")
	start.Tag = "counter"
	stream, err := r.Supervisor(b.ID).Start(t.Context(), start)
	require.NoError(t, err)
	e, err := stream.Next()
	require.NoError(t, err)
	require.Equal(t, "1\n", e.Data)
	require.NoError(t, stream.Close())
	r.Close()
	other := newRuntime(t, server, change)
	again, err := other.Supervisor(b.ID).Follow(t.Context(), &wire.Follow{Target: wire.Target{Tag: "counter"}, From: 2})
	require.NoError(t, err)
	var out bytes.Buffer
	for {
		e, err := again.Next()
		require.NoError(t, err)
		if e.Exit != nil {
			require.EqualValues(t, 9, e.Exit.Code)
			break
		}
		out.WriteString(e.Data)
	}
	require.Equal(t, "2\n3\n4\n5\n", out.String())
	require.NoError(t, other.Delete(t.Context(), b.ID))
}
