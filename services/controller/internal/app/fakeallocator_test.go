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
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// allocator implements AllocatorService with a Registry of fake agents. It chooses the first agent that is ready and not
// excluded, and the same agent again for the same uid and attempt.
type allocator struct {
	allocatorv1.UnimplementedAllocatorServiceServer

	address string
	stop    func()

	mu               sync.Mutex
	order            []string // agents' uids
	agents           map[string]*agent
	meta             map[string]*allocatorv1.Agent
	reservations     map[string]string // container id -> agent uid
	allocates        []*allocatorv1.AllocateRequest
	released         map[string]bool
	watchers         map[chan *allocatorv1.WatchAgentsResponse]bool
	heartbeatTimeout time.Duration // sent with SYNCED
	// retained are reports that the Registry has although the agents do not, by the uid of the agent.
	retained map[string][]*agentv1.SandboxReport
	// refuse, while it is not nil, is the result of Allocate.
	refuse error
}

func startAllocator(t *testing.T) *allocator {
	t.Helper()
	a := &allocator{agents: map[string]*agent{}, meta: map[string]*allocatorv1.Agent{}, reservations: map[string]string{},
		released: map[string]bool{}, retained: map[string][]*agentv1.SandboxReport{}, watchers: map[chan *allocatorv1.WatchAgentsResponse]bool{}, heartbeatTimeout: time.Second}
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

// remove removes an agent, as the deletion of its Pod does.
func (a *allocator) remove(x *agent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE, uid, nil)
	delete(a.agents, uid)
	a.order = slices.DeleteFunc(a.order, func(s string) bool { return s == uid })
}

// setHeartbeat sets the time of the last heartbeat of an agent, and whether it is ready.
func (a *allocator) setHeartbeat(x *agent, since time.Time, ready bool) {
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

// setReserved sets the capacity of an agent that is in use.
func (a *allocator) setReserved(x *agent, n int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	m := proto.CloneOf(a.meta[uid])
	m.Allocated = n
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, uid, x.all())
}

// setSlots sets the slots of an agent. Like the allocator, it sends the agent without its sandboxes.
func (a *allocator) setSlots(x *agent, free, wanted int32, off string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	m := proto.CloneOf(a.meta[uid])
	m.FreeSlots, m.WantedSlots, m.SlotsOffReason = free, wanted, off
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, uid, nil)
}

// setPinned sets the pinned images of an agent.
func (a *allocator) setPinned(x *agent, images ...*agentv1.PinnedImage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	m := proto.CloneOf(a.meta[uid])
	m.PinnedImages = images
	a.meta[uid] = m
	a.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, uid, nil)
}

// setAccepting sets whether an agent accepts sandboxes. The agent may be missing in the Registry.
func (a *allocator) setAccepting(x *agent, draining bool) {
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

// changed receives reports of an agent. The agent may be missing in the Registry.
func (a *allocator) changed(x *agent, reports []*agentv1.SandboxReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.agents[x.info.GetPodUid()] == x {
		a.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, x.info.GetPodUid(), reports)
	}
}

// retain makes the Registry send a report to each new watcher, although the agent does not have it.
func (a *allocator) retain(x *agent, r *agentv1.SandboxReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid := x.info.GetPodUid()
	a.retained[uid] = append(a.retained[uid], r)
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

// Allocate implements allocatorv1.AllocatorServiceServer.
func (a *allocator) Allocate(_ context.Context, req *allocatorv1.AllocateRequest) (*allocatorv1.AllocateResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.allocates = append(a.allocates, req)
	if a.refuse != nil {
		return nil, rpc.ToStatus(a.refuse)
	}
	fence := &agentv1.Fence{SandboxUid: req.GetSandboxUid(), Attempt: req.GetAttempt()}
	uid := a.reservations[idOf(fence)]
	for _, candidate := range a.order {
		info := a.agents[candidate].info
		fits := a.meta[candidate].GetReady() && info.GetNamespace() == req.GetNamespace() && info.GetPool() == req.GetPool()
		if uid == "" && fits && !slices.Contains(req.GetExcludeAgents(), candidate) {
			uid = candidate
		}
	}
	if uid == "" {
		return nil, rpc.ToStatus(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "no capacity in pool %s", req.GetPool()).RetryIn(100 * time.Millisecond))
	}
	a.reservations[idOf(fence)] = uid
	fence.AgentUid = uid
	info := a.meta[uid].GetInfo()
	return &allocatorv1.AllocateResponse{Assignment: &allocatorv1.Assignment{
		Fence: fence, AgentPod: info.GetPodName(), NodeName: info.GetNodeName(), AgentAddress: a.meta[uid].GetAddress()}}, nil
}

// Release implements allocatorv1.AllocatorServiceServer.
func (a *allocator) Release(_ context.Context, req *allocatorv1.ReleaseRequest) (*allocatorv1.ReleaseResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.released[idOf(req.GetFence())] = true
	return &allocatorv1.ReleaseResponse{}, nil
}

// WatchAgents implements allocatorv1.AllocatorServiceServer.
func (a *allocator) WatchAgents(_ *allocatorv1.WatchAgentsRequest, s grpc.ServerStreamingServer[allocatorv1.WatchAgentsResponse]) error {
	events := make(chan *allocatorv1.WatchAgentsResponse, 1024)
	a.mu.Lock()
	for _, uid := range a.order {
		events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_AGENT, Agent: a.meta[uid],
			Sandboxes: append(a.agents[uid].all(), a.retained[uid]...)}
	}
	events <- &allocatorv1.WatchAgentsResponse{Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED, HeartbeatTimeout: durationpb.New(a.heartbeatTimeout)}
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
