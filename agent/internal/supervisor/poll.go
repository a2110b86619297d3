package supervisor

import "golang.org/x/sys/unix"

// source is what has a file descriptor in a poller.
type source interface {
	// ready is called with EPOLL* when the descriptor is.
	ready(events uint32)
}

// poller is an epoll(7) instance. Events name their source by a number that is never used again, so that none reaches another source that has
// got the same descriptor.
type poller struct {
	fd      int
	sources map[int32]source
	last    int32
	events  [32]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &poller{fd: fd, sources: map[int32]source{}}, nil
}

// wait waits at most so many milliseconds, or without end if that is negative, and calls the sources that are ready.
func (p *poller) wait(millis int) error {
	n, err := unix.EpollWait(p.fd, p.events[:], millis)
	if err != nil && err != unix.EINTR {
		return err
	}
	for i := range max(n, 0) {
		// A source that another one has closed meanwhile is not there.
		if s := p.sources[p.events[i].Fd]; s != nil {
			s.ready(p.events[i].Events)
		}
	}
	return nil
}

// watch is a descriptor in a poller. It owns the descriptor.
type watch struct {
	poll  *poller
	fd    int
	token int32
	// events are those that are waited for. Without any the descriptor is not in the epoll instance: the kernel reports the end of the other
	// side in any case, again and again.
	events uint32
}

// take makes a descriptor non-blocking and adds it. After an error it is closed.
func (p *poller) take(fd int, events uint32, s source) (*watch, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return p.add(fd, events, s)
}

// add takes a descriptor, which does not block, and calls s for it. After an error it is closed.
func (p *poller) add(fd int, events uint32, s source) (*watch, error) {
	p.last++
	w := &watch{poll: p, fd: fd, token: p.last}
	p.sources[w.token] = s
	if err := w.want(events); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// want changes the events that are waited for.
func (w *watch) want(events uint32) error {
	if w == nil || w.fd < 0 || events == w.events {
		return nil
	}
	op := unix.EPOLL_CTL_MOD
	switch {
	case w.events == 0:
		op = unix.EPOLL_CTL_ADD
	case events == 0:
		op = unix.EPOLL_CTL_DEL
	}
	err := unix.EpollCtl(w.poll.fd, op, w.fd, &unix.EpollEvent{Events: events, Fd: w.token})
	if err == nil {
		w.events = events
	}
	return err
}

// open reports whether the descriptor is.
func (w *watch) open() bool { return w != nil && w.fd >= 0 }

// close closes the descriptor. Safe to repeat.
func (w *watch) close() {
	if !w.open() {
		return
	}
	delete(w.poll.sources, w.token)
	_ = w.want(0)
	_ = unix.Close(w.fd)
	w.fd = -1
}
