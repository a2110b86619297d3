// Package swarm is many simulated agents in one process: each listens on a loopback address of its own, has a certificate of its own and keeps
// AgentService's contract as far as an allocator can observe it (records, persistence, tombstones, status streams with
// heartbeats), without any container. All methods may be called concurrently.
//
// It is not testkit/fakeagent: thousands of agents share the machine with the allocator that is measured, so that they share one
// gRPC server without interceptors, and a watcher has no buffer until it lags behind.
package swarm

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Swarm is the agents behind one gRPC server.
type Swarm struct {
	agentv1.UnimplementedAgentServiceServer
	heartbeat time.Duration
	server    *grpc.Server
	agents    map[string]*agent          // by IP; not changed once it serves
	certs     map[string]tls.Certificate // by IP; not changed once it serves
	serving   sync.WaitGroup
}

// agent is one of them.
type agent struct {
	info   *agentv1.AgentInfo
	images []string

	mu         sync.Mutex
	sandboxes  map[string]*agentv1.SandboxReport // by uid
	tombstones map[string]*agentv1.Tombstone     // by uid
	watchers   map[*watcher]struct{}
}

// watcher is one status stream. Deltas wait in its queue; wake signals that there are some.
type watcher struct {
	queue []*agentv1.AgentDelta // guarded by agent.mu
	wake  chan struct{}
}

// New returns a swarm without agents. heartbeat is the interval of heartbeats. files has the authorities that it trusts; each agent has a
// certificate of its own.
func New(files rpc.TLS, heartbeat time.Duration) (*Swarm, error) {
	config, err := files.ServerConfig(false)
	if err != nil {
		return nil, err
	}
	s := &Swarm{heartbeat: heartbeat, agents: map[string]*agent{}, certs: map[string]tls.Certificate{}}
	current := config.GetConfigForClient
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		c, err := current(hello)
		if err != nil {
			return nil, err
		}
		host, _, err := net.SplitHostPort(hello.Conn.LocalAddr().String())
		c.Certificates = []tls.Certificate{s.certs[host]}
		return c, err
	}
	s.server = grpc.NewServer(
		grpc.Creds(credentials.NewTLS(config)),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	agentv1.RegisterAgentServiceServer(s.server, s)
	return s, nil
}

// Add adds an agent with its certificate and what it has, before Serve. The swarm keeps the messages; the caller must not change them
// afterwards.
func (s *Swarm) Add(info *agentv1.AgentInfo, files rpc.TLS, images []string, sandboxes []*agentv1.SandboxReport) error {
	cert, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	if err != nil {
		return fmt.Errorf("reading the certificate of agent %s: %w", info.GetPodName(), err)
	}
	a := &agent{
		info: info, images: images, sandboxes: make(map[string]*agentv1.SandboxReport, len(sandboxes)),
		tombstones: map[string]*agentv1.Tombstone{}, watchers: map[*watcher]struct{}{},
	}
	for _, r := range sandboxes {
		a.sandboxes[uidOf(r.GetRecord().GetFence())] = r
	}
	s.agents[info.GetPodIp()], s.certs[info.GetPodIp()] = a, cert
	return nil
}

// Serve has all agents listen, each on its address and all on one port.
func (s *Swarm) Serve(port int) error {
	for ip := range s.agents {
		l, err := net.Listen("tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
		if err != nil {
			s.Stop()
			return fmt.Errorf("listening for an agent: %w", err)
		}
		s.serving.Go(func() { _ = s.server.Serve(l) }) // it ends with Stop, or with the listener
	}
	return nil
}

// Stop ends all agents and waits for that.
func (s *Swarm) Stop() {
	s.server.Stop()
	s.serving.Wait()
}

// Count returns the number of sandboxes on all agents.
func (s *Swarm) Count() int {
	n := 0
	for _, a := range s.agents {
		a.mu.Lock()
		n += len(a.sandboxes)
		a.mu.Unlock()
	}
	return n
}

// called returns the agent whose address the connection of a call ends at.
func (s *Swarm) called(ctx context.Context) (*agent, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, errors.New("a call without a connection")
	}
	host, _, err := net.SplitHostPort(p.LocalAddr.String())
	if err != nil {
		return nil, fmt.Errorf("finding the agent that was called: %w", err)
	}
	if a := s.agents[host]; a != nil {
		return a, nil
	}
	return nil, fmt.Errorf("no agent has the address %s", host)
}

func uidOf(f *agentv1.Fence) string { return f.GetSandboxUid() }

// slots returns the agent's slots: one for each free capacity unit. The lock is held.
func (a *agent) slots() *agentv1.SlotStatus {
	free := max(a.info.GetCapacity()-int32(len(a.sandboxes)), 0)
	return &agentv1.SlotStatus{Free: free, Wanted: free}
}

// notify queues a change for all watchers. The lock is held.
func (a *agent) notify(d *agentv1.AgentDelta) {
	for w := range a.watchers {
		w.queue = append(w.queue, d)
		select {
		case w.wake <- struct{}{}:
		default: // it is awake
		}
	}
}

// set replaces a report and notifies the watchers. The lock is held.
func (a *agent) set(r *agentv1.SandboxReport) {
	uid := uidOf(r.GetRecord().GetFence())
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		delete(a.sandboxes, uid)
	} else {
		a.sandboxes[uid] = r
	}
	a.notify(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{r}, Slots: a.slots()})
}

// put is set for callers that do not hold the lock.
func (a *agent) put(r *agentv1.SandboxReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.set(r)
}

// change changes the report of a sandbox, if it exists, and notifies the watchers.
func (a *agent) change(f *agentv1.Fence, change func(*agentv1.SandboxReport)) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	r, ok := a.sandboxes[uidOf(f)]
	if ok {
		r = proto.CloneOf(r)
		change(r)
		a.set(r)
	}
	return ok
}

// watch begins a stream. It returns the current state, and a watcher that receives the changes that follow.
func (a *agent) watch() (*agentv1.AgentSnapshot, *watcher) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := &watcher{wake: make(chan struct{}, 1)}
	a.watchers[w] = struct{}{}
	s := &agentv1.AgentSnapshot{Info: a.info, Images: a.images, Accepting: true, Slots: a.slots()}
	for _, r := range a.sandboxes {
		s.Sandboxes = append(s.Sandboxes, r)
	}
	for _, t := range a.tombstones {
		s.Tombstones = append(s.Tombstones, t)
	}
	return s, w
}

func (a *agent) leave(w *watcher) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.watchers, w)
}

// take empties a watcher's queue.
func (a *agent) take(w *watcher) []*agentv1.AgentDelta {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := w.queue
	w.queue = nil
	return q
}

// WatchStatus implements agentv1.AgentServiceServer.
func (s *Swarm) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	a, err := s.called(stream.Context())
	if err != nil {
		return err
	}
	snapshot, w := a.watch()
	defer a.leave(w)
	sequence := int64(0)
	send := func(m *agentv1.WatchStatusResponse) error {
		sequence++
		m.Epoch, m.Sequence, m.Time = "1", sequence, timestamppb.Now()
		return stream.Send(m)
	}
	if err := send(&agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Snapshot{Snapshot: snapshot}}); err != nil {
		return err
	}
	ticker := time.NewTicker(s.heartbeat)
	defer ticker.Stop()
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-w.wake:
			for _, d := range a.take(w) {
				if err := send(&agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Delta{Delta: d}}); err != nil {
					return err
				}
			}
		case <-ticker.C:
			if err := send(&agentv1.WatchStatusResponse{}); err != nil {
				return err
			}
		}
	}
}
