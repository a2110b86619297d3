package rpc

import (
	"context"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
)

const (
	// recordBytes is the size of the largest record of TLS, without what TLS adds to it.
	recordBytes = 16 << 10
	// gatherBytes is how much is gathered at most before it is written: a write buffer of gRPC, with what TLS adds to its records.
	gatherBytes = bulkWriteBuffer + 2<<10
)

// gatherCredentials are TLS credentials whose connections write the records of one write together. TLS writes each of them on its own otherwise, 16 KiB
// at a time, and with each of these writes the kernel may wake the process at the other end.
type gatherCredentials struct {
	credentials.TransportCredentials
}

// ClientHandshake implements credentials.TransportCredentials.
func (c gatherCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	below := &gatheringConn{Conn: raw}
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, below)
	if err != nil {
		return nil, nil, err
	}
	return &gatheredConn{conn, below}, info, nil
}

// ServerHandshake implements credentials.TransportCredentials.
func (c gatherCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	below := &gatheringConn{Conn: raw}
	conn, info, err := c.TransportCredentials.ServerHandshake(below)
	if err != nil {
		return nil, nil, err
	}
	return &gatheredConn{conn, below}, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c gatherCredentials) Clone() credentials.TransportCredentials {
	return gatherCredentials{c.TransportCredentials.Clone()}
}

// gatheredConn is the connection above TLS.
type gatheredConn struct {
	net.Conn
	below *gatheringConn
}

// Write implements net.Conn.
func (c *gatheredConn) Write(p []byte) (int, error) {
	if len(p) <= recordBytes {
		return c.Conn.Write(p)
	}
	c.below.gather()
	n, err := c.Conn.Write(p)
	if flushed := c.below.flush(); err == nil && flushed != nil {
		return 0, flushed
	}
	return n, err
}

// Close implements net.Conn. TLS does not know of a write that waits below it, and would wait for it to announce the end.
func (c *gatheredConn) Close() error {
	if c.below.writing.Load() {
		return c.below.Close()
	}
	return c.Conn.Close()
}

// gathers are the buffers of connections that gather.
var gathers = sync.Pool{New: func() any { return new(make([]byte, 0, gatherBytes)) }}

// gatheringConn is the connection below TLS. TLS may write to it also because of what it reads: alerts, and new keys.
type gatheringConn struct {
	net.Conn

	// writing: what was gathered is being written.
	writing atomic.Bool

	mu sync.Mutex
	// buffer has what was written since gather; nil: writes are not gathered.
	buffer *[]byte
	// err is that of a write, which all later ones have as well.
	err error
}

// gather begins to gather what is written.
func (c *gatheringConn) gather() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buffer = gathers.Get().(*[]byte) //nolint:forcetypeassert // nothing else is in it
}

// Write implements net.Conn.
func (c *gatheringConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return 0, c.err
	case c.buffer == nil:
		return c.Conn.Write(p)
	case len(*c.buffer)+len(p) > gatherBytes:
		if err := c.write(); err != nil {
			return 0, err
		}
	}
	*c.buffer = append(*c.buffer, p...)
	return len(p), nil
}

// flush writes what was gathered, and gathers no more.
func (c *gatheringConn) flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.write()
	gathers.Put(c.buffer)
	c.buffer = nil
	return err
}

func (c *gatheringConn) write() error {
	if c.err == nil && len(*c.buffer) > 0 {
		c.writing.Store(true)
		_, c.err = c.Conn.Write(*c.buffer)
		c.writing.Store(false)
	}
	*c.buffer = (*c.buffer)[:0]
	return c.err
}
