package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// readHeaderTimeout is how long a client may take to send its headers.
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10
	// maxConcurrentStreams bounds the requests of one HTTP/2 connection.
	maxConcurrentStreams = 250
	// maxConnections and maxPerHost bound the open connections; further ones are closed at once.
	maxConnections = 16 << 10
	maxPerHost     = 1 << 10
)

// newServer returns a server without ReadTimeout and WriteTimeout: they would end streams. The handler sets the deadlines of
// each request.
func newServer(cfg Config, handler http.Handler, log logr.Logger) (*http.Server, error) {
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		HTTP2:    &http.HTTP2Config{MaxConcurrentStreams: maxConcurrentStreams},
		ErrorLog: nil, ConnContext: rpc.ConnContext,
	}
	server.ErrorLog = newErrorLog(log)
	if cfg.TLS.Insecure {
		log.Info("serving plaintext to every caller because of --insecure")
		server.Protocols = new(http.Protocols)
		server.Protocols.SetHTTP1(true)
		server.Protocols.SetUnencryptedHTTP2(true)
		return server, nil
	}
	tlsConfig, err := cfg.TLS.ServerConfig(true)
	if err != nil {
		return nil, err
	}
	server.TLSConfig = tlsConfig
	return server, nil
}

// serve serves until ctx ends. Then it accepts no more connections, ends streams and sessions, and lets other requests continue for the
// drain timeout.
func serve(ctx context.Context, server *http.Server, listener net.Listener, cfg Config, draining chan<- struct{}, sessions *sync.WaitGroup) error {
	served := make(chan error, 1)
	go func() {
		if cfg.TLS.Insecure {
			served <- server.Serve(listener)
			return
		}
		served <- server.ServeTLS(listener, "", "")
	}()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS: %w", err)
	case <-ctx.Done():
	}
	close(draining)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.DrainTimeout)
	defer cancel()
	err := server.Shutdown(stop)
	ended := make(chan struct{})
	go func() { defer close(ended); sessions.Wait() }()
	select {
	case <-ended:
	case <-stop.Done(): // the process ends, and they with it
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	if last := <-served; !errors.Is(last, http.ErrServerClosed) {
		err = errors.Join(err, last)
	}
	if err != nil {
		return fmt.Errorf("stopping the HTTPS server: %w", err)
	}
	return nil
}
