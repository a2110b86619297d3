// Package process starts the processes of containers, and reports how they end. A Starter is for the whole program, because the kernel reports
// the end of children to the program.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
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
	// Cgroup is the one to start it in; nil for that of this program.
	Cgroup *cgroup.Entrance
}

// Starter starts processes, one after another, from one thread.
type Starter struct {
	requests chan request
	exits    *exits
}

type request struct {
	ctx   context.Context //nolint:containedctx // of the call
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
	case s.requests <- request{ctx, spec, answer}:
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
		p, startErr := s.start(r.ctx, r.spec, own)
		r.reply <- reply{p, startErr}
	}
}

// start starts a process from this thread.
func (s *Starter) start(ctx context.Context, spec *Spec, own *os.File) (*Process, error) {
	files := spec.Files
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
		files = append(slices.Clone(files), f)
	}
	// The program is executed by its descriptor: the process may not be allowed to search the directories that it is in.
	program, err := os.OpenFile(spec.Path, unix.O_PATH, 0)
	if err != nil {
		return nil, fmt.Errorf("starting a process: %w", err)
	}
	defer program.Close()
	local, remote, err := Socketpair()
	if err != nil {
		return nil, err
	}
	defer local.Close()
	c, err := newChild(spec.Args, spec.Env, spec.Cgroup)
	if err != nil {
		_ = remote.Close()
		return nil, err
	}
	// The root of a cgroup namespace is the cgroup in which it is made.
	c.first.flags |= uint64(spec.Flags &^ unix.CLONE_NEWCGROUP)
	c.unshares = spec.Flags & unix.CLONE_NEWCGROUP
	for _, f := range append(slices.Clone(files), program, remote) {
		c.files = append(c.files, f.Fd())
	}
	c.program, c.report = uintptr(len(files)), uintptr(len(files)+1)
	p, err := s.fork(c, spec.FirstID)
	_ = remote.Close()
	runtime.KeepAlive(spec)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Path, err)
	}
	if err := p.await(ctx, local, spec.FirstID); err != nil {
		p.end()
		return nil, fmt.Errorf("starting %s: %w", spec.Path, err)
	}
	return p, nil
}

// fork starts a child, with a user namespace that belongs to its root unless firstID is 0.
func (s *Starter) fork(c *child, firstID uint32) (*Process, error) {
	if firstID != 0 {
		c.first.flags |= unix.CLONE_NEWUSER
		c.users = true
		restore, err := become(firstID)
		if err != nil {
			return nil, fmt.Errorf("becoming the owner of a user namespace: %w", err)
		}
		defer restore()
	}
	// It is registered before it can be reaped.
	s.exits.mu.Lock()
	defer s.exits.mu.Unlock()
	pid, errno := fork(c)
	if errno != 0 {
		return nil, fmt.Errorf("forking: %w", errno)
	}
	p := &Process{pid: pid, fd: os.NewFile(uintptr(c.pidfd), "pidfd"), done: make(chan struct{})}
	s.exits.running[pid] = p
	return p, nil
}

// await waits until the program of a child runs. A user namespace gets its ids first.
func (p *Process) await(ctx context.Context, report *os.File, firstID uint32) error {
	var failure error
	if firstID != 0 {
		failure = p.mapIDs(report, firstID)
	}
	killed := false
	if failure != nil {
		killed = p.ending()
		p.end()
	}
	// What the child has reported says more than that it is gone.
	if _, err := reports(ctx, report); err != nil {
		return err
	}
	if killed {
		failure = errors.Join(os.ErrProcessDone, failure)
	}
	return failure
}

// mapIDs gives the user namespace of a child its ids, and lets the child continue.
func (p *Process) mapIDs(report *os.File, firstID uint32) error {
	ids := fmt.Appendf(nil, "0 %d %d", firstID, idrange.Size)
	for _, kind := range []string{"uid_map", "gid_map"} {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", p.pid, kind), ids, 0); err != nil {
			return fmt.Errorf("mapping the ids of a user namespace: %w", err)
		}
	}
	if _, err := report.Write([]byte{0}); err != nil {
		return fmt.Errorf("mapping the ids of a user namespace: %w", err)
	}
	return nil
}

// end kills the process and releases what belongs to it. Safe to repeat.
func (p *Process) end() {
	_ = p.Signal(unix.SIGKILL)
	<-p.Done()
	p.Close()
}

// Socketpair returns two connected sockets, of which local is for this program.
func Socketpair() (local, remote *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket"), nil
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
