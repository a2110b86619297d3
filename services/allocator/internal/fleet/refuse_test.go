package fleet_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// TestIdentityOfAnAgentIsItsPods: an agent that claims another namespace, pool or node gets no sandboxes of it.
func TestIdentityOfAnAgentIsItsPods(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	lie := &agentv1.AgentInfo{PodUid: "other", PodName: "pod-other", Namespace: "victim", Pool: "q", NodeName: "m", PodIp: "10.0.0.9", Capacity: 5, Version: "1"}
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: lie, Accepting: true})
	agent, ok := f.Agent("a")
	require.True(t, ok)
	want := info(5)
	want.Version, want.PodIp = "1", "10.0.0.9" // the Pod had no IP
	require.Equal(t, want.String(), agent.GetInfo().String())
	require.Empty(t, f.Agents("victim", ""))
	_, err := f.Reserve(registry.Request{Fence: identity.Fence{SandboxUID: "u", Attempt: 1}, Pool: registry.Pool{Namespace: "victim", Name: "q"}})
	require.Error(t, err)
	_, err = f.Reserve(registry.Request{Fence: identity.Fence{SandboxUID: "u", Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}})
	require.NoError(t, err)
}

// TestForeignReportsAreRefused: what an agent says of the containers of others reaches no component.
func TestForeignReportsAreRefused(t *testing.T) {
	tests := map[string]func(r *agentv1.SandboxRecord){
		"another namespace": func(r *agentv1.SandboxRecord) { r.Namespace = "victim" },
		"another agent":     func(r *agentv1.SandboxRecord) { r.Fence.AgentUid = "b" },
		"no agent":          func(r *agentv1.SandboxRecord) { r.Fence = nil },
		"another pool":      func(r *agentv1.SandboxRecord) { r.Spec.Pool = "q" },
	}
	for name, lie := range tests {
		t.Run(name, func(t *testing.T) {
			f, l, _ := newFleet()
			f.Joined(info(0), "10.0.0.1:1")
			forged := func() *agentv1.SandboxReport {
				r := report("forged", running, false)
				lie(r.GetRecord())
				return r
			}
			f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Sandboxes: []*agentv1.SandboxReport{report("own", running, false), forged()}})
			require.Equal(t, []string{"refused ns/pod-a report 1", "tombstones +0 -0", "all a 1"}, l.take())
			initial, w := f.Watch("", "")
			defer w.Close()
			require.Len(t, initial[0].GetSandboxes(), 1)
			f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{forged(), forged()}})
			require.Equal(t, []string{"refused ns/pod-a report 2"}, l.take())
			require.Empty(t, w.Events())
			require.Len(t, f.Unpersisted(), 1, "it is not adopted")
			agent, _ := f.Agent("a")
			require.EqualValues(t, 1, agent.GetAllocated())
		})
	}
}

// TestForeignTombstonesAreRefused: a tombstone deletes custom resources, so that an agent can only keep those of its own.
func TestForeignTombstonesAreRefused(t *testing.T) {
	tests := map[string]func(*agentv1.Tombstone){
		"another namespace": func(s *agentv1.Tombstone) { s.Namespace = "victim" },
		"another agent":     func(s *agentv1.Tombstone) { s.Fence.AgentUid = "b" },
	}
	for name, lie := range tests {
		t.Run(name, func(t *testing.T) {
			f, l, _ := newFleet()
			f.Joined(info(0), "10.0.0.1:1")
			forged := tombstone("forged")
			lie(forged)
			f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Tombstones: []*agentv1.Tombstone{tombstone("own"), forged}})
			require.Equal(t, []string{"refused ns/pod-a tombstone 1", "tombstones +1 -0", "all a 0"}, l.take())
			f.Delta("a", &agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{forged}})
			require.Equal(t, []string{"refused ns/pod-a tombstone 1"}, l.take())
			require.Len(t, f.Tombstones(), 1)
			require.False(t, f.HasTombstone(identity.FenceOf(forged.GetFence())))
		})
	}
}

// TestSuperseded: an attempt counts as superseded only under the name that its own agent reports, and only if it was never written.
func TestSuperseded(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Sandboxes: []*agentv1.SandboxReport{report("left", running, false), report("written", running, true)}})
	is := func(uid, agent, namespace, name string) bool {
		return f.Superseded(identity.Fence{SandboxUID: uid, Attempt: 1, AgentUID: agent}, namespace, name)
	}
	require.True(t, is("left", "a", "ns", "left"))
	require.False(t, is("left", "a", "ns", "other"), "the container of another name")
	require.False(t, is("left", "a", "victim", "left"))
	require.False(t, is("left", "b", "ns", "left"), "an unknown agent")
	require.False(t, is("written", "a", "ns", "written"), "a sandbox that a custom resource was written for")
}

// TestAddressOfAnAgentMayChange: its Pod, and what the Pod says, stay in force.
func TestAddressOfAnAgentMayChange(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5)})
	moved := info(0)
	moved.PodIp = "10.0.0.2"
	f.Joined(moved, "10.0.0.2:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5)})
	agent, _ := f.Agent("a")
	require.Equal(t, "10.0.0.2", agent.GetInfo().GetPodIp())
	require.Equal(t, "10.0.0.2:1", agent.GetAddress())
}
