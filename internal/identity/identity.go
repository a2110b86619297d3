// Package identity translates between the labels of a container and the identity of the sandbox that it belongs to. The
// labels are the only evidence that outlives every process of ours, so parsing is strict: a container whose labels do
// not add up has no identity, never a guessed one. Pure.
package identity

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// The label keys. internal/apis/v1alpha1 documents them; a test keeps the two lists equal (this package is pure and may
// not import that one).
const (
	KeyManaged          = "fast-sandbox.io/managed"
	KeyAgentUID         = "fast-sandbox.io/agent-uid"
	KeyPool             = "fast-sandbox.io/pool"
	KeySandboxNamespace = "fast-sandbox.io/sandbox-namespace"
	KeySandboxName      = "fast-sandbox.io/sandbox-name"
	KeySandboxUID       = "fast-sandbox.io/sandbox-uid"
	KeyAttempt          = "fast-sandbox.io/attempt"
	KeyState            = "fast-sandbox.io/state"
	KeyPersisted        = "fast-sandbox.io/persisted"
)

// States of a container.
const (
	StateSlot    = "slot"
	StateClaimed = "claimed"
)

// Identity is who a container is.
type Identity struct {
	// Namespace and Name of the sandbox.
	Namespace, Name string
	// SandboxUID is the incarnation of the sandbox; Attempt counts its containers from 1.
	SandboxUID string
	Attempt    int64
	// AgentUID is the uid of the agent Pod; Pool the pool that it belongs to.
	AgentUID, Pool string
	// State is StateSlot or StateClaimed. A slot has no sandbox: Namespace, Name, SandboxUID and Attempt are zero.
	State string
	// Persisted tells that the sandbox's custom resource is known to have been written.
	Persisted bool
}

// ContainerID is the id of the sandbox's container in containerd.
func (i Identity) ContainerID() string { return containerID(i.SandboxUID, i.Attempt) }

func containerID(uid string, attempt int64) string {
	return uid + "-" + strconv.FormatInt(attempt, 10)
}

// slotPrefix begins the ids of containers that were started as slots, for all of their lives. No uid of a sandbox has a dot.
const slotPrefix = "slot."

// SlotID is the id of a slot, given a name that is unique on its node for all time.
func SlotID(unique string) string { return slotPrefix + unique }

// IsSlotID tells whether a container was started as a slot.
func IsSlotID(id string) bool { return strings.HasPrefix(id, slotPrefix) }

// IsContainerID tells whether an id is of the form that our containers have, so that what is left of one whose record is
// gone can be told from everybody else's: a slot's, or a uid with the number of an attempt.
func IsContainerID(id string) bool {
	if name, ok := strings.CutPrefix(id, slotPrefix); ok {
		return len(name) == 20 && isHex(name)
	}
	at := strings.LastIndexByte(id, '-')
	if at != 36 || id[at+1:] == "" || id[at+1] == '0' {
		return false
	}
	if _, err := strconv.ParseUint(id[at+1:], 10, 63); err != nil {
		return false
	}
	for i, part := range strings.Split(id[:at], "-") {
		if want := []int{8, 4, 4, 4, 12}; i >= len(want) || len(part) != want[i] || !isHex(part) {
			return false
		}
	}
	return true
}

func isHex(s string) bool {
	for _, c := range s {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Fits tells whether a container of the id can be of this identity: a slot keeps its id when it is claimed.
func (i Identity) Fits(id string) bool {
	return IsSlotID(id) || (i.State == StateClaimed && i.ContainerID() == id)
}

// Labels are the labels that a container of this identity carries.
func (i Identity) Labels() map[string]string {
	l := map[string]string{KeyManaged: "true", KeyAgentUID: i.AgentUID, KeyPool: i.Pool, KeyState: i.State}
	if i.State == StateSlot {
		return l
	}
	l[KeySandboxNamespace] = i.Namespace
	l[KeySandboxName] = i.Name
	l[KeySandboxUID] = i.SandboxUID
	l[KeyAttempt] = strconv.FormatInt(i.Attempt, 10)
	if i.Persisted {
		l[KeyPersisted] = "true"
	}
	return l
}

// Parse reads an identity from labels. The error is errdefs.ErrNotFound for a container that is not ours at all, and
// errdefs.ErrInvalidArgument, naming every label that is missing or wrong, for one that is ours and does not add up.
func Parse(labels map[string]string) (Identity, error) {
	if labels[KeyManaged] != "true" {
		return Identity{}, fmt.Errorf("label %s is not \"true\": %w", KeyManaged, errdefs.ErrNotFound)
	}
	i := Identity{
		Namespace: labels[KeySandboxNamespace], Name: labels[KeySandboxName], SandboxUID: labels[KeySandboxUID],
		AgentUID: labels[KeyAgentUID], Pool: labels[KeyPool], State: labels[KeyState],
		Persisted: labels[KeyPersisted] == "true",
	}
	var wrong []string
	need := func(key string) {
		if labels[key] == "" {
			wrong = append(wrong, key+" is missing")
		}
	}
	need(KeyAgentUID)
	switch i.State {
	case StateSlot:
		for _, key := range []string{KeySandboxNamespace, KeySandboxName, KeySandboxUID, KeyAttempt} {
			if labels[key] != "" {
				wrong = append(wrong, key+" is set on a slot")
			}
		}
	case StateClaimed:
		need(KeySandboxNamespace)
		need(KeySandboxName)
		need(KeySandboxUID)
		n, err := strconv.ParseInt(labels[KeyAttempt], 10, 64)
		if err != nil || n < 1 {
			wrong = append(wrong, fmt.Sprintf("%s is %q, not a number from 1", KeyAttempt, labels[KeyAttempt]))
		}
		i.Attempt = n
	default:
		wrong = append(wrong, fmt.Sprintf("%s is %q, neither %q nor %q", KeyState, i.State, StateSlot, StateClaimed))
	}
	if len(wrong) > 0 {
		return Identity{}, fmt.Errorf("reading labels: %s: %w", strings.Join(wrong, "; "), errdefs.ErrInvalidArgument)
	}
	return i, nil
}
