package verdict

import "time"

// Kind is what a leftover is.
type Kind uint8

// The kinds of leftovers.
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
)

// String is the kind's name.
func (k Kind) String() string { return pick(int(k), "snapshot", "fifos", "mount", "cgroup", "log") }

// Remnant is something on the node that is named after a container of ours of which containerd has no record.
type Remnant struct {
	// ContainerID is the container that it is named after; Kind what it is.
	ContainerID string
	Kind        Kind
	// Since is for how long, without a break, this janitor has found it without a container.
	Since time.Duration
	// Agent is, of a log, what is known of the agent Pod that owns it.
	Agent Agent
	// Deleted tells, of a log, that this node's janitor deleted its container; DeletedAge is how long ago, or, where that is
	// not known, how long ago the log was written to for the last time.
	Deleted    bool
	DeletedAge time.Duration
}

// DecideRemnant judges a remnant. Everything but a log is made after its container's record, or a moment before it, and is
// nobody's once that is gone. A log is made long before, and by an agent that, as long as it lives, removes it itself.
func DecideRemnant(r Remnant, p Policy) Verdict {
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
	case r.Kind != Log && r.Since < p.LeftoverGrace:
		return Verdict{Wait, LeftoverYoung}
	}
	return Verdict{Delete, Leftover}
}
