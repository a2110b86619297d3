//go:build integration

package app_test

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// allocator is an AllocatorService with a Registry of fake agents: the first that is ready, not excluded and has room
// gets the sandbox; the same uid and attempt is answered with the same agent.
type allocator struct {
	allocatorv1.UnimplementedAllocatorServiceServer

	address string
	stop    func()

	mu        sync.Mutex
	order     []string // agents' uids
	agents    map[string]*agent
	meta      map[string]*allocatorv1.Agent
	places    map[string]string // container id -> agent uid
	allocates []*allocatorv1.AllocateRequest
	released  map[string]bool
	watchers  map[chan *allocatorv1.WatchAgentsResponse]bool
	// refuse answers Allocate while it is not nil.
	refuse error
}

func startAllocator(t *testing.T) *allocator {
	t.Helper()
	a := &allocator{agents: map[string]*agent{}, meta: map[string]*allocatorv1.Agent{}, places: map[string]string{},
		released: map[string]bool{}, watchers: map[chan *allocatorv1.WatchAgentsResponse]bool{}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	allocatorv1.RegisterAllocatorServiceServer(server, a)
	a.address = listener.Addr().String()
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	a.stop = sync.OnceFunc(func() { server.Stop(); <-done })
	t.Cleanup(a.stop)
	return a
}

func (a *allocator) add(x *agent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	a.order, a.agents[uid] = append(a.order, uid), x
	a.meta[uid] = &allocatorv1.Agent{Info: x.info, Address: x.address, Ready: true, LastHeartbeatTime: timestamppb.Now()}
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, uid, x.all())
}

func (a *allocator) all() []*agent {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []*agent
	for _, uid := range a.order {
		out = append(out, a.agents[uid])
	}
	return out
}

// gone takes an agent out of the Registry, as its Pod's end does.
func (a *allocator) gone(x *agent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE, uid, nil)
	delete(a.agents, uid)
	a.order = slices.DeleteFunc(a.order, func(s string) bool { return s == uid })
}

// silent says when an agent was heard of for the last time; now means that it is well.
func (a *allocator) silent(x *agent, since time.Time, ready bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	m := proto.CloneOf(a.meta[uid])
	m.Ready, m.LastHeartbeatTime, m.Reason = ready, timestamppb.New(since), ""
	if !ready {
		m.Reason = "HeartbeatTimeout"
	}
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, uid, x.all())
}

// reserves says how many places of an agent are taken.
func (a *allocator) reserves(x *agent, n int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	m := proto.CloneOf(a.meta[uid])
	m.Allocated = n
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, uid, x.all())
}

// slots says how an agent is off for slots, as an allocator does: without its sandboxes.
func (a *allocator) slots(x *agent, free, wanted int32, off string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	m := proto.CloneOf(a.meta[uid])
	m.FreeSlots, m.WantedSlots, m.SlotsOffReason = free, wanted, off
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, uid, nil)
}

// accepts tells whether an agent takes sandboxes; unlike the others it may be called for one that is not in the Registry.
func (a *allocator) accepts(x *agent, draining bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	if a.agents[uid] != x {
		return
	}
	m := proto.CloneOf(a.meta[uid])
	m.Ready, m.Reason, m.LastHeartbeatTime = !draining, "", timestamppb.Now()
	if draining {
		m.Reason = "Draining"
	}
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, uid, x.all())
}

func (a *allocator) changed(x *agent, r *agentv1.SandboxReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.agents[x.info.GetPodUid()] == x {
		a.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, x.info.GetPodUid(), []*agentv1.SandboxReport{r})
	}
}

func (a *allocator) publish(kind allocatorv1.WatchAgentsResponse_Type, uid string, reports []*agentv1.SandboxReport) {
	for w := range a.watchers {
		w <- &allocatorv1.WatchAgentsResponse{Type: kind, Agent: a.meta[uid], Sandboxes: reports}
	}
}

func (a *allocator) setRefuse(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuse = err
}

func (a *allocator) wasReleased(id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.released[id]
}

func (a *allocator) allocateCalls() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.allocates)
}

// Allocate reserves a place.
func (a *allocator) Allocate(_ context.Context, req *allocatorv1.AllocateRequest) (*allocatorv1.AllocateResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.allocates = append(a.allocates, req)
	if a.refuse != nil {
		return nil, rpc.ToStatus(a.refuse)
	}
	fence := &agentv1.Fence{SandboxUid: req.GetSandboxUid(), Attempt: req.GetAttempt()}
	uid := a.places[idOf(fence)]
	for _, candidate := range a.order {
		info := a.agents[candidate].info
		fits := a.meta[candidate].GetReady() && info.GetNamespace() == req.GetNamespace() && info.GetPool() == req.GetPool()
		if uid == "" && fits && !slices.Contains(req.GetExcludeAgents(), candidate) {
			uid = candidate
		}
	}
	if uid == "" {
		return nil, rpc.ToStatus(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "no place in pool %s", req.GetPool()).RetryIn(100 * time.Millisecond))
	}
	a.places[idOf(fence)] = uid
	fence.AgentUid = uid
	info := a.meta[uid].GetInfo()
	return &allocatorv1.AllocateResponse{Assignment: &allocatorv1.Assignment{
		Fence: fence, AgentPod: info.GetPodName(), NodeName: info.GetNodeName(), AgentAddress: a.meta[uid].GetAddress()}}, nil
}

// Release gives a place up.
func (a *allocator) Release(_ context.Context, req *allocatorv1.ReleaseRequest) (*allocatorv1.ReleaseResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.released[idOf(req.GetFence())] = true
	return &allocatorv1.ReleaseResponse{}, nil
}

// WatchAgents sends what there is and then every change.
func (a *allocator) WatchAgents(_ *allocatorv1.WatchAgentsRequest, s grpc.ServerStreamingServer[allocatorv1.WatchAgentsResponse]) error {
	events := make(chan *allocatorv1.WatchAgentsResponse, 1024)
	a.mu.Lock()
	for _, uid := range a.order {
		events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_AGENT, Agent: a.meta[uid], Sandboxes: a.agents[uid].all()}
	}
	events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED}
	a.watchers[events] = true
	a.mu.Unlock()
	defer func() { a.mu.Lock(); defer a.mu.Unlock(); delete(a.watchers, events) }()
	for {
		select {
		case <-s.Context().Done():
			return nil
		case e := <-events:
			if err := s.Send(e); err != nil {
				return err
			}
		}
	}
}
