package command

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/events"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/task"
)

// listenerFD is the descriptor of the socket that start has passed on.
const listenerFD = 3

// unusedTime is how long a shim waits for its first container. containerd creates the anchor at once; a shim whose start containerd has given up is
// not known to anybody.
const unusedTime = 20 * time.Second

// flushTime is how long the last events are waited for.
const flushTime = 2 * time.Second

// serve is the shim. It runs until containerd lets it go, which is when its anchor and all other containers are deleted.
func (o *options) serve(ctx context.Context) error {
	// A shim outlives who has started it, and ends only with its containers. Signals that it ignored would be ignored by them, too.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("becoming a reaper: %w", err)
	}
	file := os.NewFile(listenerFD, "listener")
	listener, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("opening the socket: %w", err)
	}
	_ = file.Close()
	path := strings.TrimPrefix(listener.Addr().String(), "unix://")
	defer func() { _ = os.Remove(path) }()
	cgroups, err := cgroup.Open(cgroupRoot)
	if err != nil {
		return err
	}
	starter, err := process.NewStarter()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	publisher := events.New(o.namespace, o.ttrpcAddress)
	publishing := make(chan struct{})
	go func() {
		defer close(publishing)
		publisher.Run()
	}()
	empty := make(chan struct{})
	service := task.New(task.Config{
		Cgroups: cgroups, Starter: starter, Publish: publisher.Publish, Empty: sync.OnceFunc(func() { close(empty) }),
	})
	server, err := ttrpc.NewServer(ttrpc.WithServerHandshaker(ttrpc.UnixSocketRequireSameUser()))
	if err != nil {
		return err
	}
	service.RegisterTTRPC(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, listener) }()
	if err := await(served, empty, service.Used); err != nil {
		return err
	}
	stopping, stop := context.WithTimeout(ctx, flushTime)
	defer stop()
	err = server.Shutdown(stopping)
	publisher.Close()
	select {
	case <-publishing:
	case <-stopping.Done():
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// await returns when the shim has to end: when it is empty, or has not been used in time.
func await(served <-chan error, empty <-chan struct{}, used func() bool) error {
	unused := time.NewTimer(unusedTime)
	defer unused.Stop()
	for {
		select {
		case err := <-served:
			return fmt.Errorf("serving: %w", err)
		case <-empty:
			return nil
		case <-unused.C:
			if !used() {
				return nil
			}
		}
	}
}
