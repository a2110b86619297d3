package identity

import "fmt"

// Fence names one container of one sandbox on one agent. Every operation on a container carries it, and a mismatch is
// refused. The zero value names nothing. It is comparable, so it is the key wherever containers are indexed; agent.v1 has
// the message of the same name.
type Fence struct {
	// SandboxUID is the incarnation of the sandbox.
	SandboxUID string
	// Attempt counts the sandbox's containers from 1.
	Attempt int64
	// AgentUID is the uid of the agent Pod.
	AgentUID string
}

// FenceMessage is a protobuf message that carries a fence. agent.v1.Fence implements it; so does a nil one, which is the
// zero Fence.
type FenceMessage interface {
	GetSandboxUid() string
	GetAttempt() int64
	GetAgentUid() string
}

// FenceOf returns the fence that a message carries.
func FenceOf(m FenceMessage) Fence {
	return Fence{SandboxUID: m.GetSandboxUid(), Attempt: m.GetAttempt(), AgentUID: m.GetAgentUid()}
}

// Fence returns the fence of a claimed container; that of a slot names no sandbox.
func (i Identity) Fence() Fence {
	return Fence{SandboxUID: i.SandboxUID, Attempt: i.Attempt, AgentUID: i.AgentUID}
}

// ContainerID returns the id of the sandbox's container in containerd, unless it was started as a slot.
func (f Fence) ContainerID() string { return containerID(f.SandboxUID, f.Attempt) }

// String formats the fence for logs.
func (f Fence) String() string {
	return fmt.Sprintf("%s-%d@%s", f.SandboxUID, f.Attempt, f.AgentUID)
}
