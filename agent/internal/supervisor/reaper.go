package supervisor

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// Reaper is a thread that waits for children to end. It leaves them to the supervisor to reap: until that has, their pids are theirs.
type Reaper struct {
	// ended is readable when a child has ended. more wakes the thread when there may be another child.
	ended, more int
}

// NewReaper starts a reaper, while there are no processes that could keep it from getting a thread. It also makes the thread that the Go runtime
// needs to collect unused memory, and that would be created only then. It uses the two descriptors.
func NewReaper(ended, more int) (*Reaper, error) {
	r := &Reaper{ended, more}
	if err := eventfd(ended, unix.EFD_NONBLOCK); err != nil {
		return nil, err
	}
	if err := eventfd(more, 0); err != nil {
		return nil, err
	}
	spare, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	waiting, spared := make(chan struct{}), make(chan struct{})
	go func() {
		waiting <- struct{}{}
		r.run()
	}()
	<-waiting
	go func() {
		waiting <- struct{}{}
		drain(spare)
		close(spared)
	}()
	<-waiting
	raise(spare)
	<-spared
	_ = unix.Close(spare)
	return r, nil
}

func eventfd(as, flags int) error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
	if err != nil || fd == as {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.Dup3(fd, as, unix.O_CLOEXEC)
}

// Started is called after a child was started.
func (r *Reaper) Started() { raise(r.more) }

func (r *Reaper) run() {
	var info [128]byte
	for {
		drain(r.more)
		for {
			_, _, errno := unix.Syscall6(unix.SYS_WAITID, unix.P_ALL, 0, uintptr(unsafe.Pointer(&info[0])), unix.WEXITED|unix.WNOWAIT, 0, 0) //nolint:gosec // waitid(2)
			if errno == unix.EINTR {
				continue
			}
			if errno == 0 {
				raise(r.ended)
			}
			break // until those that have ended are reaped, or there are any
		}
	}
}

func raise(eventfd int) {
	one := [8]byte{1}
	_, _ = unix.Write(eventfd, one[:]) // it would block only if it was never read
}

// drain waits for raise.
func drain(eventfd int) {
	var b [8]byte
	for {
		if _, err := unix.Read(eventfd, b[:]); err != unix.EINTR {
			return
		}
	}
}

// reaping reaps all children that have ended.
type reaping struct{ *Supervisor }

func (s reaping) ready(uint32) {
	drain(s.config.Reaper.ended)
	for {
		var status unix.WaitStatus
		var usage unix.Rusage
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, &usage)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			break
		}
		s.reaped(pid, status, &usage)
	}
	s.config.Reaper.Started()
}

func (s *Supervisor) reaped(pid int, status unix.WaitStatus, usage *unix.Rusage) {
	exit := &wire.Exit{
		Code: uint32(status.ExitStatus()), At: now(),
		User: uint64(usage.Utime.Nano() / 1e3), System: uint64(usage.Stime.Nano() / 1e3), MaxRSS: uint64(usage.Maxrss) << 10,
	}
	if status.Signaled() {
		exit.Signal = uint32(status.Signal())
		exit.Code = 128 + exit.Signal
	}
	if pid == s.config.Main {
		s.done, s.code = true, int(exit.Code)
		return
	}
	if p := s.processes[uint32(pid)]; p != nil && p.exit == nil {
		p.end(exit)
	} else {
		s.helperEnded(pid)
	}
	s.endIfEmpty()
}
