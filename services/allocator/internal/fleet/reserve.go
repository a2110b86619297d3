package fleet

import (
	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// SharedPorts returns the ports that a sandbox takes from its agent's network: none without a network.
func SharedPorts(spec *sandboxv1.SandboxSpec) []int32 {
	if spec.GetNetwork() == sandboxv1.NetworkMode_NETWORK_MODE_NONE {
		return nil
	}
	return spec.GetPorts()
}

// Reserve reserves capacity on the best agent; see registry.Allocate for the rules and the errors. req.Image must be
// normalized.
func (f *Fleet) Reserve(req registry.Request) (*allocatorv1.Assignment, error) {
	uid, err := f.registry.Allocate(f.clock.Now(), req)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.agents[uid]
	if !ok { // it left between the two locks, and the registry is about to remove it
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the chosen agent was removed")
	}
	return &allocatorv1.Assignment{
		Fence:    &agentv1.Fence{SandboxUid: req.Fence.SandboxUID, Attempt: req.Fence.Attempt, AgentUid: uid},
		AgentPod: m.info.GetPodName(), NodeName: m.info.GetNodeName(), AgentAddress: m.address,
	}, nil
}

// Admit returns the error that Reserve would return now for a new sandbox that exceeds a quota of its namespace.
func (f *Fleet) Admit(namespace string, limits *sandboxv1.ResourceLimits) error {
	return f.registry.Admit(f.clock.Now(), namespace, Demand(limits))
}

// EndCreate ends that a sandbox counts against quotas because it is being created.
func (f *Fleet) EndCreate(sandboxUID string) { f.registry.EndCreate(sandboxUID) }

// Demand returns what quotas count of a sandbox's limits.
func Demand(limits *sandboxv1.ResourceLimits) registry.Demand {
	return registry.Demand{CPU: limits.GetCpuMillis(), Memory: limits.GetMemoryBytes()}
}

// Release cancels a reservation. It succeeds if there is none.
func (f *Fleet) Release(fence *agentv1.Fence) {
	f.registry.Release(f.clock.Now(), identity.FenceOf(fence))
}
