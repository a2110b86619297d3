package verdict

import "time"

// Kind is the kind of a remnant.
type Kind uint8

// The kinds of remnants.
const (
	// Snapshot of a root file system.
	Snapshot Kind = iota
	// FIFOs of a process's standard streams.
	FIFOs
	// Mount of a root file system.
	Mount
	// Cgroup of a container.
	Cgroup
	// Log directory.
	Log
	// Bundle of a task.
	Bundle
	// Shim of ours that no container is in. It is named after its anchor.
	Shim
	// Range of user ids.
	Range
)

// String returns the kind's name.
func (k Kind) String() string {
	return pick(int(k), "snapshot", "fifos", "mount", "cgroup", "log", "bundle", "shim", "range")
}

// Remnant is something on the node that is named after a container of which containerd has no record.
type Remnant struct {
	// ContainerID is the container after which it is named; Kind is its kind.
	ContainerID string
	Kind        Kind
	// Since is how long this janitor has found it without a container, without interruption.
	Since time.Duration
	// Agent is the state of the agent Pod that owns it; unknown if its owner is not known.
	Agent Agent
	// Deleted reports, for a log, whether this node's janitor deleted its container; DeletedAge is how long ago or, if that is not
	// known, how long ago the log was last written to.
	Deleted    bool
	DeletedAge time.Duration
}

// DecideRemnant judges a remnant. Everything but a log is created after its container's record, or shortly before it, and is unused
// once the record is gone: the grace period is for a create in progress, which the end of its agent ends too. A log is created long
// before its container, by an agent that removes it itself as long as it lives. So is a shim, which the next create may join.
func DecideRemnant(r Remnant, p Policy) Verdict {
	if r.Kind == Shim {
		switch r.Agent {
		case AgentGone:
			return Verdict{Delete, Leftover}
		case AgentAlive:
			return Verdict{Keep, ShimOfAgent}
		case AgentForeign:
			return Verdict{Keep, AnotherCluster}
		default:
			return Verdict{Wait, AgentPodUnknown}
		}
	}
	if r.Kind == Log && !r.Deleted {
		switch r.Agent {
		case AgentGone:
		case AgentAlive:
			return Verdict{Keep, LogOfAgent}
		case AgentForeign:
			return Verdict{Keep, AnotherCluster}
		default:
			return Verdict{Wait, AgentPodUnknown}
		}
	}
	switch {
	case r.Kind == Log && r.DeletedAge < p.LogRetention:
		return Verdict{Wait, LogRetained}
	case r.Kind != Log && r.Agent != AgentGone && r.Since < p.LeftoverGrace:
		return Verdict{Wait, LeftoverYoung}
	}
	return Verdict{Delete, Leftover}
}
