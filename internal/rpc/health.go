package rpc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// ServeHealth serves the health service alone on a unix socket, for probes that run in the same container: the kubelet's own gRPC
// probes have no TLS, so a port for them would be open to every Pod. It blocks until ctx ends. An empty path or "0" serves nothing.
func ServeHealth(ctx context.Context, path string, h healthv1.HealthServer) error {
	if path == "" || path == "0" {
		<-ctx.Done()
		return nil
	}
	listener, err := listenUnix(path)
	if err != nil {
		return fmt.Errorf("listening for health probes: %w", err)
	}
	server := grpc.NewServer(DefaultLimits().options()...)
	healthv1.RegisterHealthServer(server, h)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving health probes: %w", err)
	case <-ctx.Done():
	}
	server.Stop()
	_ = <-served
	return nil
}

// listenUnix listens on a socket that only this user can connect to, in place of one that an earlier process has left.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	info, err := os.Lstat(path)
	switch {
	case err == nil && info.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("%s is not a socket", path)
	case err == nil:
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// Probe asks the health service on a unix socket about a service; empty is the process as a whole. The error says what it is instead of
// SERVING.
func Probe(ctx context.Context, path, service string) error {
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", path, err)
	}
	defer conn.Close()
	resp, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	if err != nil {
		return fmt.Errorf("asking %s: %w", path, FromStatus(err))
	}
	if resp.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		return fmt.Errorf("the status is %s", resp.GetStatus())
	}
	return nil
}
