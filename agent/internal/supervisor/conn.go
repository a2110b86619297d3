package supervisor

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// conn is a connection of an agent. Its requests are answered in order; it is not read while one of them waits.
type conn struct {
	s     *Supervisor
	watch *watch
	// in is what has arrived of a request, out what is not sent yet of answers.
	in, out []byte
	// buffer is reused for output.
	buffer []byte
	// input is what is not written yet of the current request; waiting: that is not answered.
	input   []byte
	waiting bool
	// ended: the agent sends nothing more.
	ended bool

	// follows is the process whose output it gets, from at on.
	follows *process
	at      uint64
	lossy   bool
	// kills is killed when the connection ends before it.
	kills *process
}

func (c *conn) ready(events uint32) {
	if events&unix.EPOLLOUT != 0 {
		c.pump()
	}
	if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		c.close() // the agent is gone
		return
	}
	if events&unix.EPOLLIN != 0 && c.watch.open() {
		c.receive()
	}
}

// receive reads once, and serves the requests that are complete.
func (c *conn) receive() {
	n, err := unix.Read(c.watch.fd, c.s.scratch)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return
	case err != nil:
		c.close()
		return
	case n == 0:
		c.ended = true
		c.settle()
		return
	}
	c.in = append(c.in, c.s.scratch[:n]...)
	c.serve()
}

// serve serves the requests that have arrived.
func (c *conn) serve() {
	for !c.waiting && c.watch.open() {
		kind, payload, rest, err := nextFrame(c.in)
		if err != nil {
			c.close()
			return
		}
		if rest == nil {
			break
		}
		c.in = append(c.in[:0], rest...)
		c.request(kind, payload)
	}
	c.settle()
}

// nextFrame returns the first frame of what has arrived, and what follows it. rest is nil if the frame is not complete.
func nextFrame(b []byte) (kind wire.Type, payload string, rest []byte, err error) {
	if len(b) < wire.HeaderSize {
		return 0, "", nil, nil
	}
	kind, n, err := wire.ParseHeader([wire.HeaderSize]byte(b))
	if err != nil || len(b) < wire.HeaderSize+n {
		return 0, "", nil, err
	}
	end := wire.HeaderSize + n
	return kind, string(b[wire.HeaderSize:end]), b[end:len(b):len(b)], nil
}

// settle decides what the connection waits for, and closes it when there is nothing left to do.
func (c *conn) settle() {
	if !c.watch.open() {
		return
	}
	if c.ended && !c.waiting && c.follows == nil && len(c.out) == 0 {
		c.close()
		return
	}
	var events uint32
	if !c.ended && !c.waiting {
		events |= unix.EPOLLIN
	}
	if len(c.out) > 0 {
		events |= unix.EPOLLOUT
	}
	if events == 0 {
		events = unix.EPOLLHUP // which is reported in any case, but not without any events
	}
	_ = c.watch.want(events)
}

func (c *conn) request(kind wire.Type, payload string) {
	switch kind {
	case wire.TypeStart:
		c.start(payload)
		return
	case wire.TypeFollow:
		c.follow(payload)
		return
	case wire.TypeList:
		c.answer(wire.TypeProcesses, wire.EncodeProcesses(c.s.list()...))
		return
	case wire.TypeInput, wire.TypeCloseInput, wire.TypeSignal, wire.TypeResize, wire.TypeOpen:
	default:
		c.fail(&wire.Failure{Stage: wire.StageClaim, Errno: unix.ENOSYS, Detail: "(a request of a later version)"})
		return
	}
	r, err := wire.DecodeRequest(payload)
	if err != nil {
		c.refuse(err)
		return
	}
	if kind == wire.TypeOpen {
		c.open(r.Data)
		return
	}
	if kind == wire.TypeSignal && (r.Target.Tag == wire.MainTag || r.Target.Tag == "" && int(r.Target.Pid) == c.s.config.Main && r.Target.Pid != 0) {
		c.result(c.s.signalOwn(r))
		return
	}
	p := c.follows
	if p == nil || r.Target != (wire.Target{}) {
		p = c.s.find(r.Target)
	}
	if p == nil {
		c.fail(c.s.unknown())
		return
	}
	switch kind {
	case wire.TypeInput:
		c.send(p, r.Data)
	case wire.TypeCloseInput:
		if p.input.open() {
			p.input.shut()
		}
		c.result(nil)
	case wire.TypeSignal:
		if p.exit != nil && !r.Group { // others of its group may run on, and keep its pid from another process
			c.fail(&wire.Failure{Stage: wire.StageProcess, Errno: unix.ESRCH, Detail: wire.DetailEnded})
			return
		}
		c.result(signal(int(p.pid), r))
	case wire.TypeResize:
		c.result(p.resize(r.Terminal))
	}
}

// send passes input on to a process.
func (c *conn) send(p *process, data string) {
	if !p.input.open() {
		f := &wire.Failure{Stage: wire.StageProcess, Errno: unix.EPIPE}
		if p.exit != nil {
			f.Detail = wire.DetailEnded
		}
		c.fail(f)
		return
	}
	if data == "" {
		c.result(nil)
		return
	}
	c.input, c.waiting = []byte(data), true
	p.input.waiting = append(p.input.waiting, c)
	if len(p.input.waiting) == 1 {
		p.input.write()
	}
}

// inputDone answers a request whose input is written, or could not be.
func (c *conn) inputDone(f *wire.Failure) {
	c.waiting = false
	c.result(f)
	c.serve()
}

// start starts a process and follows it.
func (c *conn) start(payload string) {
	if c.follows != nil {
		c.fail(errFollows)
		return
	}
	r, err := wire.DecodeStart(payload)
	if err != nil {
		c.refuse(err)
		return
	}
	p, failure := c.s.start(r)
	if failure != nil {
		c.fail(failure)
		return
	}
	if r.Kill {
		c.kills = p
	}
	c.followFrom(p, 0, r.Lossy)
}

func (c *conn) follow(payload string) {
	if c.follows != nil {
		c.fail(errFollows)
		return
	}
	r, err := wire.DecodeFollow(payload)
	if err != nil {
		c.refuse(err)
		return
	}
	p := c.s.find(r.Target)
	if p == nil {
		c.fail(c.s.unknown())
		return
	}
	c.followFrom(p, min(max(r.From, p.ring.first), p.ring.end), r.Lossy)
}

var errFollows = &wire.Failure{Stage: wire.StageProcess, Errno: unix.EBUSY} //nolint:gochecknoglobals // constant

func (c *conn) followFrom(p *process, at uint64, lossy bool) {
	c.follows, c.at, c.lossy = p, at, lossy
	p.followers = append(p.followers, c)
	c.out = append(c.out, wire.Frame(wire.TypeStarted, wire.EncodeProcesses(p.describe()))...)
	c.pump()
}

// result answers a request. Those that came with what follows a process are not answered.
func (c *conn) result(f *wire.Failure) {
	if f != nil {
		c.fail(f)
		return
	}
	c.answer(wire.TypeDone, nil)
}

func (c *conn) refuse(err error) {
	f, ok := err.(*wire.Failure) //nolint:errorlint // package wire returns nothing else
	if !ok {
		f = &wire.Failure{Stage: wire.StageClaim, Detail: err.Error()}
	}
	c.fail(f)
}

func (c *conn) fail(f *wire.Failure) { c.answer(wire.TypeFailure, wire.EncodeFailure(f)) }

func (c *conn) answer(kind wire.Type, payload []byte) {
	if c.follows != nil {
		return
	}
	c.out = append(c.out, wire.Frame(kind, payload)...)
	c.pump()
}

// pump sends what there is to send, until the agent takes no more.
func (c *conn) pump() {
	before := c.at
	p := c.follows
	for c.flush() && c.fill() {
	}
	c.settle()
	if p != nil && c.at != before {
		p.resume()
	}
}

// flush reports whether all of out is sent.
func (c *conn) flush() bool {
	for len(c.out) > 0 && c.watch.open() {
		n, err := unix.SendmsgN(c.watch.fd, c.out, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return false
		case err != nil:
			c.close()
			return false
		default:
			c.out = c.out[n:]
		}
	}
	c.out = nil
	return c.watch.open()
}

// fill puts the next output, or the end of the process, into out. It reports whether there is any.
func (c *conn) fill() bool {
	p := c.follows
	if p == nil {
		return false
	}
	c.at = max(c.at, p.ring.first) // what is not kept any longer is lost
	stream, data := p.ring.next(c.at, chunk)
	switch {
	case len(data) > 0:
		c.buffer = append(wire.AppendOutput(c.buffer[:0], stream, c.at, len(data)), data...)
		c.out = c.buffer
		c.at += uint64(len(data))
		return true
	case p.complete:
		c.leave()
		c.out = wire.Frame(wire.TypeEnded, wire.EncodeExit(p.exit))
		return true
	}
	return false
}

// leave ends following.
func (c *conn) leave() {
	p := c.follows
	if p == nil {
		return
	}
	c.follows = nil
	if i := slices.Index(p.followers, c); i >= 0 {
		p.followers = slices.Delete(p.followers, i, i+1)
	}
}

// close ends the connection. Safe to repeat.
func (c *conn) close() {
	if !c.watch.open() {
		return
	}
	c.watch.close()
	c.s.conns--
	if c.kills != nil && c.kills.exit == nil {
		c.kills.kill()
	}
	p := c.follows
	c.leave()
	for _, q := range c.s.processes {
		if q.input != nil {
			q.input.waiting = slices.DeleteFunc(q.input.waiting, func(w *conn) bool { return w == c })
		}
	}
	if p != nil {
		p.resume() // it does not wait for this one any longer
	}
}
