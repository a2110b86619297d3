package supervisor

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// chunk is how much is read or written at once.
const chunk = 64 << 10

// maxTail is how much is read after the end of a process: what it has left in its pipes, and not what others write without end.
const maxTail = 1 << 20

// process is a process that an agent has asked for. It is known until it has ended and others have ended after it.
type process struct {
	s        *Supervisor
	pid, uid uint32
	tag      string
	args     []string
	started  uint64
	terminal bool
	// deadline is when it is killed, in nanoseconds of the monotonic clock; zero is never.
	deadline int64
	timedOut bool

	ring    ring
	outputs []*outlet
	// input is where its standard input, or its terminal, is written; nil if it has none.
	input     *inlet
	followers []*conn
	exit      *wire.Exit
	// complete: it has ended, and all that it has written is in the ring. Other processes may still write; tail is how much of that may be waited
	// for.
	complete, finishing bool
	tail                int
	// settled is how many bytes its output takes among those of ended processes.
	settled int
}

// outlet is one of a process's output streams.
type outlet struct {
	p      *process
	stream wire.Stream
	watch  *watch
	// ended: there is nothing left that could write.
	ended bool
}

func (o *outlet) ready(events uint32) {
	if events&unix.EPOLLOUT != 0 {
		o.p.input.write()
	}
	if events&^unix.EPOLLOUT != 0 {
		o.read()
	}
}

// read takes what there is, as far as there is room. It reports whether there is no more for now.
func (o *outlet) read() (empty bool) {
	p := o.p
	if o.ended {
		return true
	}
	room := p.room()
	if room == 0 {
		_ = o.watch.want(o.watch.events &^ unix.EPOLLIN)
		return false
	}
	n, err := unix.Read(o.watch.fd, p.s.scratch[:min(room, chunk)])
	switch {
	case err == unix.EINTR:
		return false
	case err == unix.EAGAIN:
		return true
	case err != nil || n <= 0: // EIO: all others have closed the terminal
		o.ended = true
		if p.terminal {
			_ = o.watch.want(0)
		} else {
			o.watch.close()
		}
		return true
	}
	p.tail -= n
	p.ring.write(o.stream, p.s.scratch[:n])
	p.pump()
	return false
}

// room is how much may be read without a loss for those that follow the process without one.
func (p *process) room() int {
	room := p.ring.limit
	for _, c := range p.followers {
		if !c.lossy {
			room = min(room, p.ring.limit-int(p.ring.end-c.at))
		}
	}
	return max(room, 0)
}

// resume reads on after one that follows has taken something.
func (p *process) resume() {
	for _, o := range p.outputs {
		if !o.ended && o.watch.events&unix.EPOLLIN == 0 {
			_ = o.watch.want(o.watch.events | unix.EPOLLIN)
		}
	}
	if p.exit != nil && !p.complete && !p.finishing {
		p.finish()
	}
}

// pump passes the output on.
func (p *process) pump() {
	for i := 0; i < len(p.followers); {
		c := p.followers[i]
		c.pump()
		if i < len(p.followers) && p.followers[i] == c {
			i++ // it is still there
		}
	}
}

// end records how the process has ended. What it has written before is passed on first.
func (p *process) end(exit *wire.Exit) {
	exit.TimedOut = p.timedOut
	p.exit = exit
	if p.deadline != 0 {
		p.deadline = 0
		p.s.timers--
	}
	p.input.close()
	p.tail = maxTail
	p.finish()
	p.settled = len(p.ring.buf)
	p.s.kept += p.settled
	p.s.ended = append(p.s.ended, p)
	p.s.forget()
}

// finish tells those that follow that the process has ended, once they have all that it has written.
func (p *process) finish() {
	p.finishing = true
	defer func() { p.finishing = false }()
	for _, o := range p.outputs {
		for !o.read() {
			if p.room() == 0 {
				return // until one that follows has taken something
			}
			if p.tail <= 0 {
				break // another process goes on writing
			}
		}
	}
	p.complete = true
	p.pump()
}

// kill kills the process's group, which is its session as well.
func (p *process) kill() { _ = unix.Kill(-int(p.pid), unix.SIGKILL) }

// release frees what belongs to a process that is not known any longer.
func (p *process) release() {
	for len(p.followers) > 0 {
		p.followers[0].close()
	}
	for _, o := range p.outputs {
		o.watch.close()
	}
	p.input.close()
}

func (p *process) describe() *wire.Process {
	return &wire.Process{
		Pid: p.pid, Tag: p.tag, Args: p.args, UID: p.uid, Terminal: p.terminal, Input: p.input.open(), Started: p.started,
		First: p.ring.first, End: p.ring.end, Exit: p.exit,
	}
}

// inlet is where input is written.
type inlet struct {
	p     *process
	watch *watch
	// terminal: the watch is also that of the output, which closes it.
	terminal bool
	// waiting are the connections whose input is not yet written, in order.
	waiting []*conn
	// closing: it is closed when they are done.
	closing bool
}

func (i *inlet) open() bool { return i != nil && i.watch.open() && !i.closing }

func (i *inlet) ready(uint32) { i.write() }

// write writes as much as the process takes.
func (i *inlet) write() {
	for len(i.waiting) > 0 && i.watch.open() {
		c := i.waiting[0]
		n, err := unix.Write(i.watch.fd, c.input)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			i.await(true)
			return
		case err != nil:
			i.fail()
			return
		}
		if c.input = c.input[n:]; len(c.input) == 0 {
			i.waiting = i.waiting[1:]
			c.inputDone(nil)
		}
	}
	i.await(false)
	if i.closing && len(i.waiting) == 0 && i.watch.open() {
		i.shut()
	}
}

// await waits until the process takes more, or not.
func (i *inlet) await(more bool) {
	var events uint32
	if more {
		events = unix.EPOLLOUT
	}
	_ = i.watch.want(i.watch.events&unix.EPOLLIN | events)
}

// fail gives up what waits: the process has closed its input.
func (i *inlet) fail() {
	waiting := i.waiting
	i.waiting = nil
	if !i.terminal {
		i.watch.close()
	}
	for _, c := range waiting {
		c.input = nil
		c.inputDone(errClosed)
	}
}

// shut closes the input after what waits. A terminal gets the character that means the end of the input.
func (i *inlet) shut() {
	if i.terminal {
		_, _ = unix.Write(i.watch.fd, []byte{4})
		return
	}
	i.closing = true
	if len(i.waiting) == 0 {
		i.watch.close()
	}
}

// close gives up all of it.
func (i *inlet) close() {
	if i != nil {
		i.fail()
	}
}

var errClosed = &wire.Failure{Stage: wire.StageProcess, Errno: unix.EPIPE} //nolint:gochecknoglobals // constant
