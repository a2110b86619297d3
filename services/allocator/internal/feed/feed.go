// Package feed owns one connection to each agent whose Pod runs, and turns the agent's status stream into calls on a Sink. It
// knows Pods only as addresses. A stream that breaks, is silent, skips a number or changes its epoch is opened again, with
// backoff. All methods may be called concurrently; the calls for one agent reach the sink in order.
package feed

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// DefaultSilence is how long a stream may send nothing before it is opened again. Agents send something every second.
const DefaultSilence = 5 * time.Second

// What one agent reports is read at this rate, so that one that reports without end takes little of the allocator. A message has one unit
// for each KiB that it has, and one more. An agent has far less to say, and what is not read yet waits with it.
const (
	readRate  = 2_000
	readBurst = 20_000
	readUnit  = 1 << 10
)

// Links connect in turn: if all agents of a new allocator did so at once, each handshake would take longer than it may, and be repeated.
// A link that waits for its agent for longer than turnTime gives its turn to the next.
const (
	turns    = 64
	turnTime = 2 * time.Second // that of a handshake, see rpc.Dial
)

// Sink receives the agents and their states.
type Sink interface {
	// Joined is called when an agent's Pod runs at an address. It may be called again with another address.
	Joined(info *agentv1.AgentInfo, address string)
	// Left is called when the agent's Pod was removed. It is the last call for the agent.
	Left(agentUID string)
	// Snapshot carries an agent's whole state, Delta a change of it, Heartbeat no change.
	Snapshot(agentUID string, s *agentv1.AgentSnapshot)
	Delta(agentUID string, d *agentv1.AgentDelta)
	Heartbeat(agentUID string)
}

// Config is what a feed needs.
type Config struct {
	Sink Sink
	// Dial returns a connection to an agent at an address (host:port) that connects on first use.
	Dial  func(agent *agentv1.AgentInfo, address string) (*grpc.ClientConn, error)
	Clock clock.WithDelayedExecution
	// Silence after which a stream is opened again. Zero: DefaultSilence.
	Silence time.Duration
}

// Feed owns the connections.
type Feed struct {
	config Config
	tasks  *tasks.Set
	turns  chan struct{} // has an entry for each link whose turn it is

	mu     sync.Mutex
	links  map[string]*link    // by agent uid
	held   map[string]struct{} // Pods that are not known to be agents, by uid
	synced bool
}

// link is one connection to one agent, with the goroutine that watches it.
type link struct {
	uid, name, address string
	info               *agentv1.AgentInfo // what the Pod says
	stop               chan struct{}      // closed to end the goroutine
	done               chan struct{}      // closed when it has ended
	pace               *rate.Limiter

	client agentv1.AgentServiceClient // nil until dialed; guarded by Feed.mu
}

// New returns a feed without agents.
func New(cfg Config) *Feed {
	if cfg.Silence == 0 {
		cfg.Silence = DefaultSilence
	}
	return &Feed{config: cfg, tasks: tasks.New(), turns: make(chan struct{}, turns), links: map[string]*link{}, held: map[string]struct{}{}}
}

// Run watches the agents until ctx ends.
func (f *Feed) Run(ctx context.Context) error { return f.tasks.Run(ctx) }

// SetPod adds the agent of a Pod that runs at an address. It is idempotent; another address for the same Pod replaces its
// connection. Sink.Joined has been called when it returns.
func (f *Feed) SetPod(info *agentv1.AgentInfo, address string) {
	f.mu.Lock()
	old := f.links[info.GetPodUid()]
	if old != nil && old.address == address {
		f.mu.Unlock()
		return
	}
	l := &link{
		uid: info.GetPodUid(), name: info.GetPodName(), address: address, info: info, stop: make(chan struct{}), done: make(chan struct{}),
		pace: rate.NewLimiter(readRate, readBurst),
	}
	f.links[l.uid] = l
	delete(f.held, l.uid)
	if old != nil {
		close(old.stop)
	}
	f.mu.Unlock()
	f.config.Sink.Joined(info, address)
	f.tasks.Go(func(ctx context.Context) { f.run(ctx, l, old) })
}

// HoldPod notes that a Pod exists, so that it is not gone, although it is not known to be an agent. It changes nothing for an agent.
func (f *Feed) HoldPod(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.links[uid] == nil {
		f.held[uid] = struct{}{}
	}
}

// RemovePod removes the agent of a Pod. It is idempotent.
func (f *Feed) RemovePod(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.held, uid)
	l := f.links[uid]
	if l == nil {
		return
	}
	delete(f.links, uid)
	close(l.stop)
	f.tasks.Go(func(context.Context) {
		<-l.done
		f.config.Sink.Left(uid)
	})
}

// SetSynced records that SetPod was called for every existing Pod.
func (f *Feed) SetSynced() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.synced = true
}

// Client returns the connection to an agent, and whether there is one.
func (f *Feed) Client(uid string) (agentv1.AgentServiceClient, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l, ok := f.links[uid]
	if !ok || l.client == nil {
		return nil, false
	}
	return l.client, true
}

// Gone reports whether an agent's Pod certainly does not exist.
func (f *Feed) Gone(uid string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, linked := f.links[uid]
	_, held := f.held[uid]
	return f.synced && !linked && !held
}

// run watches one agent until it is stopped. It first waits for the end of prev, the link that it replaces, if any: the calls
// of two links never mix.
func (f *Feed) run(ctx context.Context, l, prev *link) {
	defer close(l.done)
	if prev != nil {
		<-prev.done
	}
	ctx, cancel := context.WithCancel(ctx)
	stopper := make(chan struct{})
	go func() {
		defer close(stopper)
		select {
		case <-l.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	defer func() { cancel(); <-stopper }()
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeyAgent, l.name, obs.KeyAddress, l.address)
	delays := backoff.New(f.config.Clock, backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second})
	var conn *grpc.ClientConn
	defer func() {
		if conn != nil {
			_ = conn.Close()
		}
	}()
	for ctx.Err() == nil {
		var err error
		if conn == nil { // Dial reads the certificates, which may be half written
			conn, err = f.dial(l)
		}
		if err == nil {
			err = f.watch(ctx, l, delays.Reset)
		}
		if ctx.Err() != nil {
			return
		}
		log.V(2).Info("watching agent again", obs.KeyError, err.Error())
		if delays.Wait(ctx) != nil {
			return
		}
	}
}

func (f *Feed) dial(l *link) (*grpc.ClientConn, error) {
	conn, err := f.config.Dial(l.info, l.address)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	l.client = agentv1.NewAgentServiceClient(conn)
	return conn, nil
}

// watch follows one stream until it breaks; it always returns an error. received is called after each valid message.
func (f *Feed) watch(ctx context.Context, l *link, received func()) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	connected, err := f.turn(ctx)
	if err != nil {
		return err
	}
	defer connected()
	silence := f.config.Clock.AfterFunc(f.config.Silence, func() { cancel(errSilence) })
	defer silence.Stop()
	stream, err := l.client.WatchStatus(ctx, &agentv1.WatchStatusRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	var last position
	for {
		m, err := stream.Recv()
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		if err := last.advance(l.uid, m); err != nil {
			return err
		}
		connected()
		silence.Reset(f.config.Silence)
		received()
		switch c := m.GetContent().(type) {
		case *agentv1.WatchStatusResponse_Snapshot:
			f.config.Sink.Snapshot(l.uid, c.Snapshot)
		case *agentv1.WatchStatusResponse_Delta:
			f.config.Sink.Delta(l.uid, c.Delta)
		default:
			f.config.Sink.Heartbeat(l.uid)
		}
		if err := l.pace.WaitN(ctx, 1+min(proto.Size(m)/readUnit, readBurst-1)); err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// turn waits until a link may connect. Its caller must call end, more than once if it likes.
func (f *Feed) turn(ctx context.Context) (end func(), err error) {
	select {
	case f.turns <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	release := sync.OnceFunc(func() { <-f.turns })
	timer := f.config.Clock.AfterFunc(turnTime, release)
	return sync.OnceFunc(func() {
		timer.Stop()
		release()
	}), nil
}

var errSilence = errors.New("the agent sent nothing for too long")

// position is how far a stream has been read.
type position struct {
	epoch    string
	sequence int64
}

// advance checks that m is the next message, and that the expected agent sent it: an address may be reused.
func (p *position) advance(uid string, m *agentv1.WatchStatusResponse) error {
	snapshot := m.GetSnapshot()
	switch {
	case p.sequence == 0 && snapshot == nil:
		return errors.New("the stream does not begin with a snapshot")
	case p.sequence > 0 && snapshot != nil:
		return errors.New("a second snapshot in one stream")
	case m.GetSequence() != p.sequence+1:
		return fmt.Errorf("message %d follows %d", m.GetSequence(), p.sequence)
	case p.sequence > 0 && m.GetEpoch() != p.epoch:
		return fmt.Errorf("epoch %s follows %s", m.GetEpoch(), p.epoch)
	case snapshot != nil && snapshot.GetInfo().GetPodUid() != uid:
		return fmt.Errorf("the agent at this address belongs to Pod %s", snapshot.GetInfo().GetPodUid())
	}
	p.epoch, p.sequence = m.GetEpoch(), m.GetSequence()
	return nil
}
