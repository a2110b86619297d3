package files

import (
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// dialTime is how long a connection may take: it does not leave the machine.
const dialTime = 10 * time.Second

// dial connects to a port, and carries what is sent. The connection of the agent is that of the port from then on.
func (s *server) dial() error {
	addresses := []string{s.call.Address}
	if s.call.Address == "" {
		addresses = []string{"127.0.0.1", "::1"}
	}
	var made net.Conn
	var err error
	for _, a := range addresses {
		var next error
		if made, next = net.DialTimeout("tcp", net.JoinHostPort(a, strconv.Itoa(s.call.Port)), dialTime); next == nil {
			break
		}
		if err == nil || !errors.Is(next, syscall.ECONNREFUSED) && !errors.Is(next, syscall.EADDRNOTAVAIL) {
			err = next
		}
	}
	if made == nil {
		return err
	}
	defer made.Close()
	if err := wire.PutJSON(s.conn, wire.Answer, &wire.Result{}); err != nil {
		return err
	}
	s.taken = true
	carry(s.conn, made.(*net.TCPConn)) //nolint:forcetypeassert // of tcp
	return nil
}

// carry copies in both directions until both have ended. The end of one direction is passed on.
func carry(a *net.UnixConn, b *net.TCPConn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.Copy(b, a); err != nil {
			_ = a.CloseRead()
		}
		_ = b.CloseWrite()
	})
	wg.Go(func() {
		if _, err := io.Copy(a, b); err != nil {
			_ = b.CloseRead()
		}
		_ = a.CloseWrite()
	})
	wg.Wait()
}
