package seccomp_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/seccomp"
)

func load(filters []unix.SockFilter) error {
	program := unix.SockFprog{Len: uint16(len(filters)), Filter: &filters[0]}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filters)
	if errno != 0 {
		return errno
	}
	return nil
}

// call makes one system call in a process that is confined by the program. It returns the errno, or the signal that killed
// the process.
func call(t *testing.T, program []byte, number int, first uint64) (syscall.Errno, syscall.Signal) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-"+childFlag, strconv.Itoa(number), "-first", strconv.FormatUint(first, 10))
	cmd.Stdin = bytes.NewReader(program)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled() {
		return 0, exit.Sys().(syscall.WaitStatus).Signal()
	}
	require.NoError(t, err, stderr.String())
	errno, err := strconv.Atoi(strings.TrimSpace(string(out)))
	require.NoError(t, err)
	return syscall.Errno(errno), 0
}

func TestKernelLoadsDefaultProfile(t *testing.T) {
	program, err := seccomp.Compile(defaultProfile(runtime.GOARCH))
	require.NoError(t, err)
	for _, c := range []struct {
		name   string
		number int
		first  uint64
		want   syscall.Errno
	}{
		{"allowed", unix.SYS_GETPID, 0, 0},
		{"refused", unix.SYS_SWAPON, 0, syscall.EPERM},
		{"refused as unknown", unix.SYS_CLONE3, 0, syscall.ENOSYS},
		{"beyond the profile", 5000, 0, syscall.ENOSYS},
		{"an argument that is allowed", unix.SYS_PERSONALITY, 0xffffffff, 0},
		{"an argument that is refused", unix.SYS_PERSONALITY, 0x40000, syscall.EPERM},
		{"a socket that is refused", unix.SYS_SOCKET, unix.AF_VSOCK, syscall.EPERM},
		{"a flag that is refused", unix.SYS_CLONE, unix.CLONE_NEWUSER | unix.CLONE_FS, syscall.EPERM},
	} {
		t.Run(c.name, func(t *testing.T) {
			errno, signal := call(t, program, c.number, c.first)
			require.Zero(t, signal)
			require.Equal(t, c.want, errno)
		})
	}
}

func TestKernelKills(t *testing.T) {
	program, err := seccomp.Compile(profile("SCMP_ACT_ALLOW", rule("SCMP_ACT_KILL_PROCESS", "swapon"), rule("SCMP_ACT_TRAP", "swapoff")))
	require.NoError(t, err)
	_, signal := call(t, program, unix.SYS_SWAPON, 0)
	require.Equal(t, syscall.SIGSYS, signal)
}
