package process_test

import (
	"context"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// run starts a shell that prints to a pipe, and returns what it prints with its process.
func run(t *testing.T, s *process.Starter, spec process.Spec, script string) (string, *process.Process) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	spec.Path, spec.Args, spec.Files = "/bin/sh", []string{"sh", "-c", script}, []*os.File{null, w, w}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	p, err := s.Start(ctx, &spec)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	var out strings.Builder
	buffer := make([]byte, 1024)
	for {
		n, err := r.Read(buffer)
		out.Write(buffer[:n])
		if err != nil {
			break
		}
	}
	<-p.Done()
	return out.String(), p
}

// The Starter of this package's tests: it waits for all children of the program.
func TestStarter(t *testing.T) {
	// What started this program may have ignored a signal that the Go runtime does not use.
	const unused = unix.Signal(33)
	require.NoError(t, process.Ignore(unused))
	s, err := process.NewStarter()
	require.NoError(t, err)
	t.Run("exit codes", func(t *testing.T) {
		for script, want := range map[string]uint32{"exit 0": 0, "exit 42": 42, "kill -TERM $$": 128 + 15} {
			_, p := run(t, s, process.Spec{}, script)
			code, at := p.Exit()
			require.Equal(t, want, code, script)
			require.False(t, at.IsZero())
			require.True(t, p.Ended())
			require.ErrorIs(t, p.Signal(unix.SIGKILL), os.ErrProcessDone)
			p.Close()
		}
	})
	t.Run("a session of its own, and no signal is ignored", func(t *testing.T) {
		out, p := run(t, s, process.Spec{}, `grep SigIgn /proc/self/status; [ "$(cut -d' ' -f6 /proc/$$/stat)" = $$ ] && echo leader`)
		require.Contains(t, out, "SigIgn:\t0000000000000000")
		require.Contains(t, out, "leader")
		p.Close()
	})
	t.Run("namespaces", func(t *testing.T) {
		require.Zero(t, os.Geteuid(), "namespaces need root: run these tests as root")
		out, p := run(t, s, process.Spec{Flags: unix.CLONE_NEWPID | unix.CLONE_NEWUTS}, "hostname inside; hostname; echo $$")
		require.Equal(t, "inside\n1\n", out)
		name, err := os.Hostname()
		require.NoError(t, err)
		require.NotEqual(t, "inside", name)
		p.Close()
	})
	t.Run("a user namespace", func(t *testing.T) {
		const first = 1 << 28
		out, p := run(t, s, process.Spec{Flags: unix.CLONE_NEWPID, FirstID: first}, "id -u; id -G; cat /proc/$PPID/uid_map /proc/self/uid_map 2>/dev/null | tail -1; grep -E 'CapEff' /proc/self/status; sleep 0.2")
		lines := strings.Split(out, "\n")
		require.Equal(t, []string{"0", "0"}, lines[:2])
		require.Contains(t, lines[2], "268435456      65536")
		require.NotContains(t, lines[3], "0000000000000000")
		p.Close()
		// The namespace belongs to its root, and not to that of the machine.
		other := target(t, s, process.Spec{FirstID: first})
		ns, err := os.Open("/proc/" + strconv.Itoa(other.Pid()) + "/ns/user")
		require.NoError(t, err)
		defer ns.Close()
		var owner uint32
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, ns.Fd(), unix.NS_GET_OWNER_UID, uintptr(unsafe.Pointer(&owner)))
		require.Zero(t, errno)
		require.EqualValues(t, first, owner)
		// What comes next is root's again.
		out, p = run(t, s, process.Spec{}, "id -u; grep CapEff /proc/self/status")
		require.Contains(t, out, "0\nCapEff:")
		require.NotContains(t, out, "0000000000000000")
		p.Close()
	})
	t.Run("a cgroup", func(t *testing.T) { testCgroup(t, s) })
	t.Run("the network of another", func(t *testing.T) {
		own, err := os.Readlink("/proc/self/ns/net")
		require.NoError(t, err)
		other := make(chan string)
		go func() {
			out, p := run(t, s, process.Spec{Flags: unix.CLONE_NEWNET}, "readlink /proc/self/ns/net; sleep 0.3")
			p.Close()
			other <- out
		}()
		require.NotEqual(t, own+"\n", <-other)
		out, p := run(t, s, process.Spec{Network: "/proc/self/ns/net"}, "readlink /proc/self/ns/net")
		require.Equal(t, own+"\n", out)
		p.Close()
		_, err = s.Start(t.Context(), &process.Spec{Path: "/bin/true", Args: []string{"true"}, Network: "/nowhere"})
		require.ErrorIs(t, err, os.ErrNotExist)
	})
	t.Run("many at once", func(t *testing.T) {
		done := make(chan uint32)
		for range 30 {
			go func() {
				_, p := run(t, s, process.Spec{}, "exit 7")
				code, _ := p.Exit()
				p.Close()
				done <- code
			}()
		}
		for range 30 {
			require.EqualValues(t, 7, <-done)
		}
	})
	t.Run("join", func(t *testing.T) { testJoin(t, s) })
	t.Run("no program", func(t *testing.T) {
		_, err := s.Start(t.Context(), &process.Spec{Path: "/nowhere", Args: []string{"x"}})
		require.ErrorIs(t, err, syscall.ENOENT)
	})
}

// testCgroup: a process is in its cgroup from its first instruction, and that is the root of its cgroup namespace.
func testCgroup(t *testing.T, s *process.Starter) {
	tree, err := cgroup.Open("/sys/fs/cgroup")
	require.NoError(t, err)
	path := "/fsb-process-test-" + strconv.Itoa(os.Getpid())
	require.NoError(t, tree.Create(path, nil))
	t.Cleanup(func() { require.NoError(t, tree.Remove(path)) })
	into, err := tree.Entrance(path)
	require.NoError(t, err)
	defer into.Close()
	for _, first := range []uint32{0, 1 << 28} {
		out, p := run(t, s, process.Spec{Cgroup: into, FirstID: first}, "cat /proc/self/cgroup")
		p.Close()
		require.Contains(t, out, path)
		for line := range strings.Lines(out) {
			if hierarchy, rest, _ := strings.Cut(line, ":"); hierarchy != "0" || tree.Unified() { // the kernel has that one in any case
				require.Contains(t, rest, path)
			}
		}
		out, p = run(t, s, process.Spec{Cgroup: into, FirstID: first, Flags: unix.CLONE_NEWCGROUP}, "cat /proc/self/cgroup")
		p.Close()
		require.NotContains(t, out, path)
		require.Contains(t, out, ":/\n")
	}
}
