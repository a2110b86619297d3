// Package supervisor is pid 1 of a sandbox that runs, or a process that has joined one: it starts further processes for agents, keeps their output and how they ended, reaps every
// process of the sandbox, and ends when the sandbox's own process does. It is one thread that waits for descriptors and never for a process of
// the sandbox; a second one waits for children to end. Both exist before anything of the sandbox runs, so that processes that use up all pids of
// a sandbox cannot end it.
//
// It is confined as the sandbox's processes are. Who takes it over has gained nothing, and so agents trust nothing that it says of the node.
// It is linked into sandbox-init, and imports next to nothing.
package supervisor

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

const (
	// maxProcesses is how many processes may run that agents have asked for, and maxEnded of how many that have ended the output and the exit
	// are kept.
	maxProcesses = 512
	maxEnded     = 128
	// maxKept is how many bytes of output of ended processes are kept.
	maxKept = 32 << 20
	// maxConnections is how many connections of agents there may be.
	maxConnections = 1024
	// garbageLimit is after how many allocated bytes unused memory is collected. It is not by itself: the Go runtime could need one more thread
	// for that at any time.
	garbageLimit = 4 << 20
)

// Config is what a supervisor starts with.
type Config struct {
	// Listener is the socket for agents, and Trusted reports whether the peer of a connection to it is one.
	Listener int
	Trusted  func(fd int) bool
	// Shim is the socket to the shim; below zero if there is none.
	Shim int
	// Joined: this process is not pid 1. It has joined a container that runs, whose pid 1 is the sandbox's own process. Again: it is not the first
	// supervisor there, and what others had started is lost.
	Joined, Again bool
	// Reaper waits for children.
	Reaper *Reaper
	// Helper is a descriptor of the program of helpers.
	Helper int
	// Claim has the sandbox's own process, and what others have without asking for anything else.
	Claim *wire.Claim
	// Main is the pid of the sandbox's own process; zero if it has none. Started is when it was started, in nanoseconds of the Unix time.
	Main    int
	Started uint64
}

// Supervisor is the state of a running sandbox.
type Supervisor struct {
	config    Config
	poll      *poller
	listener  *watch
	shim      *watch
	shimIn    []byte
	reaper    *watch
	processes map[uint32]*process
	helpers   map[string]*helper // by user
	ended     []*process         // in the order of their ends
	kept      int                // bytes of their output
	conns     int
	timers    int // processes with a deadline
	scratch   []byte
	// ending is the signal that ends a sandbox without a process of its own, once all others have ended.
	ending unix.Signal
	code   int
	done   bool
}

// Run supervises the sandbox. It returns when the sandbox's own process has ended, with the exit code of the sandbox, or if it cannot go on.
func Run(c Config) (code int, err error) {
	s := &Supervisor{config: c, processes: map[uint32]*process{}, helpers: map[string]*helper{}, scratch: make([]byte, chunk)}
	if s.poll, err = newPoller(); err != nil {
		return 0, err
	}
	if s.listener, err = s.poll.add(c.Listener, unix.EPOLLIN, accepting{s}); err != nil {
		return 0, err
	}
	if c.Shim >= 0 {
		if s.shim, err = s.poll.add(c.Shim, unix.EPOLLIN, shimming{s}); err != nil {
			return 0, err
		}
	}
	if s.reaper, err = s.poll.add(c.Reaper.ended, unix.EPOLLIN, reaping{s}); err != nil {
		return 0, err
	}
	c.Reaper.Started()
	garbage := newCollector()
	for !s.done {
		if err := s.poll.wait(s.expire()); err != nil {
			return 0, err
		}
		garbage.collect()
	}
	return s.code, nil
}

// accepting takes connections of agents.
type accepting struct{ *Supervisor }

func (s accepting) ready(uint32) {
	for {
		fd, _, err := unix.Accept4(s.listener.fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		if err != nil {
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) {
				continue
			}
			return // also without descriptors: the connection waits until one is free
		}
		if s.conns >= maxConnections || !s.config.Trusted(fd) {
			_ = unix.Close(fd)
			continue
		}
		c := &conn{s: s.Supervisor}
		if c.watch, err = s.poll.add(fd, unix.EPOLLIN, c); err == nil {
			s.conns++
		}
	}
}

// shimming reads the signals that the shim is asked to send to the container.
type shimming struct{ *Supervisor }

func (s shimming) ready(uint32) {
	var b [64]byte
	n, err := unix.Read(s.shim.fd, b[:])
	if err == unix.EAGAIN || err == unix.EINTR {
		return
	}
	if err != nil || n <= 0 {
		s.shim.close() // the shim has ended
		return
	}
	s.shimIn = append(s.shimIn, b[:n]...)
	for {
		kind, payload, rest, err := nextFrame(s.shimIn)
		if err != nil {
			s.shim.close()
			return
		}
		if rest == nil {
			return
		}
		s.shimIn = append(s.shimIn[:0], rest...)
		if r, err := wire.DecodeRequest(payload); err == nil && kind == wire.TypeSignalMain {
			s.signalMain(unix.Signal(r.Signal))
		}
	}
}

// signalMain passes a signal on to the sandbox's own process. Without one, a signal that would end a process ends all.
func (s *Supervisor) signalMain(sig unix.Signal) {
	if s.config.Main != 0 {
		_ = unix.Kill(s.config.Main, sig)
		return
	}
	switch sig {
	case unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP:
		s.ending = sig
		_ = unix.Kill(-1, unix.SIGTERM)
		s.endIfEmpty()
	}
}

// endIfEmpty ends a sandbox that is to end when it has no process left.
func (s *Supervisor) endIfEmpty() {
	if s.ending != 0 && unix.Kill(-1, 0) == unix.ESRCH {
		s.done, s.code = true, 128+int(s.ending)
	}
}

// expire kills what has run for too long, and returns in how many milliseconds it is to be called again.
func (s *Supervisor) expire() int {
	if s.timers == 0 {
		return -1
	}
	now, next := monotonic(), int64(-1)
	for _, p := range s.processes {
		if p.deadline == 0 || p.exit != nil {
			continue
		}
		if p.deadline <= now {
			p.timedOut, p.deadline = true, 0
			s.timers--
			p.kill()
			continue
		}
		if left := p.deadline - now; next < 0 || left < next {
			next = left
		}
	}
	if next < 0 {
		return -1
	}
	return int(min(next/1e6+1, 1<<30))
}

// find returns a process that agents have asked for.
func (s *Supervisor) find(t wire.Target) *process {
	if t.Tag == "" {
		return s.processes[t.Pid]
	}
	var found *process
	for _, p := range s.processes { // of several with the tag, the last one
		if p.tag == t.Tag && (found == nil || p.started > found.started) {
			found = p
		}
	}
	return found
}

// list describes all processes that are known, the sandbox's own one first.
func (s *Supervisor) list() []*wire.Process {
	var list []*wire.Process
	if c := s.config; c.Main != 0 {
		list = append(list, &wire.Process{Pid: uint32(c.Main), Tag: wire.MainTag, Args: c.Claim.Args, UID: c.Claim.UID, Started: c.Started})
	}
	for _, p := range s.processes {
		list = append(list, p.describe())
	}
	return list
}

// forget makes room for what has ended last.
func (s *Supervisor) forget() {
	for len(s.ended) > maxEnded || s.kept > maxKept && len(s.ended) > 1 {
		p := s.ended[0]
		s.ended = append(s.ended[:0], s.ended[1:]...)
		p.release()
		s.kept -= p.settled
		delete(s.processes, p.pid)
	}
}

func monotonic() int64 { return clock(unix.CLOCK_MONOTONIC) }

func now() uint64 { return uint64(clock(unix.CLOCK_REALTIME)) }

func clock(id int32) int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(id, &t)
	return t.Nano()
}
