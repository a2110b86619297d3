package verdict

// Reason is the reason for a verdict. The set is closed: it labels metrics and is part of the API.
type Reason uint8

// The reasons. Each belongs to one action.
const (
	// NotManaged: it does not carry the label fast-sandbox.io/managed=true. Keep.
	NotManaged Reason = iota
	// Assigned: its custom resource is assigned to it. Keep.
	Assigned
	// SandboxTerminating: its custom resource is being deleted, which is up to the controller and the agent. Keep.
	SandboxTerminating
	// SandboxExpired: its custom resource has expired, which is up to the controller and the agent. Keep.
	SandboxExpired
	// SlotOfAgent: it is a slot of a living agent. Keep.
	SlotOfAgent
	// NotPersisted: it is not known that its custom resource was written. The allocator adopts or deletes it. Keep.
	NotPersisted
	// Unidentified: its labels are inconsistent, and its agent lives or is not named. Keep.
	Unidentified
	// AnotherCluster: the node runs its agent, which this API server does not know. Keep.
	AnotherCluster
	// AgentPodUnknown: the state of its agent's Pod is not known. Wait.
	AgentPodUnknown
	// SandboxUnknown: whether its custom resource exists is not known. Wait.
	SandboxUnknown
	// WithinGrace: its custom resource is absent, but not yet for the grace period. Wait.
	WithinGrace
	// CreateInFlight: its attempt is newer than the one that its custom resource knows. Wait.
	CreateInFlight
	// AssignmentUnreadable: the assignment of its custom resource cannot be parsed. Wait.
	AssignmentUnreadable
	// AgentPodGone: the Pod of its agent does not exist. Delete.
	AgentPodGone
	// SandboxAbsent: its custom resource was written and no longer exists. Delete.
	SandboxAbsent
	// SandboxReplaced: another sandbox has its name. Delete.
	SandboxReplaced
	// AttemptOver: its custom resource is at a later attempt, or has ended this one. Delete.
	AttemptOver
	// AssignedElsewhere: its custom resource assigns the same attempt to another agent. Delete.
	AssignedElsewhere
	// LeftoverYoung: a remnant that may belong to a create in progress. Wait.
	LeftoverYoung
	// LogOfAgent: a log without a container, of a living agent that removes it itself. Keep.
	LogOfAgent
	// LogRetained: the log of a deleted container, within its retention. Wait.
	LogRetained
	// Leftover: a remnant that no living component uses. Delete.
	Leftover
	// ShimOfAgent: a shim without a container, of a living agent that ends it itself. Keep.
	ShimOfAgent
)

// words are the names of the reasons in metrics and logs, and their actions.
var words = [...]struct { //nolint:gochecknoglobals // a constant
	name   string
	action Action
}{
	NotManaged:           {"not-managed", Keep},
	Assigned:             {"assigned", Keep},
	SandboxTerminating:   {"sandbox-terminating", Keep},
	SandboxExpired:       {"sandbox-expired", Keep},
	SlotOfAgent:          {"slot-of-agent", Keep},
	NotPersisted:         {"not-persisted", Keep},
	Unidentified:         {"unidentified", Keep},
	AnotherCluster:       {"another-cluster", Keep},
	AgentPodUnknown:      {"agent-pod-unknown", Wait},
	SandboxUnknown:       {"sandbox-unknown", Wait},
	WithinGrace:          {"within-grace", Wait},
	CreateInFlight:       {"create-in-flight", Wait},
	AssignmentUnreadable: {"assignment-unreadable", Wait},
	AgentPodGone:         {"agent-pod-gone", Delete},
	SandboxAbsent:        {"sandbox-absent", Delete},
	SandboxReplaced:      {"sandbox-replaced", Delete},
	AttemptOver:          {"attempt-over", Delete},
	AssignedElsewhere:    {"assigned-elsewhere", Delete},
	LeftoverYoung:        {"leftover-young", Wait},
	LogOfAgent:           {"log-of-agent", Keep},
	LogRetained:          {"log-retained", Wait},
	Leftover:             {"leftover", Delete},
	ShimOfAgent:          {"shim-of-agent", Keep},
}

// Reasons returns all reasons in their order.
func Reasons() []Reason {
	all := make([]Reason, len(words))
	for i := range all {
		all[i] = Reason(i)
	}
	return all
}

// String returns the reason's name in kebab-case.
func (r Reason) String() string {
	if int(r) >= len(words) {
		return "unknown"
	}
	return words[r].name
}

// Action returns the action of the reason.
func (r Reason) Action() Action {
	if int(r) >= len(words) {
		return Keep
	}
	return words[r].action
}

// String returns the action's name.
func (a Action) String() string { return pick(int(a), "keep", "wait", "delete") }

// String returns the state's name.
func (c Container) String() string { return pick(int(c), "running", "stopped", "created", "no-task") }

// String returns the state's name.
func (a Agent) String() string { return pick(int(a), "unknown", "alive", "gone", "foreign") }

// String returns the state's name.
func (s ResourceState) String() string {
	return pick(int(s), "unknown", "absent", "present", "terminating", "expired")
}

// String returns the outcome's name.
func (f Fence) String() string {
	return pick(int(f), "match", "other-sandbox", "older-attempt", "newer-attempt", "other-agent", "unreadable")
}

func pick(i int, names ...string) string {
	if i >= len(names) {
		return "invalid"
	}
	return names[i]
}
