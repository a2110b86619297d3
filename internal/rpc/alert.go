package rpc

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
)

// alertTimeout bounds the wait for an alert after a write has failed.
const alertTimeout = time.Second

// alertCredentials are TLS credentials whose connections report why the server refused the client's certificate. In TLS 1.3
// the client's handshake ends before the server has checked that certificate: the refusal is an alert that follows the
// handshake. If the server has closed the connection by then, the client's first write fails before the alert is read, and
// a refused certificate looks like a broken connection.
type alertCredentials struct {
	credentials.TransportCredentials
}

// ClientHandshake implements credentials.TransportCredentials.
func (c alertCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	return &alertConn{Conn: conn}, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c alertCredentials) Clone() credentials.TransportCredentials {
	return alertCredentials{c.TransportCredentials.Clone()}
}

// alertConn is a TLS connection whose Write returns the server's alert, if there is one, in place of its own error. Once the
// server has sent data, it has accepted the client's certificate, and Write no longer looks for an alert.
type alertConn struct {
	net.Conn
	accepted atomic.Bool
}

// Read implements net.Conn.
func (c *alertConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.accepted.Store(true)
	}
	return n, err
}

// Write implements net.Conn.
func (c *alertConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err == nil || c.accepted.Load() {
		return n, err
	}
	// A TLS connection keeps its first read error, so this returns the alert even if the transport's reader got it first. The
	// caller closes the connection after a failed write, which ends a read that outlives the timeout.
	alert := make(chan error, 1)
	go func() {
		_, err := c.Conn.Read(make([]byte, 1))
		alert <- err
	}()
	timer := time.NewTimer(alertTimeout)
	defer timer.Stop()
	select {
	case read := <-alert:
		if isAlert(read) {
			return n, read
		}
	case <-timer.C:
	}
	return n, err
}

// isAlert reports whether err is an alert that the server sent.
func isAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}
