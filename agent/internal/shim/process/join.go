package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
)

// Join is a process to start in the namespaces of another one.
type Join struct {
	// Target is that process: all its namespaces are entered that are not those of this program.
	Target *Process
	// Program is executed by its descriptor. No process of the container may be able to write to it.
	Program   *os.File
	Args, Env []string
	// Streams are its descriptors 0 to 2, and Control its 3. They stay the caller's.
	Streams [3]*os.File
	Control *os.File
	// Cgroup is the one to start it in; nil for that of this program.
	Cgroup *cgroup.Entrance
}

// Join starts a process in the namespaces of another one. It may be called concurrently. A target that has ended is os.ErrProcessDone.
func (s *Starter) Join(ctx context.Context, j *Join) (*Process, error) {
	p, err := s.join(ctx, j)
	if err != nil && j.Target.ending() {
		err = errors.Join(os.ErrProcessDone, err)
	}
	return p, err
}

func (s *Starter) join(ctx context.Context, j *Join) (_ *Process, err error) {
	namespaces, err := differing(j.Target.Pid())
	if err != nil {
		return nil, fmt.Errorf("finding the namespaces of process %d: %w", j.Target.Pid(), err)
	}
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	c, err := newChild(j.Args, j.Env, j.Cgroup)
	if err != nil {
		_ = out.Close()
		return nil, err
	}
	// The new process is a child of this program, with the exit signal of the one that starts it.
	c.second, c.joins = cloneArgs{flags: unix.CLONE_PARENT}, namespaces
	for _, f := range j.Streams {
		c.files = append(c.files, f.Fd())
	}
	c.program, c.target, c.report = 4, 5, 6
	c.files = append(c.files, j.Control.Fd(), j.Program.Fd(), j.Target.fd.Fd(), out.Fd())
	s.exits.expect()
	defer s.exits.expected()
	_, errno := fork(c)
	_ = out.Close()
	runtime.KeepAlive(j)
	if errno != 0 {
		return nil, fmt.Errorf("forking: %w", errno)
	}
	helper := os.NewFile(uintptr(c.pidfd), "pidfd")
	defer helper.Close()
	started, err := reports(ctx, in)
	if err == nil && started == 0 {
		err = errors.New("starting a process: the child was killed")
	}
	if err != nil {
		_ = unix.PidfdSendSignal(int(helper.Fd()), unix.SIGKILL, nil, 0)
		return nil, err
	}
	return s.exits.adopt(started)
}

// differing returns the namespaces of a process that are not those of this program, as CLONE_NEW*.
func differing(pid int) (uintptr, error) {
	kinds := []struct {
		name string
		flag uintptr
	}{
		{"user", unix.CLONE_NEWUSER}, {"mnt", unix.CLONE_NEWNS}, {"pid", unix.CLONE_NEWPID}, {"uts", unix.CLONE_NEWUTS}, {"ipc", unix.CLONE_NEWIPC},
		{"net", unix.CLONE_NEWNET}, {"cgroup", unix.CLONE_NEWCGROUP}, {"time", unix.CLONE_NEWTIME},
	}
	var flags uintptr
	for _, k := range kinds {
		own, err := os.Readlink(filepath.Join("/proc/self/ns", k.name))
		if errors.Is(err, os.ErrNotExist) {
			continue // the kernel was built without it
		}
		other, otherErr := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "ns", k.name))
		if err := errors.Join(err, otherErr); err != nil {
			return 0, err
		}
		if own != other {
			flags |= k.flag
		}
	}
	return flags, nil
}
