package fakeagent

import (
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// SetSlots makes the agent have slots, which creates claim while there are any, and tells of them. It refills none by itself.
func (a *Agent) SetSlots(s *agentv1.SlotStatus) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.slots = proto.CloneOf(s)
	a.tell(&agentv1.AgentDelta{Slots: a.slots})
}

// claim takes a slot if one is free, and says which way the create goes.
func (a *Agent) claim() (agentv1.CreateStage, sandboxv1.StartPath) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.slots.GetFree() == 0 {
		return agentv1.CreateStage_CREATE_STAGE_TASK, sandboxv1.StartPath_START_PATH_COLD
	}
	a.slots = proto.CloneOf(a.slots)
	a.slots.Free--
	a.tell(&agentv1.AgentDelta{Slots: a.slots})
	return agentv1.CreateStage_CREATE_STAGE_CLAIM, sandboxv1.StartPath_START_PATH_SLOT
}
