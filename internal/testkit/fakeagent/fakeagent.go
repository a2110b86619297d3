// Package fakeagent is a scriptable AgentService in memory, for tests. It keeps the contract of agent_service.proto (fences,
// tombstones, terms, capacity, the status stream) without containers, and passes internal/testkit/agentconformance. Its
// exported fields are set before it serves; all methods may be called concurrently.
package fakeagent

import (
	"context"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Agent is one fake agent: what a test scripts, changes and reads.
type Agent struct {
	// OnCreate runs after admission and may fail the create; it gets the call's context.
	OnCreate func(ctx context.Context, r *agentv1.SandboxRecord) error
	// OnStarted runs between the start of the process and its answer. An error breaks the stream with the sandbox running.
	OnStarted func(ctx context.Context, r *agentv1.SandboxRecord) error
	// OnDelete runs before a deletion and may fail it.
	OnDelete func(ctx context.Context, f *agentv1.Fence) error
	// OnRemove runs in a deletion, after its tombstone is kept and SIGTERM is sent, and before the container is removed.
	OnRemove func(f *agentv1.Fence)
	// OnMark runs before a sandbox is marked persisted and may fail that.
	OnMark func(ctx context.Context, f *agentv1.Fence) error
	// OnPull runs in a pull and may fail it.
	OnPull func(ctx context.Context, image string) error
	// Wrap, if set, returns the service that is served in place of the agent's own, for a test that records or fails calls.
	Wrap func(own agentv1.AgentServiceServer) agentv1.AgentServiceServer
	// Heartbeat is the interval of the status stream.
	Heartbeat time.Duration
	// Skip makes the status stream skip a number after its snapshot, once.
	Skip bool

	info *agentv1.AgentInfo

	mu         sync.Mutex
	sandboxes  map[identity.Fence]*agentv1.SandboxReport // immutable values
	deleted    map[identity.Fence]bool                   // containers that must not be created
	tombstones map[identity.Fence]*agentv1.Tombstone     // immutable values
	images     []string
	pinned     []*agentv1.PinnedImage // immutable values
	accepting  bool
	slots      *agentv1.SlotStatus // immutable value; nil: it has no slots
	terms      map[rpc.Role]int64  // the highest of each kind of caller
	watchers   map[chan *agentv1.AgentDelta]struct{}

	// What the test reads.
	creates, watches, superseded, forgotten int
	deletes                                 []*agentv1.Fence
	deleteRequests                          []*agentv1.DeleteSandboxRequest
}

// New returns an agent with the info's capacity and the images.
func New(info *agentv1.AgentInfo, images ...string) *Agent {
	return &Agent{
		info: info, images: images, accepting: true, Heartbeat: 50 * time.Millisecond,
		sandboxes: map[identity.Fence]*agentv1.SandboxReport{}, deleted: map[identity.Fence]bool{},
		tombstones: map[identity.Fence]*agentv1.Tombstone{}, terms: map[rpc.Role]int64{},
		watchers: map[chan *agentv1.AgentDelta]struct{}{},
	}
}

// Serve serves on a listener until ctx ends.
func (a *Agent) Serve(ctx context.Context, l net.Listener, tls rpc.TLS) error {
	service := &service{Agent: a}
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Listener: l, TLS: tls, DrainTimeout: 10 * time.Millisecond, Guard: service.guard,
		Allow: map[string][]rpc.Role{agentv1.AgentService_ServiceDesc.ServiceName: {rpc.RoleAllocator, rpc.RoleController}},
	})
	if err != nil {
		return err
	}
	var served agentv1.AgentServiceServer = service
	if a.Wrap != nil {
		served = a.Wrap(service)
	}
	agentv1.RegisterAgentServiceServer(server, served)
	return server.Run(ctx)
}

// setReport keeps a report and publishes it. mu is held.
func (a *Agent) setReport(r *agentv1.SandboxReport) {
	fence := identity.FenceOf(r.GetRecord().GetFence())
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		delete(a.sandboxes, fence)
	} else {
		a.sandboxes[fence] = r
	}
	a.publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{r}})
}

// publish sends a change to all watchers. mu is held.
func (a *Agent) publish(d *agentv1.AgentDelta) {
	for w := range a.watchers {
		w <- d
	}
}

// remove removes a container and publishes its end.
func (a *Agent) remove(fence identity.Fence) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r, ok := a.sandboxes[fence]; ok {
		r = proto.CloneOf(r)
		r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
		a.setReport(r)
	}
}

// Stop ends the processes of a sandbox with an exit code.
func (a *Agent) Stop(uid string, code int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for fence, r := range a.sandboxes {
		if fence.SandboxUID == uid {
			r = proto.CloneOf(r)
			r.State, r.ExitCode, r.FinishTime = agentv1.SandboxState_SANDBOX_STATE_STOPPED, proto.Int32(code), timestamppb.Now()
			a.setReport(r)
		}
	}
}

// Put adds a sandbox, as if a former allocator had created it.
func (a *Agent) Put(r *agentv1.SandboxReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.setReport(r)
}

// Sandboxes returns the reports of all sandboxes, in no order.
func (a *Agent) Sandboxes() []*agentv1.SandboxReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.sandboxes))
}

// SetSlots sets the slots and publishes them. Creates claim them while there are any; nothing refills them.
func (a *Agent) SetSlots(s *agentv1.SlotStatus) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.slots = proto.CloneOf(s)
	a.publish(&agentv1.AgentDelta{Slots: a.slots})
}
