package verdict

// Reason says why a verdict is what it is. The set is closed: it labels metrics and is part of the API.
type Reason uint8

// The reasons. Each belongs to one action.
const (
	// NotManaged: it does not carry our label. Keep.
	NotManaged Reason = iota
	// Assigned: its custom resource means it. Keep.
	Assigned
	// SandboxTerminating: its custom resource means it and is being deleted, which is the controller's and the agent's to do. Keep.
	SandboxTerminating
	// SandboxExpired: its custom resource means it and its time is up, which is the controller's and the agent's to see to. Keep.
	SandboxExpired
	// SlotOfAgent: it is a slot, and its agent lives. Keep.
	SlotOfAgent
	// NotPersisted: nobody has said yet that its custom resource was written: the allocator adopts or deletes it. Keep.
	NotPersisted
	// Unidentified: its labels do not add up, and its agent lives or is not named. Keep.
	Unidentified
	// AnotherCluster: the node runs its agent, of which this API server does not know. Keep.
	AnotherCluster
	// AgentPodUnknown: nobody can say whether its agent's Pod lives. Wait.
	AgentPodUnknown
	// SandboxUnknown: nobody can say whether its custom resource is there. Wait.
	SandboxUnknown
	// WithinGrace: its custom resource is absent, not for long enough. Wait.
	WithinGrace
	// CreateInFlight: it is of an attempt that its custom resource does not know yet. Wait.
	CreateInFlight
	// AssignmentUnreadable: its custom resource says where it runs in words that cannot be read. Wait.
	AssignmentUnreadable
	// AgentPodGone: the Pod of its agent is no more. Delete.
	AgentPodGone
	// SandboxAbsent: its custom resource was written and is no more. Delete.
	SandboxAbsent
	// SandboxReplaced: another sandbox has its name. Delete.
	SandboxReplaced
	// AttemptOver: its custom resource means a later attempt, or has done with this one. Delete.
	AttemptOver
	// AssignedElsewhere: its custom resource means the same attempt on another agent. Delete.
	AssignedElsewhere
	// LeftoverYoung: something without a container, which a create may be about to make. Wait.
	LeftoverYoung
	// LogOfAgent: output of no container, of an agent that lives and sees to it. Keep.
	LogOfAgent
	// LogRetained: output of a container that was deleted, within the time for which it is kept. Wait.
	LogRetained
	// Leftover: something without a container that belongs to nothing alive. Delete.
	Leftover
)

// words are the reasons as metrics, logs and people see them, and the action that each goes with.
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
}

// Reasons are all reasons, in their order.
func Reasons() []Reason {
	all := make([]Reason, len(words))
	for i := range all {
		all[i] = Reason(i)
	}
	return all
}

// String is the reason's name, in kebab-case.
func (r Reason) String() string {
	if int(r) >= len(words) {
		return "unknown"
	}
	return words[r].name
}

// Action is the action that the reason goes with.
func (r Reason) Action() Action {
	if int(r) >= len(words) {
		return Keep
	}
	return words[r].action
}

// String is the action's name.
func (a Action) String() string { return pick(int(a), "keep", "wait", "delete") }

// String is the state's name.
func (c Container) String() string { return pick(int(c), "running", "stopped", "created", "no-task") }

// String is the state's name.
func (a Agent) String() string { return pick(int(a), "unknown", "alive", "gone", "foreign") }

// String is the state's name.
func (s ResourceState) String() string {
	return pick(int(s), "unknown", "absent", "present", "terminating", "expired")
}

// String is the outcome's name.
func (f Fence) String() string {
	return pick(int(f), "match", "other-sandbox", "older-attempt", "newer-attempt", "other-agent", "unreadable")
}

func pick(i int, names ...string) string {
	if i >= len(names) {
		return "invalid"
	}
	return names[i]
}
