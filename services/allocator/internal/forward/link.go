package forward

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// link is the connection to one leader. It is closed when it is abandoned and its last call has ended: a former leader may
// still answer.
type link struct {
	address string
	conn    *grpc.ClientConn

	// Guarded by Forwarder.mu.
	users     int
	abandoned bool
}

// dial returns the connection to a leader. The caller must release it.
func (f *Forwarder) dial(address string) (*link, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.link == nil || f.link.address != address {
		conn, err := f.config.Dial(address)
		if err != nil {
			return nil, err
		}
		if f.link != nil {
			f.link.abandon()
		}
		f.link = &link{address: address, conn: conn}
	}
	f.link.users++
	return f.link, nil
}

func (f *Forwarder) release(l *link) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.users--
	l.closeUnused()
}

// abandon closes the link once it has no more users. mu is held.
func (l *link) abandon() {
	l.abandoned = true
	l.closeUnused()
}

func (l *link) closeUnused() {
	if l.abandoned && l.users == 0 {
		_ = l.conn.Close()
	}
}

var errUnreachable = errors.New("the leader cannot be reached")

// ready blocks until the connection is established: until then a call was certainly not sent.
func (l *link) ready(ctx context.Context, changed <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	ended := make(chan struct{})
	defer func() { <-ended }()
	go func() {
		defer close(ended)
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	}()
	defer cancel()
	for {
		state := l.conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Idle:
			l.conn.Connect()
		case connectivity.TransientFailure, connectivity.Shutdown:
			return errUnreachable
		}
		if !l.conn.WaitForStateChange(ctx, state) {
			return errUnreachable
		}
	}
}
