package run

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// metadataIP is the address at which clouds give credentials to a node. metadataAddress has its port.
	metadataIP      = "169.254.169.254"
	metadataAddress = metadataIP + ":80"
	// nodeNetwork is the network namespace of the local cluster's node.
	nodeNetwork = "/run/netns/fsb-local"
)

// serveMetadata gives the node of the local cluster an address like that of a cloud's metadata service, and answers there: otherwise a
// sandbox that can reach it would look like one that cannot. What it returns ends that.
func serveMetadata(ctx context.Context) (stop func(), err error) {
	address := func(verb string) error {
		out, err := exec.CommandContext(context.WithoutCancel(ctx), "nsenter", "--net="+nodeNetwork, "ip", "address", verb, metadataIP+"/32", "dev", "lo").CombinedOutput()
		there := strings.Contains(string(out), "exists") || strings.Contains(string(out), "already assigned") // of a run that was killed
		if err != nil && (verb != "add" || !there) {
			return fmt.Errorf("changing the address of the metadata service: %w: %s", err, out)
		}
		return nil
	}
	if err := address("add"); err != nil {
		return nil, err
	}
	l, err := listenIn(ctx, nodeNetwork, metadataAddress)
	if err != nil {
		_ = address("delete")
		return nil, err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	return func() {
		_ = l.Close()
		_ = address("delete")
	}, nil
}

// listenIn listens in another network namespace. A socket stays in the namespace in which it was made.
func listenIn(ctx context.Context, namespace, address string) (net.Listener, error) {
	type result struct {
		l   net.Listener
		err error
	}
	done := make(chan result)
	go func() {
		// The thread is not unlocked, so that it ends with this function and no other code runs in the namespace.
		runtime.LockOSThread()
		l, err := func() (net.Listener, error) {
			fd, err := unix.Open(namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("opening the node's network: %w", err)
			}
			defer func() { _ = unix.Close(fd) }()
			if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
				return nil, fmt.Errorf("entering the node's network: %w", err)
			}
			var listen net.ListenConfig
			return listen.Listen(ctx, "tcp", address)
		}()
		done <- result{l, err}
	}()
	r := <-done
	return r.l, r.err
}
