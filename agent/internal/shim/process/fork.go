// Package process starts the processes of containers, and reports how they end. A Starter is for the whole program, because the kernel reports
// the end of children to the program.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// Spec is a process to start.
type Spec struct {
	// Path of the program, its arguments and environment.
	Path string
	Args []string
	Env  []string
	// Files are its descriptors from 0 on. They stay the caller's.
	Files []*os.File
	// Flags are CLONE_NEW* for namespaces of its own.
	Flags uintptr
	// Network is the path of the network namespace to start it in; empty for that of this program.
	Network string
	// InNetwork, if set, runs in that namespace before the process starts. What it opens follows Files.
	InNetwork func() (*os.File, error)
	// FirstID is the first user and group id of the range of a user namespace of its own, in which it is root; zero for none.
	FirstID uint32
	// Cgroup is the directory of a cgroup of the unified hierarchy to start it in; nil for none.
	Cgroup *os.File
}

// Starter starts processes, one after another, from one thread.
type Starter struct {
	requests chan request
	exits    *exits
}

type request struct {
	spec  *Spec
	reply chan<- reply
}

type reply struct {
	process *Process
	err     error
}

// NewStarter returns a Starter. Its thread runs until the program ends. No other part of the program may wait for children, and the
// program ignores no signal from now on.
func NewStarter() (*Starter, error) {
	if err := stopIgnoring(); err != nil {
		return nil, err
	}
	s := &Starter{requests: make(chan request), exits: newExits()}
	go s.run()
	go s.exits.reap()
	return s, nil
}

// Start starts a process.
func (s *Starter) Start(ctx context.Context, spec *Spec) (*Process, error) {
	answer := make(chan reply, 1)
	select {
	case s.requests <- request{spec, answer}:
	case <-ctx.Done():
		return nil, fmt.Errorf("starting %s: %w", spec.Path, ctx.Err())
	}
	r := <-answer // it has begun, so that it has to be known
	return r.process, r.err
}

func (s *Starter) run() {
	runtime.LockOSThread()
	own, err := os.Open("/proc/thread-self/ns/net")
	for r := range s.requests {
		if err != nil {
			r.reply <- reply{nil, fmt.Errorf("opening the network namespace of this program: %w", err)}
			continue
		}
		p, startErr := s.fork(r.spec, own)
		r.reply <- reply{p, startErr}
	}
}

func (s *Starter) fork(spec *Spec, own *os.File) (*Process, error) {
	attr := &syscall.ProcAttr{Dir: "/", Env: spec.Env, Sys: &syscall.SysProcAttr{Cloneflags: spec.Flags, Setsid: true}}
	for _, f := range spec.Files {
		attr.Files = append(attr.Files, f.Fd())
	}
	if spec.Cgroup != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(spec.Cgroup.Fd())
	}
	if spec.Network != "" {
		leave, err := enterNetwork(spec.Network, own)
		if err != nil {
			return nil, fmt.Errorf("entering network namespace %s: %w", spec.Network, err)
		}
		defer leave()
	}
	if spec.InNetwork != nil {
		f, err := spec.InNetwork()
		if err != nil {
			return nil, err
		}
		defer f.Close()
		attr.Files = append(attr.Files, f.Fd())
	}
	if spec.FirstID != 0 {
		mapUsers(attr.Sys, spec.FirstID)
		restore, err := become(spec.FirstID)
		if err != nil {
			return nil, fmt.Errorf("becoming the owner of a user namespace: %w", err)
		}
		defer restore()
	}
	// The program is executed by its descriptor: the process may not be allowed to search the directories that it is in.
	program, err := os.OpenFile(spec.Path, unix.O_PATH, 0)
	if err != nil {
		return nil, fmt.Errorf("starting a process: %w", err)
	}
	defer program.Close()
	path := "/proc/self/fd/" + strconv.Itoa(len(attr.Files))
	attr.Files = append(attr.Files, program.Fd())
	// The exit is registered before it can be reaped.
	s.exits.mu.Lock()
	defer s.exits.mu.Unlock()
	pid, err := syscall.ForkExec(path, spec.Args, attr)
	runtime.KeepAlive(spec)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Path, err)
	}
	// The kernel could open it while it starts the process. But if it fails to, Go 1.26 leaves the pipe open through which a process waits for its
	// user namespace: a shim at its limit of open files would lose two with each attempt.
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL) // it is not reaped while the lock is held
		return nil, fmt.Errorf("opening process %d: %w", pid, err)
	}
	p := &Process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd"), done: make(chan struct{})}
	s.exits.running[pid] = p
	return p, nil
}

// mapUsers gives a process a user namespace, in which it is root.
func mapUsers(sys *syscall.SysProcAttr, first uint32) {
	ids := []syscall.SysProcIDMap{{HostID: int(first), Size: idrange.Size}}
	sys.Cloneflags |= unix.CLONE_NEWUSER
	sys.UidMappings, sys.GidMappings, sys.GidMappingsEnableSetgroups = ids, ids, true
	sys.Credential = &syscall.Credential{} // root's, without the host's groups
}

// become makes a user the effective one of this thread, which keeps its capabilities, until restore is called. That user owns the user
// namespace then: the kernel counts what its processes have, such as inotify instances, for its owner as well.
func become(id uint32) (restore func(), err error) {
	const keep = ^uintptr(0)
	set := func(bits, effective uintptr) error {
		if _, _, errno := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, bits, 0); errno != 0 {
			return errno
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, effective, keep); errno != 0 {
			return errno
		}
		return nil
	}
	const noFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP
	restore = func() {
		err := set(noFixup, 0)
		if err == nil {
			err = set(0, keep)
		}
		if err != nil {
			// Nothing may ever be started as this user by mistake.
			panic(errors.Join(errors.New("leaving a user"), err))
		}
	}
	if err := set(noFixup, uintptr(id)); err != nil {
		restore()
		return nil, err
	}
	return restore, nil
}

// enterNetwork moves this thread into a network namespace until leave is called.
func enterNetwork(path string, own *os.File) (leave func(), err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, err
	}
	return func() {
		if err := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); err != nil {
			// Nothing may ever be started in the network of one container by mistake.
			panic(errors.Join(errors.New("leaving a network namespace"), err))
		}
	}, nil
}
