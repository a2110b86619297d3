package process_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// target starts a process in namespaces of its own. It changes nothing in them: some are the machine's.
func target(t *testing.T, s *process.Starter, spec process.Spec) *process.Process {
	t.Helper()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	require.NoError(t, err)
	defer null.Close()
	spec.Path, spec.Args, spec.Files = "/bin/sh", []string{"sh", "-c", "while :; do sleep 0.1; done"}, []*os.File{null, null, null}
	p, err := s.Start(t.Context(), &spec)
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = p.Signal(unix.SIGKILL)
		<-p.Done()
		p.Close()
	})
	return p
}

// join runs a shell in the namespaces of a process, and returns what it prints with its process.
func join(t *testing.T, s *process.Starter, to *process.Process, program, script string, attach func(int) error) (string, *process.Process, error) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	gate, control := os.NewFile(uintptr(fds[0]), "gate"), os.NewFile(uintptr(fds[1]), "control")
	defer gate.Close()
	sh, err := os.OpenFile(program, unix.O_PATH, 0)
	require.NoError(t, err)
	defer sh.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	p, err := s.Join(ctx, &process.Join{
		Target: to, Program: sh, Args: []string{"sh", "-c", script}, Env: []string{"PATH=/bin:/usr/bin", "A=x y"}, Streams: [3]*os.File{null, w, w}, Control: control,
		Gate: gate, Attach: attach,
	})
	require.NoError(t, w.Close())
	require.NoError(t, control.Close())
	out, readErr := io.ReadAll(r)
	require.NoError(t, readErr)
	if p != nil {
		<-p.Done()
	}
	return string(out), p, err
}

func attached(int) error { return nil }

// testJoin is a part of TestStarter: a program has one Starter.
func testJoin(t *testing.T, s *process.Starter) {
	const all = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP
	t.Run("all namespaces, and no descriptor", func(t *testing.T) {
		to := target(t, s, process.Spec{Flags: all})
		moved := 0
		out, p, err := join(t, s, to, "/bin/sh", `echo $A; ls /proc/self/fd | tr '\n' ' '; for n in user mnt pid uts ipc net cgroup; do readlink /proc/self/ns/$n; done; exit 9`,
			func(pid int) error { moved = pid; return nil })
		require.NoError(t, err)
		code, _ := p.Exit()
		require.EqualValues(t, 9, code)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		require.Equal(t, "x y", lines[0])
		require.Positive(t, moved)
		require.NotEqual(t, p.Pid(), moved, "the process is one that the moved one has started")
		require.True(t, strings.HasPrefix(lines[1], "0 1 2 3 4 "), "4 is what ls opens: %s", lines[1])
		lines[1] = strings.TrimPrefix(lines[1], "0 1 2 3 4 ")
		for i, name := range []string{"user", "mnt", "pid", "uts", "ipc", "net", "cgroup"} {
			want, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(to.Pid()), "ns", name))
			require.NoError(t, err)
			require.Equal(t, want, lines[1+i])
		}
		p.Close()
	})
	t.Run("a user namespace", func(t *testing.T) {
		// The Starter makes no user namespaces.
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100_000, Size: 65_536}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWUTS, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true}
		require.NoError(t, cmd.Start())
		defer func() { _ = cmd.Process.Kill() }()
		to, err := process.Of(cmd.Process.Pid)
		require.NoError(t, err)
		defer to.Close()
		script := "id -u; id -g; cat /proc/self/uid_map; grep CapEff /proc/self/status; readlink /proc/self/ns/user"
		out, p, err := join(t, s, to, "/bin/sh", script, attached)
		require.NoError(t, err)
		p.Close()
		lines := strings.Split(strings.TrimSpace(out), "\n")
		require.Equal(t, []string{"0", "0"}, lines[:2], "root there")
		require.NotContains(t, lines[3], "0000000000000000", "with capabilities after an exec")
		want, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(to.Pid()), "ns/user"))
		require.NoError(t, err)
		require.Equal(t, want, lines[4])
	})
	t.Run("failures leave nothing", func(t *testing.T) {
		to := target(t, s, process.Spec{Flags: unix.CLONE_NEWPID})
		refused := errors.New("no such cgroup")
		child := 0
		_, _, err := join(t, s, to, "/bin/sh", "true", func(pid int) error { child = pid; return refused })
		require.ErrorIs(t, err, refused)
		require.Eventually(t, func() bool { return errors.Is(syscall.Kill(child, 0), syscall.ESRCH) }, testkit.Timeout, testkit.Tick)
		_, _, err = join(t, s, to, "/etc/passwd", "true", attached)
		require.ErrorIs(t, err, syscall.EACCES)
		require.ErrorContains(t, err, "executing the program")
		require.NoError(t, to.Signal(unix.SIGKILL))
		<-to.Done()
		_, _, err = join(t, s, to, "/bin/sh", "true", attached)
		require.ErrorIs(t, err, os.ErrProcessDone)
	})
	t.Run("the target ends in between", func(t *testing.T) {
		to := target(t, s, process.Spec{Flags: unix.CLONE_NEWPID})
		_, _, err := join(t, s, to, "/bin/sh", "true", func(int) error {
			err := to.Signal(unix.SIGKILL)
			<-to.Done()
			return err
		})
		require.ErrorIs(t, err, os.ErrProcessDone)
	})
	t.Run("many at once", func(t *testing.T) {
		to := target(t, s, process.Spec{Flags: all})
		codes := make(chan uint32)
		for range 20 {
			go func() {
				_, p, err := join(t, s, to, "/bin/sh", "exit 7", attached)
				if err != nil {
					codes <- 0
					return
				}
				code, _ := p.Exit()
				p.Close()
				codes <- code
			}()
		}
		for range 20 {
			require.EqualValues(t, 7, <-codes)
		}
	})
}
