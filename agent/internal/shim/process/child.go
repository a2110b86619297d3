package process

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The hooks of the Go runtime for a fork, as package syscall calls them: no signal arrives and no stack grows between the first and one of the
// others.
//
//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

//go:linkname afterForkInChild syscall.runtime_AfterForkInChild
func afterForkInChild()

// Descriptors of a process that joins a container. The first four stay open when it executes its program.
const (
	controlFD = 3 + iota
	programFD
	targetFD
	reportFD
	childFiles
)

// Steps of a child, which it reports with an errno, or with the pid of the process that it has started.
const (
	stepStarted int32 = iota
	stepDescriptors
	stepNamespaces
	stepUser
	stepFork
	stepExec
)

var steps = [...]string{"", "passing file descriptors", "entering the namespaces", "becoming root in the user namespace", "forking", "executing the program"} //nolint:gochecknoglobals // constant

// cloneArgs is the kernel's struct clone_args.
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// report is what a child writes about a step.
type report struct{ step, value int32 }

const reportSize = int(unsafe.Sizeof(report{}))

// child is a process that is forked from this program to start another one in namespaces. Its memory is a copy, its only thread the one that
// has forked, and so it does nothing but system calls, with values that were prepared before.
type child struct {
	files      [childFiles]uintptr
	namespaces uintptr // CLONE_NEW*
	argv, envp *unsafe.Pointer
	first      cloneArgs
	second     cloneArgs
	pidfd      int32
	report     report
	gate       byte
	empty      byte
}

// fork starts the child, and returns its pid.
//
//go:noinline
//go:norace
//go:nocheckptr
func fork(c *child) (int, syscall.Errno) {
	syscall.ForkLock.Lock()
	beforeFork()
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&c.first)), unsafe.Sizeof(c.first), 0) //nolint:gosec // clone3(2)
	if errno == 0 && pid == 0 {
		afterForkInChild()
		run(c)
	}
	afterFork()
	syscall.ForkLock.Unlock()
	return int(pid), errno
}

// run is the child. It waits for a byte from the control socket, so that it can be moved into a cgroup, and enters the namespaces. Only the
// children of a process enter a PID namespace: it starts one, as a child of this program, which executes the program.
//
//go:nosplit
//go:norace
//go:nocheckptr
func run(c *child) {
	// No process of the container may look at this copy of the shim.
	out := c.files[reportFD]
	if _, _, errno := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0); errno != 0 {
		fail(c, out, stepDescriptors, errno)
	}
	for i := range c.files {
		fd, _, errno := unix.RawSyscall(unix.SYS_FCNTL, c.files[i], unix.F_DUPFD_CLOEXEC, childFiles)
		if errno != 0 {
			fail(c, out, stepDescriptors, errno)
		}
		c.files[i] = fd
	}
	out = c.files[reportFD]
	for i := range c.files {
		var flags uintptr
		if i > controlFD {
			flags = unix.O_CLOEXEC
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_DUP3, c.files[i], uintptr(i), flags); errno != 0 {
			fail(c, out, stepDescriptors, errno)
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOSE_RANGE, childFiles, ^uintptr(0)>>32, 0); errno != 0 {
		fail(c, reportFD, stepDescriptors, errno)
	}
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, controlFD, uintptr(unsafe.Pointer(&c.gate)), 1) //nolint:gosec // read(2)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n != 1 {
			exit(1) // the shim has given up, or is gone
		}
		break
	}
	enter(c)
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&c.second)), unsafe.Sizeof(c.second), 0) //nolint:gosec // clone3(2)
	switch {
	case errno != 0:
		fail(c, reportFD, stepFork, errno)
	case pid == 0:
		_, _, errno = unix.RawSyscall6(unix.SYS_EXECVEAT, programFD, uintptr(unsafe.Pointer(&c.empty)), uintptr(unsafe.Pointer(c.argv)), uintptr(unsafe.Pointer(c.envp)), unix.AT_EMPTY_PATH, 0) //nolint:gosec // execveat(2)
		fail(c, reportFD, stepExec, errno)
	}
	c.report = report{stepStarted, int32(pid)}
	unix.RawSyscall(unix.SYS_WRITE, reportFD, uintptr(unsafe.Pointer(&c.report)), uintptr(reportSize)) //nolint:gosec,errcheck // write(2)
	exit(0)
}

// enter enters the namespaces, all at once: the kernel begins with the user namespace, which permits the others.
//
//go:nosplit
//go:norace
func enter(c *child) {
	if _, _, errno := unix.RawSyscall(unix.SYS_SETNS, targetFD, c.namespaces, 0); errno != 0 {
		fail(c, reportFD, stepNamespaces, errno)
	}
	if c.namespaces&unix.CLONE_NEWUSER == 0 {
		return
	}
	// Another user than root has no capability there after an exec.
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESGID, 0, 0, 0)
	}
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESUID, 0, 0, 0)
	}
	if errno != 0 {
		fail(c, reportFD, stepUser, errno)
	}
}

//go:nosplit
//go:norace
func fail(c *child, out uintptr, step int32, errno syscall.Errno) {
	c.report = report{step, int32(errno)}
	unix.RawSyscall(unix.SYS_WRITE, out, uintptr(unsafe.Pointer(&c.report)), uintptr(reportSize)) //nolint:gosec,errcheck // write(2)
	exit(1)
}

//go:nosplit
//go:norace
func exit(code uintptr) {
	for {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, code, 0, 0) //nolint:errcheck // it does not return
	}
}
