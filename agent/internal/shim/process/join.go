package process

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// joinTime is how long a child may take to enter namespaces, on a machine without an idle processor.
const joinTime = 30 * time.Second

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
	// Gate is the other end of Control. A byte is written to it once the process is in its cgroup.
	Gate io.Writer
	// Cgroup is the directory of a cgroup of the unified hierarchy to start it in; nil to call Attach instead.
	Cgroup *os.File
	// Attach moves a process into its cgroup.
	Attach func(pid int) error
}

// Join starts a process in the namespaces of another one. It may be called concurrently. A target that has ended is os.ErrProcessDone.
func (s *Starter) Join(ctx context.Context, j *Join) (*Process, error) {
	p, err := s.join(ctx, j)
	if err != nil && j.Target.Ended() {
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
	c, err := newChild(j, namespaces, out)
	if err != nil {
		_ = out.Close()
		return nil, err
	}
	s.exits.expect()
	defer s.exits.expected()
	pid, errno := fork(c)
	_ = out.Close()
	runtime.KeepAlive(j)
	if errno != 0 {
		return nil, fmt.Errorf("forking: %w", errno)
	}
	helper := os.NewFile(uintptr(c.pidfd), "pidfd")
	defer helper.Close()
	defer func() {
		if err != nil {
			_ = unix.PidfdSendSignal(int(helper.Fd()), unix.SIGKILL, nil, 0)
		}
	}()
	if j.Cgroup == nil {
		if err := j.Attach(pid); err != nil {
			return nil, err
		}
	}
	if _, err := j.Gate.Write([]byte{0}); err != nil {
		return nil, fmt.Errorf("starting a process in its cgroup: %w", err)
	}
	started, err := await(ctx, in)
	if err != nil {
		return nil, err
	}
	return s.exits.adopt(started)
}

// newChild prepares what the child needs: it can allocate no memory.
func newChild(j *Join, namespaces uintptr, out *os.File) (*child, error) {
	c := &child{namespaces: namespaces, pidfd: -1}
	c.first = cloneArgs{flags: unix.CLONE_PIDFD, pidfd: uint64(uintptr(unsafe.Pointer(&c.pidfd))), exitSignal: uint64(unix.SIGCHLD)} //nolint:gosec // clone3(2)
	if j.Cgroup != nil {
		c.first.flags |= unix.CLONE_INTO_CGROUP
		c.first.cgroup = uint64(j.Cgroup.Fd())
	}
	// The new process is a child of this program, with the exit signal of the one that starts it.
	c.second = cloneArgs{flags: unix.CLONE_PARENT}
	for i, f := range j.Streams {
		c.files[i] = f.Fd()
	}
	c.files[controlFD], c.files[programFD], c.files[targetFD], c.files[reportFD] = j.Control.Fd(), j.Program.Fd(), j.Target.fd.Fd(), out.Fd()
	argv, err := pointers(j.Args)
	if err != nil {
		return nil, err
	}
	envp, err := pointers(j.Env)
	if err != nil {
		return nil, err
	}
	c.argv, c.envp = argv, envp
	return c, nil
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

// await reads the reports of a child until it and the process that it has started have closed their end: the program runs then.
func await(ctx context.Context, in *os.File) (int, error) {
	stop := context.AfterFunc(ctx, func() { _ = in.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := in.SetReadDeadline(time.Now().Add(joinTime)); err != nil {
		return 0, err
	}
	pid, failure := 0, error(nil)
	for {
		var raw [reportSize]byte
		if _, err := io.ReadFull(in, raw[:]); err != nil {
			switch {
			case ctx.Err() != nil:
				return 0, fmt.Errorf("entering namespaces: %w", ctx.Err())
			case !errors.Is(err, io.EOF):
				return 0, fmt.Errorf("entering namespaces: %w", err)
			case failure == nil && pid == 0:
				failure = errors.New("entering namespaces: the child was killed")
			}
			return pid, failure
		}
		step, value := int32(binary.NativeEndian.Uint32(raw[:4])), int32(binary.NativeEndian.Uint32(raw[4:]))
		switch {
		case step == stepStarted:
			pid = int(value)
		case step > 0 && int(step) < len(steps):
			failure = fmt.Errorf("%s: %w", steps[step], syscall.Errno(value))
		}
	}
}
