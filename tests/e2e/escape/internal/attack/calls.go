package attack

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// calls are system calls that a sandbox needs not make, each with arguments that make it fail or do nothing if it is allowed.
func calls() []Attack {
	const nowhere = ^uintptr(0)
	call := func(name, does string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "system calls: " + name, Does: does, Success: "the kernel executes the call"}, run: run}
	}
	raw := func(name, does string, nr uintptr, args ...uintptr) Attack {
		var a [6]uintptr
		copy(a[:], args)
		return call(name, does, func(*Env) (string, error) {
			_, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
			return reached(name, errno)
		})
	}
	kexec := raw("kexec_load", "loads another kernel", unix.SYS_KEXEC_LOAD, 0, 0, 0, nowhere)
	kexec.Unprovable = "kernels without CONFIG_KEXEC do not have the call"
	module := raw("init_module", "loads a module into the kernel", unix.SYS_INIT_MODULE, nowhere, 0, nowhere)
	module.Unprovable = "kernels without modules do not have the call"
	unload := raw("delete_module", "unloads a module of the kernel", unix.SYS_DELETE_MODULE, nowhere, 0)
	unload.Unprovable = module.Unprovable
	fault := call("userfaultfd", "handles page faults of the kernel", func(*Env) (string, error) { return descriptor(unix.SYS_USERFAULTFD, unix.O_CLOEXEC) })
	keyUse := call("keyctl", "reads the keys of its session", func(*Env) (string, error) {
		_, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false)
		return done(err, "the session keyring is there")
	})
	keyNew := call("add_key", "stores a key, of which all sandboxes of a user can store only a certain number", func(*Env) (string, error) {
		_, err := unix.AddKey("user", "escape", []byte("x"), unix.KEY_SPEC_PROCESS_KEYRING)
		return done(err, "a key is stored")
	})
	return []Attack{
		call("bpf", "loads a program into the kernel", func(*Env) (string, error) { return loadProgram() }),
		call("perf_event_open", "counts events of the kernel", func(*Env) (string, error) { return openPerf() }),
		call("io_uring", "makes a ring, by which calls pass the filter", func(*Env) (string, error) {
			var pinner runtime.Pinner
			defer pinner.Unpin()
			params := new([30]uint32) // struct io_uring_params
			pinner.Pin(params)
			return descriptor(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(params)))
		}),
		fault, kexec, module, unload, keyUse, keyNew,
		raw("reboot", "restarts the node", unix.SYS_REBOOT, 0, 0, 0),
		raw("swapon", "swaps to a file of its own", unix.SYS_SWAPON, nowhere),
		raw("settimeofday", "sets the clock of the node", unix.SYS_SETTIMEOFDAY, nowhere),
		raw("sethostname", "renames the node", unix.SYS_SETHOSTNAME, nowhere, 1),
		raw("syslog", "reads the kernel's log", unix.SYS_SYSLOG, 10, 0, 0),
		raw("fsconfig", "configures a file system", unix.SYS_FSCONFIG, nowhere, nowhere),
		raw("mount_setattr", "changes the flags of a mount", unix.SYS_MOUNT_SETATTR, nowhere, nowhere),
		raw("quotactl", "changes quotas", unix.SYS_QUOTACTL, nowhere, nowhere),
		raw("acct", "has the kernel log all processes to a file of its own", unix.SYS_ACCT, nowhere),
		call("socket of the hypervisor", "makes an AF_VSOCK socket, which reaches the machine below the node", func(*Env) (string, error) {
			fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if errno := errnoOf(err); errno != 0 {
				return reached("socket", errno)
			}
			_ = unix.Close(fd)
			return "there is a socket", nil
		}),
	}
}

// descriptor makes a call that returns a descriptor, and closes that.
func descriptor(nr uintptr, args ...uintptr) (string, error) {
	var a [3]uintptr
	copy(a[:], args)
	fd, _, errno := unix.Syscall(nr, a[0], a[1], a[2])
	if errno != 0 {
		return reached("the call", errno)
	}
	_ = unix.Close(int(fd))
	return "the call has returned a descriptor", nil
}

// programAttr is the part of union bpf_attr that loads a program.
type programAttr struct {
	kind, count     uint32
	insns, license  uint64
	level, size     uint32
	buffer          uint64
	version, flags  uint32
	name            [16]byte
	index, expected uint32
}

// loadProgram loads a program of two instructions that returns 0, as a filter of sockets.
func loadProgram() (string, error) {
	const progLoad, socketFilter = 5, 1
	var pinner runtime.Pinner // the kernel follows the addresses in the structure
	defer pinner.Unpin()
	code, license := &[2]uint64{0xb7, 0x95}, new([1]byte) // mov r0, 0; exit
	pinner.Pin(code)
	pinner.Pin(license)
	attr := &programAttr{kind: socketFilter, count: 2, insns: address(unsafe.Pointer(code)), license: address(unsafe.Pointer(license))}
	pinner.Pin(attr)
	return descriptor(unix.SYS_BPF, progLoad, uintptr(unsafe.Pointer(attr)), unsafe.Sizeof(*attr))
}

func address(p unsafe.Pointer) uint64 { return uint64(uintptr(p)) }

func openPerf() (string, error) {
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_TASK_CLOCK, Bits: unix.PerfBitDisabled}
	attr.Size = uint32(unsafe.Sizeof(attr))
	fd, err := unix.PerfEventOpen(&attr, os.Getpid(), -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return "", err
	}
	_ = unix.Close(fd)
	return fmt.Sprintf("there is a counter of process %d", os.Getpid()), nil
}
