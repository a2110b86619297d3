// Package audit judges a run of the fault harness: it holds what clients were told (the log) against what is there (the
// custom resources, the agents' reports, containerd) and says what was lost, leaked, duplicated or is stuck. It talks to
// nobody. Pure; everything may be called concurrently on values that nobody changes.
package audit

import "time"

// Op is what a call asks for.
type Op string

// The operations.
const (
	Create Op = "create"
	Update Op = "update"
	Delete Op = "delete"
)

// Outcome is what a client knows of a call in the end.
type Outcome string

// The outcomes.
const (
	// Acked: the server said that it is done.
	Acked Outcome = "acked"
	// Refused: the server said, typed, that it is not done and will not be.
	Refused Outcome = "refused"
	// Unknown: no answer, however often it was repeated.
	Unknown Outcome = "unknown"
)

// Reasons by which a server denies that a sandbox exists.
const (
	reasonNotFound      = "SANDBOX_NOT_FOUND"
	reasonFenceMismatch = "FENCE_MISMATCH"
)

// Spec is what a create asks for, as far as an audit needs it.
type Spec struct {
	// ExpireTime is zero for a sandbox that does not expire.
	ExpireTime time.Time `json:"expireTime,omitzero"`
	// AutoRecreate is the failure policy; Manual otherwise.
	AutoRecreate bool `json:"autoRecreate,omitempty"`
	// Exit is the code with which the process ends by itself; nil if it runs on.
	Exit *int32 `json:"exit,omitempty"`
}

// Change is what an update asks for. What is nil stays.
type Change struct {
	// Label is the value of the label that updates set.
	Label *string `json:"label,omitempty"`
	// ExpireTime moves the expire time; a zero time removes it.
	ExpireTime *time.Time `json:"expireTime,omitempty"`
	// AutoRecreate sets the failure policy.
	AutoRecreate *bool `json:"autoRecreate,omitempty"`
	// Reset is a new reset revision.
	Reset *time.Time `json:"reset,omitempty"`
}

// Call is one line of the clients' log: one operation with all its repetitions.
type Call struct {
	// Life is the number of the sandbox that is meant. All creates of one life carry the same RequestID.
	Life      int       `json:"life"`
	Op        Op        `json:"op"`
	Name      string    `json:"name"`
	RequestID string    `json:"requestID"`
	Sent      time.Time `json:"sent"`
	Answered  time.Time `json:"answered,omitzero"`
	Outcome   Outcome   `json:"outcome"`
	// Tries counts how often it was sent; Unsure tells that one of the tries had no answer, or that an answer
	// said that the outcome is not known.
	Tries  int  `json:"tries"`
	Unsure bool `json:"unsure,omitempty"`
	// UID of the sandbox, and the Pod of its agent, as a create's answer tells.
	UID   string `json:"uid,omitempty"`
	Agent string `json:"agent,omitempty"`
	// Reason and Message of the last error, also one that a repetition got over; Earlier are the reasons before it, each
	// once.
	Reason  string   `json:"reason,omitempty"`
	Message string   `json:"message,omitempty"`
	Earlier []string `json:"earlier,omitempty"`
	// Spec of a create; Change of an update.
	Spec   Spec   `json:"spec,omitzero"`
	Change Change `json:"change,omitzero"`
}

// Strike is one fault that was carried out.
type Strike struct {
	Kind   string        `json:"kind"`
	At     time.Time     `json:"at"`
	Lasted time.Duration `json:"lasted,omitempty"`
	Target string        `json:"target,omitempty"`
	// AgentUID and AgentPod are set if an agent's Pod was killed.
	AgentUID string `json:"agentUID,omitempty"`
	AgentPod string `json:"agentPod,omitempty"`
	// Failed tells why it could not be carried out.
	Failed string `json:"failed,omitempty"`
}

// Resource is a custom resource.
type Resource struct {
	Name, UID, RequestID string
	Phase                string
	Attempt              int64
	AgentUID             string
	Deleting             bool
	AgentLost, Finished  bool
	ExitCode             *int32
	AutoRecreate         bool
	ExpireTime           time.Time
	Label                string
	AcceptedReset        time.Time
	// Dump is all of it, for people.
	Dump string
}

// Report is a living agent's word on a sandbox.
type Report struct {
	AgentUID, Name, UID, RequestID string
	Attempt                        int64
	State                          string
	Persisted                      bool
	Dump                           string
}

// Container is a container of ours in containerd.
type Container struct {
	ID, Name, UID, RequestID string
	Attempt                  int64
	AgentUID                 string
	// Running tells that its task runs; Slot that it is nobody's yet.
	Running, Slot bool
	// Broken tells why its labels do not add up.
	Broken string
	Dump   string
}

// Remnant is something of a container that is no more, or never came to be. AgentUID is empty where nothing tells it.
type Remnant struct{ Kind, ID, UID, AgentUID string }

// Tombstone is a deletion that an agent still remembers.
type Tombstone struct{ AgentUID, Name, UID string }

// Observations are the three truths, read at about one time.
type Observations struct {
	At         time.Time
	Resources  []Resource
	Reports    []Report
	Tombstones []Tombstone
	Containers []Container
	Remnants   []Remnant
	// Agents are the uids of the agent Pods that exist.
	Agents map[string]bool
	// Places is how many places the allocator holds for taken on each agent, by the uid of its Pod. Assigned is how many
	// sandboxes the pool's status counts.
	Places   map[string]int
	Assigned int
	// Seen are the uids of sandboxes whose custom resource was seen at any time of the run; Ended tells when such a one was
	// first seen to be deleted, or not to be there any more.
	Seen  map[string]bool
	Ended map[string]time.Time
}

// Kind of a violation.
type Kind string

// The kinds. Each must be zero.
const (
	// Lost: acknowledged, and not there, not running, or not as acknowledged.
	Lost Kind = "lost"
	// Leaked: there, though deleted, refused, or nobody's.
	Leaked Kind = "leaked"
	// Duplicated: two containers run for one sandbox, or one request made two sandboxes.
	Duplicated Kind = "duplicated"
	// Stuck: not in its final state, or never answered.
	Stuck Kind = "stuck"
)

// Violation is one broken promise.
type Violation struct {
	Kind Kind
	// Life is the number of the sandbox, -1 if it is none that a client asked for.
	Life int
	// Subject names what it is about; What says what is wrong.
	Subject, What string
}

// Verdict is what an audit says.
type Verdict struct {
	Violations []Violation
	// Orphans are containers of agent Pods that were killed. Nobody takes them away before there is a janitor.
	Orphans []string
	// LostWithAgent are lives that were acknowledged by an agent's durable record alone, and whose agent's Pod was killed
	// before the API server had them.
	LostWithAgent []int
	// Denied are lives whose delete was carried out and answered with SANDBOX_NOT_FOUND: a server that repeats a delete for
	// another one that did not answer finds what the first has left.
	Denied []int
}

// Count is the number of lives, and of other subjects, with a violation of the kind in any of the verdicts.
func Count(kind Kind, verdicts ...Verdict) int {
	type subject struct {
		life int
		name string
	}
	seen := map[subject]bool{}
	var all []Violation
	for _, v := range verdicts {
		all = append(all, v.Violations...)
	}
	for _, x := range all {
		if x.Kind != kind {
			continue
		}
		s := subject{life: x.Life}
		if x.Life < 0 {
			s.name = x.Subject
		}
		seen[s] = true
	}
	return len(seen)
}
