// Package verdict judges containers: given what was observed, it decides whether one is kept, deleted, or judged again later, and
// why. It is pure: time, grace periods and observations are arguments; its callers observe and delete. All of it may be called
// concurrently.
//
// The order of the questions matters; the first that applies decides:
//
//	is it managed?                      no               -> keep
//	does its agent's Pod exist?         gone             -> delete, whatever else is true
//	                                    not known        -> wait
//	                                    foreign          -> keep: the node runs it, this API server does not know it
//	are its labels consistent?          no               -> keep: never guess
//	is it a slot?                       yes              -> keep: it is deleted with its agent
//	was its custom resource written?    not known        -> keep: the allocator adopts or deletes it, whatever its age
//	does the custom resource exist?     not known        -> wait
//	                                    absent           -> delete after the grace period, else wait
//	does the custom resource mean it?   another sandbox  -> delete
//	                                    an older attempt -> delete
//	                                    another agent    -> delete
//	                                    a newer attempt  -> wait: a create whose assignment was not observed yet
//	                                    unreadable       -> wait
//	                                    yes              -> keep: the controller and the agent end it
//
// Missing knowledge is never evidence: a Delete stands whatever the unknown parts of an observation turn out to be.
package verdict

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Observation is what is known about one managed container. The zero value of every field is the one that deletes nothing.
type Observation struct {
	// ContainerID is the container's id in containerd.
	ContainerID string
	// Managed reports whether it carries the label fast-sandbox.io/managed=true. Nothing else is ever deleted.
	Managed bool
	// Identity is read from its labels. If they are inconsistent, only AgentUID is set, if that can be read.
	Identity identity.Identity
	// Defect says why the labels are inconsistent; empty if they are consistent.
	Defect string
	// Container is the state of its task.
	Container Container
	// Age is the time since its record was created, by the node's clock. It may jump, and may be negative.
	Age time.Duration
	// Agent is the state of the Pod that AgentUID names.
	Agent Agent
	// Resource is the custom resource with its namespace and name.
	Resource Resource
	// Missing is how long this janitor has found Resource absent, without interruption, by a monotonic clock.
	Missing time.Duration
}

// Container is the state of a container's task.
type Container uint8

// The states of a container. An unknown one counts as running.
const (
	// Running: its task runs.
	Running Container = iota
	// Stopped: the process of its task has ended.
	Stopped
	// Created: its task was never started.
	Created
	// NoTask: it has only a record: before its task is created, and after its end was recorded.
	NoTask
)

// Agent is the state of the Pod of a container's agent.
type Agent uint8

// The states of an agent's Pod.
const (
	// AgentUnknown: not known.
	AgentUnknown Agent = iota
	// AgentAlive: the API server has the Pod, terminating or not.
	AgentAlive
	// AgentGone: the API server does not have the Pod, and either this janitor has observed it there before or the node runs none of
	// its containers.
	AgentGone
	// AgentForeign: the API server does not have the Pod and, as far as this janitor knows, never had it, but the node runs it: it
	// belongs to another cluster.
	AgentForeign
)

// Resource is the custom resource with a container's namespace and name.
type Resource struct {
	State ResourceState
	// UID is its effective uid.
	UID string
	// Attempt is the last attempt in its status; zero if only metadata was read, which happens only with an assignment.
	Attempt int64
	// Assignment is where it runs; nil if it is not assigned. Unreadable reports an assignment that cannot be parsed.
	Assignment *Assignment
	Unreadable bool
}

// Assignment is the assignment of a custom resource.
type Assignment struct {
	AgentUID string
	Attempt  int64
}

// ResourceState is the state of a custom resource.
type ResourceState uint8

// The states of a custom resource.
const (
	// ResourceUnknown: not known.
	ResourceUnknown ResourceState = iota
	// ResourceAbsent: it does not exist.
	ResourceAbsent
	// ResourcePresent: it exists.
	ResourcePresent
	// ResourceTerminating: it exists and is being deleted.
	ResourceTerminating
	// ResourceExpired: it exists and has expired.
	ResourceExpired
)

// Policy is the configuration of verdicts.
type Policy struct {
	// Grace is the minimum age of a container, and the minimum time for which its custom resource must be missing, before deletion.
	Grace time.Duration
	// LeftoverGrace is how long a remnant must have had no container before it is removed: longer than a create takes between the
	// two.
	LeftoverGrace time.Duration
	// LogRetention is how long the output of a container is kept after the container was deleted.
	LogRetention time.Duration
}

// Action is what to do with a thing.
type Action uint8

// The actions.
const (
	// Keep: it is in use, or not the janitor's.
	Keep Action = iota
	// Wait: judge it again later.
	Wait
	// Delete: it is an orphan.
	Delete
)

// Verdict is what to do with one thing, and why.
type Verdict struct {
	Action Action
	Reason Reason
}

// Fence is the result of comparing a container with the custom resource of its name.
type Fence uint8

// The results.
const (
	// FenceMatch: the custom resource is assigned to this container.
	FenceMatch Fence = iota
	// FenceOtherSandbox: the custom resource belongs to another sandbox of the same name.
	FenceOtherSandbox
	// FenceOlder: the custom resource is at a later attempt, or the container's attempt has ended.
	FenceOlder
	// FenceNewer: the container's attempt is newer than the one that the custom resource knows.
	FenceNewer
	// FenceOtherAgent: the custom resource assigns the same attempt to another agent.
	FenceOtherAgent
	// FenceUnreadable: the assignment cannot be parsed.
	FenceUnreadable
)

// Compare compares a claimed container with the existing custom resource of its namespace and name.
func Compare(id identity.Identity, r Resource) Fence {
	switch {
	case r.UID != id.SandboxUID:
		return FenceOtherSandbox
	case r.Unreadable:
		return FenceUnreadable
	case r.Assignment == nil && id.Attempt <= r.Attempt:
		// An assignment is cleared after its container was removed or given up as lost; by then its attempt is in the status.
		return FenceOlder
	case r.Assignment == nil, id.Attempt > r.Assignment.Attempt:
		return FenceNewer
	case id.Attempt < r.Assignment.Attempt:
		return FenceOlder
	case id.AgentUID != r.Assignment.AgentUID:
		return FenceOtherAgent
	}
	return FenceMatch
}

// Decide judges a container. Before it acts on Delete, a caller must observe everything again, from the API server itself, and
// decide again.
func Decide(o Observation, p Policy) Verdict {
	if !o.Managed {
		return Verdict{Keep, NotManaged}
	}
	if o.Identity.AgentUID == "" {
		return Verdict{Keep, Unidentified}
	}
	switch o.Agent {
	case AgentGone:
		return Verdict{Delete, AgentPodGone}
	case AgentForeign:
		return Verdict{Keep, AnotherCluster}
	case AgentAlive:
		return decideAlive(o, p)
	default:
		return Verdict{Wait, AgentPodUnknown}
	}
}

// decideAlive judges a container whose agent's Pod exists.
func decideAlive(o Observation, p Policy) Verdict {
	switch {
	case o.Defect != "":
		return Verdict{Keep, Unidentified}
	case o.Identity.State == identity.StateSlot:
		return Verdict{Keep, SlotOfAgent}
	case !o.Identity.Persisted:
		return Verdict{Keep, NotPersisted}
	}
	switch o.Resource.State {
	case ResourceAbsent:
		if o.Age < p.Grace || o.Missing < p.Grace {
			return Verdict{Wait, WithinGrace}
		}
		return Verdict{Delete, SandboxAbsent}
	case ResourcePresent, ResourceTerminating, ResourceExpired:
		return decideFence(o)
	default:
		return Verdict{Wait, SandboxUnknown}
	}
}

// decideFence judges a persisted container of a living agent for which a custom resource exists.
func decideFence(o Observation) Verdict {
	switch Compare(o.Identity, o.Resource) {
	case FenceOtherSandbox:
		return Verdict{Delete, SandboxReplaced}
	case FenceOlder:
		return Verdict{Delete, AttemptOver}
	case FenceOtherAgent:
		return Verdict{Delete, AssignedElsewhere}
	case FenceNewer:
		return Verdict{Wait, CreateInFlight}
	case FenceUnreadable:
		return Verdict{Wait, AssignmentUnreadable}
	}
	switch o.Resource.State {
	case ResourceTerminating:
		return Verdict{Keep, SandboxTerminating}
	case ResourceExpired:
		return Verdict{Keep, SandboxExpired}
	}
	return Verdict{Keep, Assigned}
}
