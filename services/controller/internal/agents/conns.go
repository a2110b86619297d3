package agents

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	probeTimeout = 2 * time.Second
	// probeReuse is how long the result of a probe is used for all sandboxes of the agent.
	probeReuse = 2 * time.Second
)

// Conns are the connections to agents, one for each agent and address. A connection is made only to the agent that is meant: its
// certificate names its Pod. Create it with NewConns.
type Conns struct {
	config rpc.ClientConfig
	clock  clock.PassiveClock
	flight singleflight.Group

	mu     sync.Mutex
	closed bool
	conns  map[peer]*grpc.ClientConn
	probes map[peer]probeResult
}

// peer is an agent at an address.
type peer struct{ address, agentUID string }

type probeResult struct {
	at       time.Time
	snapshot *agentv1.AgentSnapshot
	err      error
}

// NewConns returns Conns without connections; they are opened on first use.
func NewConns(config rpc.ClientConfig, c clock.PassiveClock) *Conns {
	return &Conns{config: config, clock: c, conns: map[peer]*grpc.ClientConn{}, probes: map[peer]probeResult{}}
}

// Client returns a client of the agent whose Pod has the uid, at the address (host:port). It does no I/O.
func (c *Conns) Client(address, agentUID string) (agentv1.AgentServiceClient, error) {
	if address == "" {
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent has no address yet")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fault.New(errdefs.ErrUnavailable, fault.Cancelled, "the controller is shutting down")
	}
	to := peer{address, agentUID}
	conn := c.conns[to]
	if conn == nil {
		config := c.config
		config.AgentUID = agentUID
		var err error
		if conn, err = rpc.Dial(address, config); err != nil {
			return nil, err
		}
		c.conns[to] = conn
	}
	return agentv1.NewAgentServiceClient(conn), nil
}

// Drop closes the connections to an address. Their calls fail as canceled; the next call opens a connection again.
func (c *Conns) Drop(address string) {
	c.mu.Lock()
	var dropped []*grpc.ClientConn
	for to, conn := range c.conns {
		if to.address == address {
			dropped = append(dropped, conn)
			delete(c.conns, to)
		}
	}
	maps.DeleteFunc(c.probes, func(to peer, _ probeResult) bool { return to.address == address })
	c.mu.Unlock()
	for _, conn := range dropped {
		_ = conn.Close() // fails only if it is already closed
	}
}

// Close closes all connections. Client fails afterwards.
func (c *Conns) Close() error {
	c.mu.Lock()
	conns := c.conns
	c.conns, c.closed = map[peer]*grpc.ClientConn{}, true
	c.mu.Unlock()
	var errs []error
	for _, conn := range conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}

// Snapshot returns the agent's own snapshot, which may be up to 2 s old: all sandboxes of an agent ask at the same time. It
// returns AgentUnavailable if the agent does not answer within 2 s, or if another agent has the address.
func (c *Conns) Snapshot(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error) {
	to := peer{address, agentUID}
	c.mu.Lock()
	last, ok := c.probes[to]
	c.mu.Unlock()
	if !ok || c.clock.Since(last.at) > probeReuse {
		v, _, _ := c.flight.Do(agentUID+"@"+address, func() (any, error) {
			snapshot, err := c.probe(context.WithoutCancel(ctx), to) // its result is that of all callers
			p := probeResult{at: c.clock.Now(), snapshot: snapshot, err: err}
			c.mu.Lock()
			defer c.mu.Unlock()
			c.probes[to] = p
			return p, nil
		})
		last, _ = v.(probeResult)
	}
	if last.err != nil {
		return nil, last.err
	}
	return verifySender(last.snapshot, address, agentUID)
}

// FreshSnapshot is like Snapshot, but always asks the agent.
func (c *Conns) FreshSnapshot(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error) {
	snapshot, err := c.probe(ctx, peer{address, agentUID})
	if err != nil {
		return nil, err
	}
	return verifySender(snapshot, address, agentUID)
}

// verifySender returns the snapshot if it was sent by the agent with the uid.
func verifySender(s *agentv1.AgentSnapshot, address, agentUID string) (*agentv1.AgentSnapshot, error) {
	if got := s.GetInfo().GetPodUid(); got != agentUID {
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "agent %s answers at %s instead of %s", got, address, agentUID)
	}
	return s, nil
}

func (c *Conns) probe(ctx context.Context, to peer) (*agentv1.AgentSnapshot, error) {
	client, err := c.Client(to.address, to.agentUID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	stream, err := client.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("probing agent at %s: %w", to.address, rpc.FromStatus(err))
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("probing agent at %s: %w", to.address, rpc.FromStatus(err))
	}
	if first.GetSnapshot() == nil {
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "agent at %s sent no snapshot first", to.address)
	}
	return first.GetSnapshot(), nil
}
