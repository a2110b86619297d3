// Package liveness watches the server of the leader for the standby, and reports for as long as its address refuses connections: a
// process that was killed no longer listens, and the kernel of its node says so at once. It keeps one connection to the leader and
// makes no calls. A node that is gone, or a process that is stopped, refuses nothing, so that silence is no evidence here. Run is called
// once.
package liveness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

const (
	// interval is how often a server that cannot be reached is tried again.
	interval = 100 * time.Millisecond
	// connectTimeout bounds one attempt. A connection is refused within a round trip.
	connectTimeout = 500 * time.Millisecond
)

// Config is what Run needs.
type Config struct {
	Lead *leadership.View
	// Dial returns a connection to another replica that connects on first use.
	Dial func(address string) (*grpc.ClientConn, error)
	// Refused is called repeatedly while the server of a holder of the Lease refuses connections.
	Refused func(holder string)
	Clock   clock.Clock
}

// Run watches the server of each leader until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	for ctx.Err() == nil {
		state, changed := cfg.Lead.State()
		if state.Address == "" {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		if err := cfg.watch(ctx, state, changed); err != nil {
			logr.FromContextOrDiscard(ctx).V(2).Info("watching the leader again", obs.KeyAddress, state.Address, obs.KeyError, err.Error())
			select {
			case <-ctx.Done():
			case <-cfg.Clock.After(interval):
			}
		}
	}
	return nil
}

// watch watches one leader until there may be another.
func (c *Config) watch(ctx context.Context, leader leadership.State, changed <-chan struct{}) error {
	conn, err := c.Dial(leader.Address)
	if err != nil { // the certificates may be half written
		return fmt.Errorf("dialing the leader: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	defer func() { cancel(); <-ended }()
	go func() {
		defer close(ended)
		defer cancel()
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}()
	for ctx.Err() == nil {
		state := conn.GetState()
		switch state {
		case connectivity.Idle: // it has never been connected, or the connection has ended
			conn.Connect()
		case connectivity.TransientFailure:
			if refuses(ctx, leader.Address) {
				c.Refused(leader.Holder)
			}
			select {
			case <-ctx.Done():
			case <-c.Clock.After(interval):
			}
			conn.ResetConnectBackoff()
			continue
		}
		conn.WaitForStateChange(ctx, state)
	}
	return nil
}

// refuses reports whether nothing listens at an address, although its host answers.
func refuses(ctx context.Context, address string) bool {
	dialer := net.Dialer{Timeout: connectTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
