package process_test

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
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
func join(t *testing.T, s *process.Starter, to *process.Process, program, script string, into *cgroup.Entrance) (string, *process.Process, error) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	control := os.NewFile(uintptr(fds[1]), "control")
	defer func() { _ = unix.Close(fds[0]) }()
	sh, err := os.OpenFile(program, unix.O_PATH, 0)
	require.NoError(t, err)
	defer sh.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	p, err := s.Join(ctx, &process.Join{
		Target: to, Program: sh, Args: []string{"sh", "-c", script}, Env: []string{"PATH=/bin:/usr/bin", "A=x y"}, Streams: [3]*os.File{null, w, w}, Control: control,
		Cgroup: into,
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

// testJoin is a part of TestStarter: a program has one Starter.
func testJoin(t *testing.T, s *process.Starter) {
	const all = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP
	t.Run("all namespaces, and no descriptor", func(t *testing.T) {
		to := target(t, s, process.Spec{Flags: all})
		out, p, err := join(t, s, to, "/bin/sh", `echo $A; ls /proc/self/fd | tr '\n' ' '; for n in user mnt pid uts ipc net cgroup; do readlink /proc/self/ns/$n; done; exit 9`,
			nil)
		require.NoError(t, err)
		code, _ := p.Exit()
		require.EqualValues(t, 9, code)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		require.Equal(t, "x y", lines[0])
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
		out, p, err := join(t, s, to, "/bin/sh", script, nil)
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
		none, err := os.Open(os.DevNull) // not writable, as a cgroup that is being removed
		require.NoError(t, err)
		defer none.Close()
		_, _, err = join(t, s, to, "/bin/sh", "true", &cgroup.Entrance{Tasks: []*os.File{none}})
		require.ErrorContains(t, err, "entering the cgroup")
		_, _, err = join(t, s, to, "/etc/passwd", "true", nil)
		require.ErrorIs(t, err, syscall.EACCES)
		require.ErrorContains(t, err, "executing the program")
		require.NoError(t, to.Signal(unix.SIGKILL))
		<-to.Done()
		_, _, err = join(t, s, to, "/bin/sh", "true", nil)
		require.ErrorIs(t, err, os.ErrProcessDone)
	})
	t.Run("the target ends in between", func(t *testing.T) {
		ended := 0
		for n := 0; ended < 5; n++ {
			to := target(t, s, process.Spec{Flags: unix.CLONE_NEWPID})
			killed := make(chan error, 1)
			time.AfterFunc(time.Duration(n%20)*100*time.Microsecond, func() { killed <- to.Signal(unix.SIGKILL) })
			_, p, err := join(t, s, to, "/bin/sh", "true", nil)
			require.NoError(t, <-killed)
			<-to.Done()
			if err != nil {
				require.ErrorIs(t, err, os.ErrProcessDone)
				ended++
				continue
			}
			p.Close()
		}
	})
	t.Run("many at once", func(t *testing.T) {
		to := target(t, s, process.Spec{Flags: all})
		codes := make(chan uint32)
		for range 20 {
			go func() {
				_, p, err := join(t, s, to, "/bin/sh", "exit 7", nil)
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
