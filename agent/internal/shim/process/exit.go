package process

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// endTime is how long a process that was killed is expected to take until it has ended.
const endTime = 200 * time.Millisecond

// Process is a process that was started.
type Process struct {
	pid  int
	fd   *os.File // stands for the process, also when its pid is another's; nil if it was reaped before it was known
	done chan struct{}

	// Set before done is closed.
	status syscall.WaitStatus
	at     time.Time
}

// Pid returns its id in the PID namespace of this program.
func (p *Process) Pid() int { return p.pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// ending reports whether the process has ended, or is about to: the namespaces of one that was killed can no longer be entered, a moment before
// it has ended.
func (p *Process) ending() bool {
	select {
	case <-p.done:
		return true
	case <-time.After(endTime):
		return false
	}
}

// Exit returns how the process ended, 128 + n for signal n, and when. It is valid after Done is closed.
func (p *Process) Exit() (code uint32, at time.Time) {
	if p.status.Signaled() {
		return 128 + uint32(p.status.Signal()), p.at
	}
	return uint32(p.status.ExitStatus()), p.at
}

// Signal sends a signal to the process. One that has ended is os.ErrProcessDone.
func (p *Process) Signal(sig syscall.Signal) error {
	if p.fd == nil {
		return os.ErrProcessDone
	}
	err := unix.PidfdSendSignal(int(p.fd.Fd()), sig, nil, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EBADF) {
		return os.ErrProcessDone
	}
	return err
}

// Close releases what belongs to a process that has ended.
func (p *Process) Close() {
	if p.fd != nil {
		_ = p.fd.Close()
	}
}

// exits has the processes that run, by pid.
type exits struct {
	signals chan os.Signal

	mu      sync.Mutex
	running map[int]*Process
	// expecting counts those that start a child through another process, and learn its pid later. Until then, early has the children that
	// have ended unknown.
	expecting int
	early     map[int]ended
}

type ended struct {
	status syscall.WaitStatus
	at     time.Time
}

func newExits() *exits {
	e := &exits{signals: make(chan os.Signal, 1), running: map[int]*Process{}, early: map[int]ended{}}
	signal.Notify(e.signals, syscall.SIGCHLD)
	return e
}

// reap waits for children until the program ends.
func (e *exits) reap() {
	for range e.signals {
		for e.reapOne() {
		}
	}
}

// reapOne reports whether there may be another one.
func (e *exits) reapOne() bool {
	// A process that is being started is registered before it can be reaped.
	e.mu.Lock()
	defer e.mu.Unlock()
	var status syscall.WaitStatus
	pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
	if err != nil || pid == 0 {
		return errors.Is(err, syscall.EINTR)
	}
	if p := e.running[pid]; p != nil {
		delete(e.running, pid)
		p.status, p.at = status, time.Now()
		close(p.done)
	} else if _, known := e.early[pid]; e.expecting > 0 && !known {
		e.early[pid] = ended{status, time.Now()}
	}
	return true
}

// expect keeps how unknown children end until expected is called as often.
func (e *exits) expect() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expecting++
}

func (e *exits) expected() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.expecting--; e.expecting == 0 {
		clear(e.early)
	}
}

// adopt returns the process with the pid of a child, which may have ended since the call of expect.
func (e *exits) adopt(pid int) (*Process, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := &Process{pid: pid, done: make(chan struct{})}
	if end, ok := e.early[pid]; ok {
		p.status, p.at = end.status, end.at
		close(p.done)
		return p, nil
	}
	// It is not reaped while the lock is held, so that the pid is still its own.
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("opening process %d: %w", pid, err)
	}
	p.fd = os.NewFile(uintptr(fd), "pidfd")
	e.running[pid] = p
	return p, nil
}
