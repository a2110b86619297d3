package process

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
)

// startTime is how long a child may take until its program runs, on a machine without an idle processor.
const startTime = 30 * time.Second

// The hooks of the Go runtime for a fork, as package syscall calls them: no signal arrives and no stack grows between the first and one of the
// others.
//
//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

//go:linkname afterForkInChild syscall.runtime_AfterForkInChild
func afterForkInChild()

// Steps of a child, which it reports with an errno, or with the pid of the process that it has started.
const (
	stepStarted int32 = iota
	stepCgroup
	stepDescriptors
	stepNamespaces
	stepUser
	stepFork
	stepSession
	stepExec
)

var steps = [...]string{"", "entering the cgroup", "passing file descriptors", "entering the namespaces", "becoming root in the user namespace", "forking", "making a session", "executing the program"} //nolint:gochecknoglobals // constant

// cloneArgs is the kernel's struct clone_args.
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// message is what a child writes about a step.
type message struct{ step, value int32 }

const messageSize = int(unsafe.Sizeof(message{}))

// child is a process that is forked from this program, to execute another one or to start one that does. Its memory is a copy, its only thread the
// one that has forked, and so it does nothing but system calls, with values that were prepared before.
type child struct {
	// files become its descriptors from 0 on. The last ones, from program on, are closed when it executes that.
	files                   []uintptr
	program, target, report uintptr // their descriptors; the target is 0 if there is none
	// cgroups are descriptors of files of legacy hierarchies, to which it writes that it enters. A process with one thread does that at once,
	// while the kernel makes one that moves another process wait for all processors (RCU), in each hierarchy.
	cgroups []uintptr
	// joins are the namespaces of the target to enter, unshares those to make in the cgroup, both CLONE_NEW*.
	joins, unshares uintptr
	// users makes it root of the user namespace that it was started in, once a byte has arrived.
	users      bool
	argv, envp *unsafe.Pointer
	first      cloneArgs
	second     cloneArgs
	pidfd      int32
	message    message
	gate       byte
	empty      byte
}

//nolint:gochecknoglobals // constants
var (
	self  = [1]byte{'0'} // is what a thread writes to enter a cgroup
	slash = [2]byte{'/'}
)

// newChild prepares a child with a copy of what it needs: it can allocate no memory.
func newChild(args, env []string, cgroup *cgroup.Entrance) (*child, error) {
	c := &child{pidfd: -1}
	c.first = cloneArgs{flags: unix.CLONE_PIDFD, pidfd: uint64(uintptr(unsafe.Pointer(&c.pidfd))), exitSignal: uint64(unix.SIGCHLD)} //nolint:gosec // clone3(2)
	if cgroup != nil {
		if cgroup.Dir != nil {
			c.first.flags |= unix.CLONE_INTO_CGROUP
			c.first.cgroup = uint64(cgroup.Dir.Fd())
		}
		for _, f := range cgroup.Tasks {
			c.cgroups = append(c.cgroups, f.Fd())
		}
	}
	var err error
	if c.argv, err = pointers(args); err != nil {
		return nil, err
	}
	c.envp, err = pointers(env)
	return c, err
}

func pointers(list []string) (*unsafe.Pointer, error) {
	array := make([]unsafe.Pointer, len(list)+1)
	for i, s := range list {
		p, err := unix.BytePtrFromString(s)
		if err != nil {
			return nil, err
		}
		array[i] = unsafe.Pointer(p) //nolint:gosec // execveat(2)
	}
	return &array[0], nil
}

// reports reads what a child reports until all that have the other end have closed it: the program runs then, or the child was killed.
func reports(ctx context.Context, in *os.File) (started int, err error) {
	stop := context.AfterFunc(ctx, func() { _ = in.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := in.SetReadDeadline(time.Now().Add(startTime)); err != nil {
		return 0, err
	}
	for {
		var raw [messageSize]byte
		if _, readErr := io.ReadFull(in, raw[:]); readErr != nil {
			switch {
			case ctx.Err() != nil:
				return 0, fmt.Errorf("starting a process: %w", ctx.Err())
			case !errors.Is(readErr, io.EOF) && !errors.Is(readErr, unix.ECONNRESET): // the latter if it has not read all
				return 0, fmt.Errorf("starting a process: %w", readErr)
			}
			return started, err
		}
		step, value := int32(binary.NativeEndian.Uint32(raw[:4])), int32(binary.NativeEndian.Uint32(raw[4:]))
		switch {
		case step == stepStarted:
			started = int(value)
		case step > 0 && int(step) < len(steps):
			err = fmt.Errorf("%s: %w", steps[step], syscall.Errno(value))
		}
	}
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

// run is the child.
//
//go:nosplit
//go:norace
//go:nocheckptr
func run(c *child) {
	prepare(c)
	if c.target != 0 {
		startInNamespaces(c)
	}
	if c.unshares != 0 {
		if _, _, errno := unix.RawSyscall(unix.SYS_UNSHARE, c.unshares, 0, 0); errno != 0 {
			fail(c, c.report, stepNamespaces, errno)
		}
	}
	if c.users {
		await(c)
		becomeRoot(c)
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_CHDIR, uintptr(unsafe.Pointer(&slash)), 0, 0) //nolint:gosec // chdir(2)
	}
	if errno != 0 {
		fail(c, c.report, stepSession, errno)
	}
	execute(c)
}

// prepare makes the child a process of its cgroup with its descriptors.
//
//go:nosplit
//go:norace
//go:nocheckptr
func prepare(c *child) {
	out := c.files[c.report]
	// No process of the container may look at this copy of the shim.
	if _, _, errno := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0); errno != 0 {
		fail(c, out, stepDescriptors, errno)
	}
	for _, fd := range c.cgroups {
		if _, _, errno := unix.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&self)), uintptr(len(self))); errno != 0 { //nolint:gosec // write(2)
			fail(c, out, stepCgroup, errno)
		}
	}
	for i := range c.files {
		fd, _, errno := unix.RawSyscall(unix.SYS_FCNTL, c.files[i], unix.F_DUPFD_CLOEXEC, uintptr(len(c.files)))
		if errno != 0 {
			fail(c, out, stepDescriptors, errno)
		}
		c.files[i] = fd
	}
	out = c.files[c.report]
	for i := range c.files {
		var flags uintptr
		if uintptr(i) >= c.program {
			flags = unix.O_CLOEXEC
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_DUP3, c.files[i], uintptr(i), flags); errno != 0 {
			fail(c, out, stepDescriptors, errno)
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOSE_RANGE, uintptr(len(c.files)), ^uintptr(0)>>32, 0); errno != 0 {
		fail(c, c.report, stepDescriptors, errno)
	}
}

// startInNamespaces enters the namespaces of the target, all at once: the kernel begins with the user namespace, which permits the others. Only
// the children of a process enter a PID namespace: it starts one, as a child of this program, which executes the program.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startInNamespaces(c *child) {
	if _, _, errno := unix.RawSyscall(unix.SYS_SETNS, c.target, c.joins, 0); errno != 0 {
		fail(c, c.report, stepNamespaces, errno)
	}
	if c.joins&unix.CLONE_NEWUSER != 0 {
		becomeRoot(c)
	}
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&c.second)), unsafe.Sizeof(c.second), 0) //nolint:gosec // clone3(2)
	switch {
	case errno != 0:
		fail(c, c.report, stepFork, errno)
	case pid == 0:
		execute(c)
	}
	c.message = message{stepStarted, int32(pid)}
	unix.RawSyscall(unix.SYS_WRITE, c.report, uintptr(unsafe.Pointer(&c.message)), uintptr(messageSize)) //nolint:gosec,errcheck // write(2)
	exit(0)
}

// await waits until the user namespace has its ids.
//
//go:nosplit
//go:norace
//go:nocheckptr
func await(c *child) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, c.report, uintptr(unsafe.Pointer(&c.gate)), 1) //nolint:gosec // read(2)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n != 1 {
			exit(1) // the shim has given up, or is gone
		}
		return
	}
}

// becomeRoot makes the child root in its user namespace: another user has no capability there after an exec.
//
//go:nosplit
//go:norace
func becomeRoot(c *child) {
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESGID, 0, 0, 0)
	}
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESUID, 0, 0, 0)
	}
	if errno != 0 {
		fail(c, c.report, stepUser, errno)
	}
}

//go:nosplit
//go:norace
//go:nocheckptr
func execute(c *child) {
	_, _, errno := unix.RawSyscall6(unix.SYS_EXECVEAT, c.program, uintptr(unsafe.Pointer(&c.empty)), uintptr(unsafe.Pointer(c.argv)), uintptr(unsafe.Pointer(c.envp)), unix.AT_EMPTY_PATH, 0) //nolint:gosec // execveat(2)
	fail(c, c.report, stepExec, errno)
}

//go:nosplit
//go:norace
func fail(c *child, out uintptr, step int32, errno syscall.Errno) {
	c.message = message{step, int32(errno)}
	unix.RawSyscall(unix.SYS_WRITE, out, uintptr(unsafe.Pointer(&c.message)), uintptr(messageSize)) //nolint:gosec,errcheck // write(2)
	exit(1)
}

//go:nosplit
//go:norace
func exit(code uintptr) {
	for {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, code, 0, 0) //nolint:errcheck // it does not return
	}
}
