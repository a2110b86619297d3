// Package audit judges a run of the fault harness: it compares the answers that clients received (the log) with the actual
// state (custom resources, agents' reports, containerd) and returns what was lost, leaked, duplicated or is stuck. Pure: no
// I/O; everything may be called concurrently on values that do not change.
package audit

import "time"

// Op is the operation of a call.
type Op string

// The operations.
const (
	Create Op = "create"
	Update Op = "update"
	Delete Op = "delete"
)

// Outcome is what a client finally knows about a call.
type Outcome string

// The outcomes.
const (
	// Acked: the server confirmed it.
	Acked Outcome = "acked"
	// Refused: a typed error says that it was not done and will not be.
	Refused Outcome = "refused"
	// Unknown: no answer, after all repetitions.
	Unknown Outcome = "unknown"
)

// The reasons of errors that say that a sandbox does not exist.
const (
	reasonNotFound      = "SANDBOX_NOT_FOUND"
	reasonFenceMismatch = "FENCE_MISMATCH"
)

// Spec is the part of a create's spec that an audit needs.
type Spec struct {
	// ExpireTime is zero for a sandbox that does not expire.
	ExpireTime time.Time `json:"expireTime,omitzero"`
	// AutoRecreate is the failure policy; Manual otherwise.
	AutoRecreate bool `json:"autoRecreate,omitempty"`
	// Exit is the code with which the process ends by itself; nil if it keeps running.
	Exit *int32 `json:"exit,omitempty"`
}

// Change is the change of an update. A nil field does not change.
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
	// Life is the number of the sandbox. All creates of one life carry the same RequestID.
	Life      int       `json:"life"`
	Op        Op        `json:"op"`
	Name      string    `json:"name"`
	RequestID string    `json:"requestID"`
	Sent      time.Time `json:"sent"`
	Answered  time.Time `json:"answered,omitzero"`
	Outcome   Outcome   `json:"outcome"`
	// Requests counts how often it was sent; Unsure is true if one of the requests had no answer, or an answer said that the
	// outcome is not known.
	Requests int  `json:"requests"`
	Unsure   bool `json:"unsure,omitempty"`
	// Due is when a create was to be sent by the plan, and Phases is what it spent its time on until the answer.
	Due    time.Time `json:"due,omitzero"`
	Phases []Phase   `json:"phases,omitempty"`
	// UID of the sandbox, and the Pod of its agent, from a create's answer.
	UID   string `json:"uid,omitempty"`
	Agent string `json:"agent,omitempty"`
	// Reason and Message of the last error, even if a repetition succeeded; Earlier are the reasons before it, each
	// once.
	Reason  string   `json:"reason,omitempty"`
	Message string   `json:"message,omitempty"`
	Earlier []string `json:"earlier,omitempty"`
	// Spec of a create; Change of an update.
	Spec   Spec   `json:"spec,omitzero"`
	Change Change `json:"change,omitzero"`
}

// Phase is a part of the time that a call took: a request that ended with an error, the wait before the next one, or a
// stage of the request that succeeded, as the server reported it.
type Phase struct {
	Name string `json:"name"`
	// Millis is the length of the phase.
	Millis float64 `json:"ms"`
	// Message is the error of a request that failed.
	Message string `json:"message,omitempty"`
}

// Strike is one fault that was injected.
type Strike struct {
	Kind   string        `json:"kind"`
	At     time.Time     `json:"at"`
	Lasted time.Duration `json:"lasted,omitempty"`
	Target string        `json:"target,omitempty"`
	// AgentUID and AgentPod are set if an agent's Pod was killed.
	AgentUID string `json:"agentUID,omitempty"`
	AgentPod string `json:"agentPod,omitempty"`
	// Containers were run by a shim that was killed, and have ended with it.
	Containers []string `json:"containers,omitempty"`
	// Failed says why it could not be injected.
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
	// Dump is the whole object, for people.
	Dump string
}

// stateStopped is the State of a sandbox whose process has ended.
const stateStopped = "STOPPED"

// Report is what an agent that exists reports about a sandbox.
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
	// Running is true if its task runs; Slot if no sandbox has claimed it.
	Running, Slot bool
	// Broken says why its labels are invalid.
	Broken string
	Dump   string
}

// Remnant is a part of a container that does not exist, such as its snapshot. AgentUID is empty if it is unknown.
type Remnant struct{ Kind, ID, UID, AgentUID string }

// Tombstone is a deletion that an agent still records.
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
	// Reserved is the number of capacity units that the allocator has reserved on each agent, by the uid of its Pod. Assigned
	// is the number of sandboxes that the pool's status counts.
	Reserved map[string]int
	Assigned int
	// Garbage are objects whose owner was deleted, which the garbage collector must delete.
	Garbage []string
	// Seen are the uids of sandboxes whose custom resource existed at any time of the run; Ended is when each was first
	// observed to be deleted, or to be absent.
	Seen  map[string]bool
	Ended map[string]time.Time
}

// Kind of a violation.
type Kind string

// The kinds. Each must be zero.
const (
	// Lost: acknowledged, and absent, not running, or not as acknowledged.
	Lost Kind = "lost"
	// Leaked: present, though deleted, refused, or never requested.
	Leaked Kind = "leaked"
	// Duplicated: two containers run for one sandbox, or one request made two sandboxes.
	Duplicated Kind = "duplicated"
	// Stuck: not in its final state, or never answered.
	Stuck Kind = "stuck"
)

// Violation is one broken promise.
type Violation struct {
	Kind Kind
	// Life is the number of the sandbox, -1 if no client requested it.
	Life int
	// Subject names the object; What says what is wrong.
	Subject, What string
}

// Verdict is the result of an audit.
type Verdict struct {
	Violations []Violation
	// Orphans are containers and remnants of agents that do not exist. The node's janitor must delete them: each is also a
	// violation, until it has.
	Orphans []string
	// LostWithAgent are lives that were acknowledged by an agent's durable record alone, and whose agent's Pod was killed
	// before the API server had them.
	LostWithAgent []int
	// Denied are lives whose delete was executed and answered with SANDBOX_NOT_FOUND: a server that repeats a delete for
	// another one that did not answer finds nothing to delete.
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
