package ctrd_test

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/containerd/containerd/api/types/task"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// A sandbox may give itself the command line of its own shim or of another sandbox's, and execute a file with the shim's name.
// Neither it nor a process of the node that executes something else is taken for the shim, and none is killed.
func TestNamesakesOfAShim(t *testing.T) {
	require.Zero(t, os.Geteuid(), "PID namespaces need root: run these tests as root")
	for name, test := range map[string]struct {
		program string
		sandbox bool // in a PID namespace of its own
		removed bool // the program's file, after its start
		want    bool
	}{
		"a shim":                          {program: fakeShim, want: true},
		"a shim that was upgraded":        {program: fakeShim, removed: true, want: true},
		"another program":                 {program: "other"},
		"another program, removed":        {program: "other", removed: true},
		"a sandbox":                       {program: "other", sandbox: true},
		"a sandbox with a shim's program": {program: fakeShim, sandbox: true},
		"a sandbox whose file is removed": {program: fakeShim, sandbox: true, removed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			id := slots(2)
			cmd := exec.Cmd{Path: shimBinary(t, test.program)}
			if test.sandbox {
				cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
			}
			s := startAs(t, cmd, id[0])
			// The id of a container that is not a slot.
			other := startAs(t, cmd, "u-"+id[1])
			if test.removed {
				require.NoError(t, os.Remove(cmd.Path))
			}
			if !test.want {
				require.Empty(t, ctrd.Shims("/proc", "k8s.io", id[0]))
				require.Empty(t, ctrd.Strays("/proc", "k8s.io", "u-"+id[1]))
			} else {
				require.Equal(t, []int{s.cmd.Process.Pid}, ctrd.Shims("/proc", "k8s.io", id[0]))
				require.Equal(t, []int{other.cmd.Process.Pid}, ctrd.Strays("/proc", "k8s.io", "u-"+id[1]))
			}

			h := &host{status: task.Status_RUNNING, groups: map[string]string{id[0]: id[0]}}
			r := h.remover(t)
			r.ProcRoot, r.Clock = "/proc", hurry(t, nil)
			require.NoError(t, r.Remove(t.Context(), id[0]))
			if test.want {
				<-s.ended
			}
			require.Equal(t, test.want, s.killed())
		})
	}
}

// An agent has fewer capabilities than a shim and no CAP_SYS_PTRACE, so the kernel does not show it the shim's program.
func TestShimWhoseProgramIsHidden(t *testing.T) {
	require.Zero(t, os.Geteuid(), "PID namespaces need root: run these tests as root")
	id, path := slots(3), shimBinary(t, fakeShim)
	root := startAs(t, exec.Cmd{Path: path}, id[0])
	startAs(t, exec.Cmd{Path: path, SysProcAttr: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}}, id[1])
	startAs(t, exec.Cmd{Path: "/proc/self/exe", SysProcAttr: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}}, id[2])
	var hidden error
	found, ended := map[string][]int{}, make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its capabilities
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		err := unix.Capget(&header, &caps[0])
		caps[0].Effective &^= 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_NET_RAW
		if err == nil {
			err = unix.Capset(&header, &caps[0])
		}
		_, hidden = os.Readlink(fmt.Sprintf("/proc/%d/exe", root.cmd.Process.Pid))
		for _, i := range id {
			found[i] = ctrd.Shims("/proc", "k8s.io", i)
		}
		ended <- err
	}()
	require.NoError(t, <-ended)
	require.ErrorIs(t, hidden, fs.ErrPermission)
	require.Equal(t, []int{root.cmd.Process.Pid}, found[id[0]])
	require.Empty(t, found[id[1]], "a process of a sandbox")
	require.Empty(t, found[id[2]], "a process of an ordinary user")
}
