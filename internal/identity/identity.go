// Package identity converts between the labels of a container and the identity of its sandbox, and defines the fence that
// every operation on a container carries. The labels are the only evidence that outlives all our processes, so parsing is
// strict: a container with inconsistent labels has no identity. The package is pure; its values are safe for concurrent use.
package identity

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// Label keys, documented in internal/apis/v1alpha1. A test keeps the two lists equal, because this package is pure and must
// not import that one.
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
	KeyAgentProcess     = "fast-sandbox.io/agent-process"
	// KeyShim is on anchors alone, which stand for a shim of ours. It has the uid of the agent's Pod.
	KeyShim = "fast-sandbox.io/shim"
)

// States of a container.
const (
	StateSlot    = "slot"
	StateClaimed = "claimed"
)

// Identity is the identity of a container.
type Identity struct {
	// Namespace and Name of the sandbox.
	Namespace, Name string
	// SandboxUID is the incarnation of the sandbox; Attempt counts its containers from 1.
	SandboxUID string
	Attempt    int64
	// AgentUID is the uid of the agent Pod; Pool is its pool.
	AgentUID, Pool string
	// AgentProcess is the process of that agent which made the container; empty if it was not recorded.
	AgentProcess string
	// State is StateSlot or StateClaimed. A slot has no sandbox: Namespace, Name, SandboxUID and Attempt are zero.
	State string
	// Persisted states that the sandbox's custom resource was written.
	Persisted bool
}

// ContainerID returns the id of the sandbox's container in containerd, unless it was started as a slot.
func (i Identity) ContainerID() string { return containerID(i.SandboxUID, i.Attempt) }

func containerID(uid string, attempt int64) string {
	return uid + "-" + strconv.FormatInt(attempt, 10)
}

// slotPrefix is the prefix of the id of every container that was started as a slot, also after its claim. The uid of a
// sandbox never contains a dot.
const slotPrefix = "slot."

// SlotID returns the id of a slot. The name must never be used twice on a node.
func SlotID(unique string) string { return slotPrefix + unique }

// IsSlotID reports whether a container with this id was started as a slot.
func IsSlotID(id string) bool { return strings.HasPrefix(id, slotPrefix) }

// shimPrefix is the prefix of the id of every anchor, the container that stands for a shim of ours.
const shimPrefix = "shim."

// ShimID returns the id of an anchor. The name must never be used twice on a node.
func ShimID(unique string) string { return shimPrefix + unique }

// IsShimID reports whether a container with this id is an anchor.
func IsShimID(id string) bool { return strings.HasPrefix(id, shimPrefix) }

// IsContainerID reports whether an id has the form of our containers: that of a slot, or a sandbox uid followed by an
// attempt. It identifies remnants of containers whose record no longer exists.
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

// Fits reports whether a container with this id can have identity i. A claimed slot keeps its id.
func (i Identity) Fits(id string) bool {
	return IsSlotID(id) || (i.State == StateClaimed && i.ContainerID() == id)
}

// Labels returns the labels of a container with identity i.
func (i Identity) Labels() map[string]string {
	l := map[string]string{KeyManaged: "true", KeyAgentUID: i.AgentUID, KeyPool: i.Pool, KeyState: i.State}
	if i.AgentProcess != "" {
		l[KeyAgentProcess] = i.AgentProcess
	}
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

// Parse returns the identity that labels describe. The error is errdefs.ErrNotFound for a container that is not ours, and
// errdefs.ErrInvalidArgument, naming every missing or invalid label, for one of ours with inconsistent labels.
func Parse(labels map[string]string) (Identity, error) {
	if labels[KeyManaged] != "true" {
		return Identity{}, fmt.Errorf("label %s is not \"true\": %w", KeyManaged, errdefs.ErrNotFound)
	}
	i := Identity{
		Namespace: labels[KeySandboxNamespace], Name: labels[KeySandboxName], SandboxUID: labels[KeySandboxUID],
		AgentUID: labels[KeyAgentUID], Pool: labels[KeyPool], AgentProcess: labels[KeyAgentProcess], State: labels[KeyState],
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
