// Package rpc serves allocator.v1.AllocatorService: the registry of agents for the controller, and the agents, pools and
// images for users. It owns no state. All methods may be called concurrently.
package rpc

import (
	"context"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/image"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// syncInterval is how often WatchAgents checks whether all agents have reported.
const syncInterval = 50 * time.Millisecond

// Agents finds the connections to agents.
type Agents interface {
	// Client returns the connection to an agent, and whether there is one now.
	Client(uid string) (agentv1.AgentServiceClient, bool)
}

// Sandboxes finds sandboxes.
type Sandboxes interface {
	// Locate returns where a sandbox runs, once it was created.
	Locate(ctx context.Context, namespace, name string) (*allocatorv1.Assignment, error)
}

// Config is what an Allocator needs.
type Config struct {
	Sandboxes Sandboxes
	Fleet     *fleet.Fleet
	Pools     *pools.Pools
	Agents    Agents
	Clock     clock.WithTicker
	// HeartbeatTimeout is the registry's. WatchAgents waits as long for the first report of an agent before it sends SYNCED.
	HeartbeatTimeout time.Duration
}

// Allocator implements allocatorv1.AllocatorServiceServer.
type Allocator struct {
	allocatorv1.UnimplementedAllocatorServiceServer
	config Config
}

// New returns the service.
func New(cfg Config) *Allocator { return &Allocator{config: cfg} }

// Allocate implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) Allocate(_ context.Context, req *allocatorv1.AllocateRequest) (*allocatorv1.AllocateResponse, error) {
	imageKey, err := image.Normalize(req.GetImage())
	if err != nil {
		return nil, fault.Field("image", "%v", err)
	}
	pool, err := a.pool(req.GetNamespace(), req.GetPool())
	if err != nil {
		return nil, err
	}
	defaults := convert.LimitsToProto(pool.Spec.SandboxResources)
	assignment, err := a.config.Fleet.Reserve(registry.Request{
		Fence: identity.Fence{SandboxUID: req.GetSandboxUid(), Attempt: req.GetAttempt()},
		Pool:  registry.Pool{Namespace: req.GetNamespace(), Name: req.GetPool()}, Image: imageKey, Ports: req.GetPorts(),
		Exclude: req.GetExcludeAgents(), Demand: fleet.Demand(convert.Effective(req.GetResources(), pool)),
	})
	if err != nil {
		return nil, err
	}
	return &allocatorv1.AllocateResponse{Assignment: assignment, DefaultResources: defaults}, nil
}

// LocateSandbox implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) LocateSandbox(ctx context.Context, req *allocatorv1.LocateSandboxRequest) (*allocatorv1.LocateSandboxResponse, error) {
	at, err := a.config.Sandboxes.Locate(ctx, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	return &allocatorv1.LocateSandboxResponse{Assignment: at}, nil
}

func (a *Allocator) pool(namespace, name string) (*v1alpha1.SandboxPool, error) {
	if pool, ok := a.config.Pools.Pool(namespace, name); ok {
		return pool, nil
	}
	if !a.config.Pools.Synced() {
		return nil, fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the Kubernetes API server cannot be reached").RetryIn(time.Second)
	}
	return nil, fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "pool %s/%s does not exist", namespace, name).With("pool", name)
}

// Release implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) Release(_ context.Context, req *allocatorv1.ReleaseRequest) (*allocatorv1.ReleaseResponse, error) {
	a.config.Fleet.Release(req.GetFence())
	return &allocatorv1.ReleaseResponse{}, nil
}

// ListAgents implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) ListAgents(_ context.Context, req *allocatorv1.ListAgentsRequest) (*allocatorv1.ListAgentsResponse, error) {
	return &allocatorv1.ListAgentsResponse{Agents: a.config.Fleet.Agents(req.GetNamespace(), req.GetPool())}, nil
}

// WatchAgents implements allocatorv1.AllocatorServiceServer. It sends SYNCED once every agent whose Pod is known has reported,
// or has had the time to: before that, a missing agent is no evidence.
func (a *Allocator) WatchAgents(req *allocatorv1.WatchAgentsRequest, stream grpc.ServerStreamingServer[allocatorv1.WatchAgentsResponse]) error {
	initial, watch := a.config.Fleet.Watch(req.GetNamespace(), req.GetPool())
	defer watch.Close()
	for _, m := range initial {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	ticker := a.config.Clock.NewTicker(syncInterval)
	defer ticker.Stop()
	for synced := false; ; {
		// The events are checked last, so that all that was published before goes out before SYNCED.
		if !synced && a.config.Pools.Synced() && a.config.Fleet.AllReported(a.config.HeartbeatTimeout) && len(watch.Events()) == 0 {
			if err := stream.Send(a.synced()); err != nil {
				return err
			}
			synced = true
			ticker.Stop()
			continue
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-ticker.C():
		case event, ok := <-watch.Events():
			if !ok {
				return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the watch was read too slowly; start a new one")
			}
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}

func (a *Allocator) synced() *allocatorv1.WatchAgentsResponse {
	return &allocatorv1.WatchAgentsResponse{
		Type: allocatorv1.WatchAgentsResponse_TYPE_SYNCED, HeartbeatTimeout: durationpb.New(a.config.HeartbeatTimeout),
	}
}

// ListPools implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) ListPools(_ context.Context, req *allocatorv1.ListPoolsRequest) (*allocatorv1.ListPoolsResponse, error) {
	if !a.config.Pools.Synced() {
		return nil, fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the Kubernetes API server cannot be reached").RetryIn(time.Second)
	}
	resp := &allocatorv1.ListPoolsResponse{}
	for _, pool := range a.config.Pools.List(req.GetNamespace()) {
		resp.Pools = append(resp.Pools, a.view(pool))
	}
	return resp, nil
}

// GetPool implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) GetPool(_ context.Context, req *allocatorv1.GetPoolRequest) (*allocatorv1.GetPoolResponse, error) {
	pool, err := a.pool(req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	return &allocatorv1.GetPoolResponse{Pool: a.view(pool)}, nil
}

func (a *Allocator) view(p *v1alpha1.SandboxPool) *allocatorv1.Pool {
	c := p.Spec.Capacity
	out := &allocatorv1.Pool{
		Namespace: p.Namespace, Name: p.Name, PoolMin: c.PoolMin, PoolMax: c.PoolMax, BufferMin: c.BufferMin, BufferMax: c.BufferMax,
		MaxSandboxesPerPod: p.Spec.MaxSandboxesPerPod, RuntimeHandler: p.Spec.RuntimeHandler,
		DefaultResources: convert.LimitsToProto(p.Spec.SandboxResources), CreateTime: timestamppb.New(p.CreationTimestamp.Time),
		Images: slices.Clone(p.Spec.Images), MaxResources: convert.LimitsToProto(p.Spec.MaxSandboxResources),
	}
	for _, c := range p.Spec.AddedCapabilities() {
		out.AddedCapabilities = append(out.AddedCapabilities, string(c))
	}
	if ttl := p.Spec.TTLAfterFinished; ttl != nil {
		out.TtlAfterFinished = durationpb.New(ttl.Duration)
	}
	if s := p.Spec.Slots; s != nil {
		out.SlotsMin, out.SlotsMax = copied(s.Min), copied(s.Max)
	}
	for _, agent := range a.config.Fleet.Agents(p.Namespace, p.Name) {
		out.Agents++
		out.Allocated += agent.GetAllocated()
		if agent.GetReady() {
			out.ReadyAgents++
			out.Capacity += agent.GetInfo().GetCapacity()
			out.FreeSlots += agent.GetFreeSlots()
			out.WantedSlots += agent.GetWantedSlots()
		}
	}
	return out
}

// copied returns a copy that shares no memory with the informer.
func copied(n *int32) *int32 {
	if n == nil {
		return nil
	}
	return proto.Int32(*n)
}
