package task

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/output"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// phase is how far an execution has come:
//
//	added -> starting -> running -> stopped, when its process has ended
//	             |
//	             +----> stopped: it could not be started
type phase uint8

const (
	added phase = iota
	starting
	running
	stopped
)

// execution is one more process of a container.
type execution struct {
	id                    string
	stdin, stdout, stderr string
	terminal              bool
	request               *wire.Exec
	// done is closed when it is stopped, and the event of that is published.
	done chan struct{}

	mu      sync.Mutex
	phase   phase
	process *process.Process // while running, and after that; nil if there was none
	streams *output.Streams  // the same
	// noInput records that the input was closed: a client may do that before the process runs.
	noInput bool
	code    uint32 // once stopped
	at      time.Time
}

// begin reports that the execution is being started. One that was started before is errdefs.ErrFailedPrecondition.
func (e *execution) begin() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.phase != added {
		return fmt.Errorf("process %s has been started: %w", e.id, errdefs.ErrFailedPrecondition)
	}
	e.phase = starting
	return nil
}

func (e *execution) started(p *process.Process, s *output.Streams) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.phase, e.process, e.streams = running, p, s
	if e.noInput {
		s.CloseInput()
	}
}

func (e *execution) closeInput() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.noInput = true
	if e.streams != nil {
		e.streams.CloseInput()
	}
}

// stop records the end of the execution, and calls publish before it closes done.
func (e *execution) stop(code uint32, at time.Time, publish func()) {
	e.mu.Lock()
	e.phase, e.code, e.at = stopped, code, at
	e.mu.Unlock()
	publish()
	close(e.done)
}

// pid is 0 if there is no process yet.
func (e *execution) pid() uint32 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.process == nil {
		return 0
	}
	return uint32(e.process.Pid())
}

// status returns the state for the Task API, with how it has ended if it has. A process that has ended is stopped at once, so that it is never
// seen to run after its container has ended.
func (e *execution) status() (state task.Status, code uint32, at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.phase == stopped:
		return task.Status_STOPPED, e.code, e.at
	case e.phase == running && e.process.Ended():
		code, at = e.process.Exit()
		return task.Status_STOPPED, code, at
	case e.phase == running:
		return task.Status_RUNNING, 0, time.Time{}
	}
	return task.Status_CREATED, 0, time.Time{}
}

func (e *execution) signal(sig unix.Signal) error {
	e.mu.Lock()
	p := e.process
	phase := e.phase
	e.mu.Unlock()
	switch {
	case p != nil:
		return p.Signal(sig)
	case phase == stopped:
		return os.ErrProcessDone
	}
	return fmt.Errorf("process %s was not started: %w", e.id, errdefs.ErrFailedPrecondition)
}

// output returns the streams; nil if there are none.
func (e *execution) output() *output.Streams {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.streams
}

// release frees all that belongs to an execution that does not run. Safe to repeat.
func (e *execution) release() {
	if s := e.output(); s != nil {
		ctx, cancel := context.WithTimeout(context.Background(), drainTime)
		s.Drained(ctx)
		cancel()
		s.Close()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.process != nil {
		e.process.Close()
	}
}
