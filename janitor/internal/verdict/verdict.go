// Package verdict judges containers: given what was observed of one, is it kept, waited with, or deleted, and why. It is
// pure: time, grace and every observation are arguments, and whoever calls it does the looking and the deleting. All of it
// may be called concurrently.
//
// The order of the questions is the whole of it; the first that applies answers:
//
//	is it ours at all?                  no               -> keep
//	does its agent's Pod live?          gone             -> delete, whatever else is true
//	                                    not known        -> wait
//	                                    of others        -> keep: the node runs it, this API server does not know it
//	do its labels say who it is?        no               -> keep: nobody guesses
//	is it a slot?                       yes              -> keep: it dies with its agent
//	was its custom resource written?    not to be known  -> keep: the allocator adopts or deletes it, however old it is
//	is the custom resource there?       not known        -> wait
//	                                    absent           -> delete past the grace, else wait
//	is it the one that is meant?        another sandbox  -> delete
//	                                    an older attempt -> delete
//	                                    another agent's  -> delete
//	                                    a newer attempt  -> wait: a create whose assignment was not seen yet
//	                                    not to be read   -> wait
//	                                    yes              -> keep: what ends it is the controller's and the agent's to do
//
// No unknown is ever evidence: a Delete stands whatever the unknown parts of an observation turn out to be.
package verdict

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Observation is what is known of one container that carries our label. The zero value of every part is the one that deletes
// nothing.
type Observation struct {
	// ContainerID is the container's id in containerd.
	ContainerID string
	// Managed tells that it carries the label fast-sandbox.io/managed=true. Nothing without it is ever touched.
	Managed bool
	// Identity is what its labels say. If they do not add up, all but AgentUID (where that is to be read) is empty.
	Identity identity.Identity
	// Defect says why the labels do not add up; empty if they do.
	Defect string
	// Container is what runs of it.
	Container Container
	// Age is the time since its record was made, by the node's clock: it may jump, and is negative then.
	Age time.Duration
	// Agent is what is known of the agent Pod that AgentUID names.
	Agent Agent
	// Resource is what is known of the custom resource of its namespace and name.
	Resource Resource
	// Missing is for how long, without a break and by a clock that does not jump, this janitor has found Resource absent.
	Missing time.Duration
}

// Container is what runs of a container.
type Container uint8

// The states of a container. What cannot be told counts as running.
const (
	// Running has a task that runs.
	Running Container = iota
	// Stopped has a task whose process has ended.
	Stopped
	// Created has a task that was never started.
	Created
	// NoTask has a record alone: before its task is made, and after its end was written down.
	NoTask
)

// Agent is what is known of the Pod of a container's agent.
type Agent uint8

// The states of an agent's Pod.
const (
	// AgentUnknown: nobody can say now.
	AgentUnknown Agent = iota
	// AgentAlive: the API server has the Pod, terminating or not.
	AgentAlive
	// AgentGone: the API server does not have the Pod, and either this janitor has seen it there before or the node runs none
	// of that uid.
	AgentGone
	// AgentForeign: the API server does not have the Pod and never had it, as far as this janitor knows, and the node runs it:
	// it is another cluster's.
	AgentForeign
)

// Resource is what is known of the custom resource that has a container's namespace and name.
type Resource struct {
	State ResourceState
	// UID is the effective uid of what is there.
	UID string
	// Attempt is the last one that its status knows; zero where only metadata was read, which are read with an assignment.
	Attempt int64
	// Assignment says where it runs; nil for nowhere. Unreadable tells that there is one that cannot be read.
	Assignment *Assignment
	Unreadable bool
}

// Assignment is where the custom resource says that its sandbox runs.
type Assignment struct {
	AgentUID string
	Attempt  int64
}

// ResourceState is what state a custom resource is in.
type ResourceState uint8

// The states of a custom resource.
const (
	// ResourceUnknown: the API server does not say.
	ResourceUnknown ResourceState = iota
	// ResourceAbsent: there is none of the namespace and name.
	ResourceAbsent
	// ResourcePresent: there is one.
	ResourcePresent
	// ResourceTerminating: there is one that is being deleted.
	ResourceTerminating
	// ResourceExpired: there is one whose time was up.
	ResourceExpired
)

// Policy is what a janitor is set to.
type Policy struct {
	// Grace is how old a container has to be, and for how long its custom resource has to be missing, before it is deleted.
	Grace time.Duration
	// LeftoverGrace is for how long something must have had no container before it is removed: longer than any create takes
	// between the two.
	LeftoverGrace time.Duration
	// LogRetention is for how long the output of a container is kept after the container was deleted.
	LogRetention time.Duration
}

// Action is what is to be done.
type Action uint8

// The actions.
const (
	// Keep: it is as it should be, or not the janitor's.
	Keep Action = iota
	// Wait: it is to be looked at again.
	Wait
	// Delete: it is an orphan.
	Delete
)

// Verdict is what is to be done with one thing, and why.
type Verdict struct {
	Action Action
	Reason Reason
}

// Fence is how a container compares with the custom resource of its name.
type Fence uint8

// The outcomes of the comparison.
const (
	// FenceMatch: it is the container that the custom resource means.
	FenceMatch Fence = iota
	// FenceOtherSandbox: the custom resource is of another sandbox of the same name.
	FenceOtherSandbox
	// FenceOlder: the custom resource means a later attempt, or the container's attempt is over.
	FenceOlder
	// FenceNewer: the container is of an attempt that the custom resource does not know yet.
	FenceNewer
	// FenceOtherAgent: the custom resource means the same attempt on another agent.
	FenceOtherAgent
	// FenceUnreadable: where the sandbox runs cannot be read.
	FenceUnreadable
)

// Compare compares a claimed container with the custom resource of its namespace and name, which is there.
func Compare(id identity.Identity, r Resource) Fence {
	switch {
	case r.UID != id.SandboxUID:
		return FenceOtherSandbox
	case r.Unreadable:
		return FenceUnreadable
	case r.Assignment == nil && id.Attempt <= r.Attempt:
		// An assignment is cleared after its container was removed, or given up for lost, and its number is in the status by then.
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

// Decide judges a container. Deciding Delete, a caller has to look again at all of it, at the API server itself, and decide
// anew before anything is done.
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

// decideAlive judges a container whose agent's Pod lives.
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

// decideFence judges a container whose agent lives and whose custom resource was written, when one of its name is there.
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
