package tunnel

import (
	"fmt"
	"io"
	"net"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// maxMessage is the maximum size of an error message of the kubelet.
const maxMessage = 4 << 10

// conn is one connection to a port of a Pod. It has a tunnel of its own.
type conn struct {
	link    httpstream.Connection
	data    httpstream.Stream
	address address

	// ended is closed when the kubelet's error stream ends. failure is written before that.
	ended   chan struct{}
	failure error
}

var _ net.Conn = (*conn)(nil)

// readErrors reads the kubelet's error stream. It ends with the tunnel.
func (c *conn) readErrors(stream io.Reader) {
	defer close(c.ended)
	raw, err := io.ReadAll(io.LimitReader(stream, maxMessage))
	if err == nil && len(raw) > 0 {
		c.failure = fault.New(errdefs.ErrUnavailable, ReasonPod, "connecting to %s: %s", c.address, raw)
	}
}

// Read reads what the Pod sends. If the kubelet reported an error of the connection, Read returns it.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.data.Read(p)
	if err == nil || n > 0 {
		return n, nil
	}
	// The kubelet ends the error stream before the data stream.
	<-c.ended
	if c.failure != nil {
		return 0, c.failure
	}
	return 0, err
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) { return c.data.Write(p) }

// Close closes the connection and its tunnel.
func (c *conn) Close() error {
	err := c.link.Close()
	<-c.ended
	if err != nil {
		return fmt.Errorf("closing the tunnel to %s: %w", c.address, err)
	}
	return nil
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return address("tunnel") }

// RemoteAddr returns the Pod and its port.
func (c *conn) RemoteAddr() net.Addr { return c.address }

// SetDeadline has no effect, like the next two. Close ends a Read.
func (c *conn) SetDeadline(time.Time) error { return nil }

// SetReadDeadline has no effect.
func (c *conn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline has no effect.
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// address is the port of a Pod.
type address string

// Network implements net.Addr.
func (address) Network() string { return "portforward" }

// String returns namespace/name:port.
func (a address) String() string { return string(a) }
