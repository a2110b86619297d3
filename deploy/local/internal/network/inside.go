package network

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Inside runs do in the cluster's network namespace: sockets it makes, processes it starts and /proc/sys/net it sees
// are those of the namespace. Goroutines that do starts are not inside.
func Inside(do func() error) error {
	runtime.LockOSThread()
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("opening the own network namespace: %w", err)
	}
	defer func() { _ = own.Close() }()
	cluster, err := os.Open(NamespacePath)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("opening the cluster's network namespace: %w", err)
	}
	defer func() { _ = cluster.Close() }()
	if err := unix.Setns(int(cluster.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("entering the cluster's network namespace: %w", err)
	}
	err = do()
	if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked and so ends with its goroutine, instead of serving others in the wrong namespace.
		return fmt.Errorf("leaving the cluster's network namespace: %w", back)
	}
	runtime.UnlockOSThread()
	return err
}

// Dial connects from inside the namespace. The address must be an IP literal: a name would be resolved by a goroutine
// that is outside.
func Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = Inside(func() error {
		var dialer net.Dialer
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}
