package load

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
)

const (
	bindPause = time.Millisecond
	// squatTime is how long the port is kept: long enough for clients to come, and short enough for its owner to come back.
	squatTime = 6 * time.Second
)

// squat binds a port, its argument, as soon as it is free, and poses as the server that was there.
func squat(ctx context.Context, o *output, _ *attack.Env, args []string) (int64, error) {
	if len(args) != 1 {
		return 0, fmt.Errorf("squatting: want a port, have %q", args)
	}
	var listen net.ListenConfig
	var l net.Listener
	var err error
	for l == nil {
		if l, err = listen.Listen(ctx, "tcp", ":"+args[0]); err != nil && !wait(ctx, bindPause) {
			return 0, fmt.Errorf("squatting: %w", err)
		}
	}
	o.line(Line{Kind: KindBound, Text: l.Addr().String()})
	own, err := attack.SelfSigned("agent")
	if err != nil {
		return 0, err
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{own}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}
	keep, cancel := context.WithTimeout(ctx, squatTime)
	defer cancel()
	context.AfterFunc(keep, func() { _ = l.Close() })
	clients := int64(0)
	for {
		conn, err := l.Accept()
		if err != nil {
			return clients, nil // the time is over
		}
		clients++
		pose(conn, cfg, o)
	}
}

// pose completes a handshake if the client takes the certificate for that of the agent.
func pose(conn net.Conn, cfg *tls.Config, o *output) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(dialTimeout))
	server := tls.Server(conn, cfg)
	if server.Handshake() != nil {
		return
	}
	// A client that refuses the certificate may say so only after its half of the handshake.
	first := make([]byte, 24)
	if n, _ := server.Read(first); n > 0 {
		o.line(Line{Kind: KindImpersonated, Text: conn.RemoteAddr().String()})
	}
}
