package host_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

func TestParseStat(t *testing.T) {
	const tail = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 %s 0 0"
	tests := map[string]struct {
		stat string
		want host.Info
		fail bool
	}{
		"plain": {
			stat: "42 (sleep) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 2",
			want: host.Info{Process: host.Process{PID: 42, StartTime: 123456}, PPID: 7},
		},
		"name with blanks and parentheses": {
			stat: "42 (a) S 1 (b) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 2",
			want: host.Info{Process: host.Process{PID: 42, StartTime: 123456}, PPID: 7},
		},
		"zombie": {
			stat: "42 (x) Z 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 9 1 2",
			want: host.Info{Process: host.Process{PID: 42, StartTime: 9}, PPID: 7, Zombie: true},
		},
		"cut short": {stat: "42 (x) S 7", fail: true},
		"empty":     {stat: "", fail: true},
		"no number": {stat: "x (x) S 7" + tail, fail: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := host.ParseStat(test.stat)
			if test.fail {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

func TestParseCgroups(t *testing.T) {
	got := host.ParseCgroups("12:cpu,cpuacct:/fsb-local/system\n1:name=systemd:/fsb-local/system\n0::/user.slice\nbroken\n")
	require.Equal(t, []string{"/fsb-local/system", "/user.slice"}, got)
}

func TestInCgroup(t *testing.T) {
	info := host.Info{Cgroups: []string{"/fsb-local/kubepods/pod1"}}
	require.True(t, info.InCgroup("/fsb-local"))
	require.True(t, info.InCgroup("/fsb-local/kubepods/pod1"))
	require.False(t, info.InCgroup("/fsb"))
	require.False(t, info.InCgroup("/fsb-local/kubepods/pod"))
}

func TestFamily(t *testing.T) {
	member := func(pid, ppid int) host.Info { return host.Info{Process: host.Process{PID: pid}, PPID: ppid} }
	// A grandchild stands before its parent, and one process is its own parent.
	all := []host.Info{member(4, 3), member(1, 0), member(2, 1), member(3, 2), member(5, 1), member(6, 6)}
	var pids []int
	for _, info := range host.Family(all, func(i host.Info) bool { return i.PID == 2 }) {
		pids = append(pids, info.PID)
	}
	require.Equal(t, []int{4, 2, 3}, pids)
}

// A pid alone proves nothing: with another start time it is another process, which must not be touched.
func TestAnotherProcessIsNeverSignalled(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	require.NoError(t, cmd.Start())
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()

	real, err := host.Lookup(cmd.Process.Pid)
	require.NoError(t, err)
	require.True(t, real.Alive())

	other := host.Process{PID: real.PID, StartTime: real.StartTime - 1}
	require.False(t, other.Alive())
	require.NoError(t, other.Signal(unix.SIGKILL))
	require.NoError(t, other.Stop(t.Context(), time.Second))
	require.True(t, real.Alive())

	require.NoError(t, real.Stop(t.Context(), 10*time.Second))
	require.Error(t, <-exited)
	require.False(t, real.Alive())
	require.NoError(t, real.Signal(unix.SIGKILL), "signaling a process that has exited is no error")
	require.False(t, host.Process{}.Alive())
}

// A process that ignores SIGTERM is killed.
func TestStopKills(t *testing.T) {
	cmd := exec.Command("sh", "-c", `trap "" TERM; echo ready; while :; do sleep 1; done`)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	process, err := host.Lookup(cmd.Process.Pid)
	require.NoError(t, err)
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	require.NoError(t, process.Stop(t.Context(), 50*time.Millisecond))
	require.ErrorContains(t, <-exited, "killed")
}

func TestProcessesFindsSelf(t *testing.T) {
	all, err := host.Processes()
	require.NoError(t, err)
	self, err := host.Self()
	require.NoError(t, err)
	for _, info := range all {
		if info.Process == self {
			require.Equal(t, os.Args, info.Args)
			require.Equal(t, os.Getppid(), info.PPID)
			require.True(t, info.SharesMounts())
			require.False(t, info.Nested)
			return
		}
	}
	t.Fatal("the own process is not listed")
}

// A process chooses its command line; its program and its PID namespace are the kernel's word.
func TestProcessesKnowTheProgram(t *testing.T) {
	require.Zero(t, os.Geteuid(), "PID namespaces need root: run these tests as root")
	path := filepath.Join(t.TempDir(), "kubelet-of-a-test")
	raw, err := os.ReadFile("/bin/sleep")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, raw, 0o700))
	for name, test := range map[string]struct {
		path   string
		nested bool
		want   string
	}{
		"its program":         {path: path, want: "kubelet-of-a-test"},
		"its command line":    {path: "/bin/sleep", want: "sleep"},
		"its program, within": {path: path, nested: true, want: "kubelet-of-a-test"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := &exec.Cmd{Path: test.path, Args: []string{"kubelet", "600"}}
			if test.nested {
				cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
			}
			require.NoError(t, cmd.Start())
			defer func() { _ = cmd.Wait() }()
			defer func() { require.NoError(t, cmd.Process.Kill()) }()
			var found host.Info
			// The kernel writes the new program's arguments after it has closed the descriptors that Start waits for.
			require.Eventually(t, func() bool {
				all, err := host.Processes()
				require.NoError(t, err)
				at := slices.IndexFunc(all, func(i host.Info) bool { return i.PID == cmd.Process.Pid && len(i.Args) > 0 })
				if at >= 0 {
					found = all[at]
				}
				return at >= 0
			}, time.Minute, time.Millisecond)
			require.Equal(t, test.want, found.Program("fsb-local"))
			require.Equal(t, "kubelet", found.Program(test.want), "a program that is many in one")
			require.Equal(t, test.nested, found.Nested)
		})
	}
	require.Empty(t, host.Info{}.Program("fsb-local"), "a thread of the kernel")
}

// A child must not keep the locks of the caller that started it.
func TestCloseOnExec(t *testing.T) {
	inherited, err := unix.Dup(1) // without the flag, as an inherited file
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Close(inherited)) }()
	flags, err := unix.FcntlInt(uintptr(inherited), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.Zero(t, flags&unix.FD_CLOEXEC)
	require.NoError(t, host.CloseOnExec())
	flags, err = unix.FcntlInt(uintptr(inherited), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, flags&unix.FD_CLOEXEC)
}
