//go:build integration

package main_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestClaims tests the parts of a claim that the comparison with a cold container does not cover.
func TestClaims(t *testing.T) {
	for _, c := range []struct {
		name   string
		image  func(dir string)
		change func(c *claim.Claim)
		script string
		want   string
	}{
		{"limits", nil, func(c *claim.Claim) {
			c.Rlimits = []claim.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 77, Hard: 88}, {Resource: unix.RLIMIT_CORE}}
		}, "ulimit -n; ulimit -Hn; ulimit -c", "77\n88\n0\n"},
		{"a limit of file descriptors that are all taken", nil, func(c *claim.Claim) {
			c.Rlimits = []claim.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 3, Hard: 3}}
		}, "ulimit -n", "3\n"},
		{"groups", nil, func(c *claim.Claim) {
			c.UID, c.GID, c.Groups, c.Capabilities = 7, 8, []uint32{8, 9, 2147483647}, claim.Capabilities{}
		}, "id; grep -E 'Groups|CapBnd' /proc/self/status", "uid=7 gid=8 groups=8,9,2147483647\nGroups:\t8 9 2147483647 \nCapBnd:\t0000000000000000\n"},
		{"no groups", nil, func(c *claim.Claim) { c.Groups = nil }, "grep Groups /proc/self/status", "Groups:\t \n"},
		{"an ambient capability", nil, func(c *claim.Claim) {
			c.UID, c.GID = 1000, 1000
			c.Capabilities = claim.Capabilities{Bounding: 1 << 10, Effective: 1 << 10, Permitted: 1 << 10, Inheritable: 1 << 10, Ambient: 1 << 10}
		}, "grep Cap /proc/self/status", "CapInh:\t0000000000000400\nCapPrm:\t0000000000000400\nCapEff:\t0000000000000400\nCapBnd:\t0000000000000400\nCapAmb:\t0000000000000400\n"},
		{"privileges that may grow", nil, func(c *claim.Claim) { c.NoNewPrivs = false }, "grep -E 'NoNewPrivs|Seccomp:' /proc/self/status", "NoNewPrivs:\t0\nSeccomp:\t2\n"},
		{"no filter", nil, func(c *claim.Claim) { c.Seccomp = nil }, "grep -E 'NoNewPrivs|Seccomp:' /proc/self/status", "NoNewPrivs:\t1\nSeccomp:\t0\n"},
		{"a umask", nil, func(c *claim.Claim) { n := uint32(0o77); c.Umask = &n }, "umask", "0077\n"},
		{"an oom score", nil, func(c *claim.Claim) { n := int32(500); c.OOMScoreAdj = &n }, "cat /proc/self/oom_score_adj", "500\n"},
		{"a large environment", nil, func(c *claim.Claim) {
			for i := range 1800 {
				c.Env = append(c.Env, "K"+strconv.Itoa(i)+"="+strings.Repeat("x", 1000))
			}
		}, "env | wc -c; cat /etc/hostname", "18115" /* and more */},
		{"the last PATH", nil, func(c *claim.Claim) { c.Env = append([]string{"PATH=/nope"}, c.Env...) }, "echo found", "found\n"},
		{"a relative command", nil, func(c *claim.Claim) { c.Args[0], c.Cwd = "./sh", "/bin" }, "pwd", "/bin\n"},
		{"a link to nowhere", func(dir string) { _ = os.Symlink("../run/made/./hostname", filepath.Join(dir, "etc/hostname")) }, nil,
			"cat /etc/hostname; ls -l /run/made/hostname | cut -c 1-10; grep -c /run/made/hostname /proc/mounts", "box\n-rw-r--r--\n1\n"},
		{"a link out of the root", func(dir string) { _ = os.Symlink("../../../../../../fsb/x", filepath.Join(dir, "etc/hostname")) }, nil,
			"cat /fsb/x", "box\n"},
		{"a created mount point", nil, func(c *claim.Claim) { c.Mounts[0].Destination = "/a/b/../c/name" }, "cat /a/c/name; ls -ld /a/c | cut -c 1-10", "box\ndrwxr-xr-x\n"},
		{"a mount that is read-only", nil, nil, "echo x >/etc/hostname || echo refused", "sh: can't create /etc/hostname: Read-only file system\nrefused\n"},
		{"standard streams of the user", nil, func(c *claim.Claim) { c.UID, c.Capabilities = 1000, claim.Capabilities{} }, "echo again >/dev/stdout; echo last >>/proc/self/fd/2", "again\nlast\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			what := newClaim(t, 0, "sh", "-c", c.script)
			if c.change != nil {
				c.change(what)
			}
			s := start(t)
			out := s.become(t, image(t, c.image), what)
			if c.name == "a large environment" {
				require.True(t, strings.HasPrefix(out, c.want) && strings.HasSuffix(out, "\nbox\n"), out)
				return
			}
			require.Equal(t, c.want, out)
		})
	}
}

// TestRenamesElsewhere renames a file all the time, as a sandbox of another tenant may: the kernel resolves no ".." in a root meanwhile.
func TestRenamesElsewhere(t *testing.T) {
	dir := workspace(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a"), nil, 0o600))
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for from, to := filepath.Join(dir, "a"), filepath.Join(dir, "b"); ; from, to = to, from {
			select {
			case <-done:
				return
			default:
				_ = unix.Rename(from, to)
			}
		}
	}()
	defer func() { close(done); <-stopped }()
	what := newClaim(t, 0, "sh", "-c", "cat /etc/hostname")
	what.Mounts[0].Destination = "/" + strings.Repeat("etc/../", 200) + "etc/hostname"
	s := start(t)
	require.Equal(t, "box\n", s.become(t, image(t, nil), what))
}

// TestMountByDescriptor attaches a detached mount that the agent created.
func TestMountByDescriptor(t *testing.T) {
	volume := workspace(t)
	require.NoError(t, os.WriteFile(filepath.Join(volume, "file"), []byte("kept\n"), 0o644))
	var fds [2]int
	for i := range fds {
		fd, err := unix.OpenTree(unix.AT_FDCWD, volume, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		require.NoError(t, err)
		defer func() { _ = unix.Close(fd) }()
		fds[i] = fd
	}
	what := newClaim(t, 0, "sh", "-c", "cat /data/file /more/file; echo x >/data/file && echo written; echo x >/more/file || echo refused; cat /etc/hostname")
	what.Mounts = append(what.Mounts,
		claim.Mount{Destination: "/more", FD: 1, Dir: true, Attributes: claim.MountReadOnly | claim.MountNoExec},
		claim.Mount{Destination: "/data", FD: 0, Dir: true})
	s := start(t)
	conn := s.connect(t)
	require.EqualValues(t, 1, conn.Version())
	lower := image(t, func(dir string) { _ = os.Remove(filepath.Join(dir, "data")) })
	require.NoError(t, conn.Send(deadline(t), what, mount(t, lower), fds[:]...))
	require.NoError(t, conn.Go(deadline(t)))
	require.Zero(t, s.wait(t).ExitStatus())
	require.Equal(t, "kept\nkept\nwritten\nsh: can't create /more/file: Read-only file system\nrefused\nbox\n", s.text(t))
}

// TestCommandIsPID1 checks that the exit code and the signals are those of the command.
func TestCommandIsPID1(t *testing.T) {
	for _, c := range []struct {
		script string
		signal unix.Signal
		exits  int
	}{{"exit 42", 0, 42}, {"trap 'exit 9' TERM; echo up; while :; do sleep 1 & wait; done", unix.SIGTERM, 9}, {"echo up; exec sleep 1000", unix.SIGKILL, -1}} {
		t.Run(c.script, func(t *testing.T) {
			s := start(t)
			conn := s.connect(t)
			require.NoError(t, conn.Send(deadline(t), newClaim(t, 0, "sh", "-c", c.script), mount(t, image(t, nil))))
			require.NoError(t, conn.Go(deadline(t)))
			if c.signal != 0 {
				require.Eventually(t, func() bool { return s.text(t) == "up\n" }, testkit.Timeout, testkit.Tick)
				require.NoError(t, unix.Kill(s.pid, c.signal))
			}
			status := s.wait(t)
			require.Equal(t, c.exits, status.ExitStatus())
			if c.exits < 0 {
				require.Equal(t, c.signal, status.Signal())
			}
		})
	}
}

// TestWaitingSlotEndsOnSignal: the Go runtime handles these signals, which the kernel does not deliver to a pid 1 without a
// handler.
func TestWaitingSlotEndsOnSignal(t *testing.T) {
	for _, signal := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			s := start(t)
			require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(s.fsb, claim.SocketName)); return err == nil }, testkit.Timeout, testkit.Tick)
			require.NoError(t, unix.Kill(s.pid, signal))
			s.wait(t)
		})
	}
}

// TestConcurrentClaims starts and claims slots concurrently.
func TestConcurrentClaims(t *testing.T) {
	lower := image(t, nil)
	for i := range 10 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			require.Equal(t, "it ran "+strconv.Itoa(i)+"\n", start(t).become(t, lower, newClaim(t, 1000, "sh", "-c", "echo it ran "+strconv.Itoa(i))))
		})
	}
}
