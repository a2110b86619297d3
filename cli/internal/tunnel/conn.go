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

// maxTrouble bounds what is read of a kubelet's complaint.
const maxTrouble = 4 << 10

// conn is one connection to a port of a Pod, alone in its tunnel.
type conn struct {
	link    httpstream.Connection
	data    httpstream.Stream
	address address

	// heard is closed once the kubelet has said all that it has to say; trouble is written before that.
	heard   chan struct{}
	trouble error
}

var _ net.Conn = (*conn)(nil)

// listen takes what the kubelet says of the connection; it ends with the tunnel.
func (c *conn) listen(stream io.Reader) {
	defer close(c.heard)
	raw, err := io.ReadAll(io.LimitReader(stream, maxTrouble))
	if err == nil && len(raw) > 0 {
		c.trouble = fault.New(errdefs.ErrUnavailable, ReasonPod, "connecting to %s: %s", c.address, raw)
	}
}

// Read reads what the Pod sends. Where the kubelet said why there is nothing to read, that is the error.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.data.Read(p)
	if err == nil || n > 0 {
		return n, nil
	}
	// The kubelet ends the stream of its words before that of the data.
	<-c.heard
	if c.trouble != nil {
		return 0, c.trouble
	}
	return 0, err
}

// Write sends to the Pod.
func (c *conn) Write(p []byte) (int, error) { return c.data.Write(p) }

// Close ends the connection and its tunnel.
func (c *conn) Close() error {
	err := c.link.Close()
	<-c.heard
	if err != nil {
		return fmt.Errorf("closing the tunnel to %s: %w", c.address, err)
	}
	return nil
}

// LocalAddr is the tunnel's.
func (c *conn) LocalAddr() net.Addr { return address("tunnel") }

// RemoteAddr names the Pod and its port.
func (c *conn) RemoteAddr() net.Addr { return c.address }

// SetDeadline has no effect, as the two below: Close is what ends a Read.
func (c *conn) SetDeadline(time.Time) error { return nil }

// SetReadDeadline has no effect.
func (c *conn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline has no effect.
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// address is a Pod's port.
type address string

// Network is that of the API server's tunnels.
func (address) Network() string { return "portforward" }

// String is namespace/name:port.
func (a address) String() string { return string(a) }
