package convert

import (
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// PhaseToProto converts a phase. An empty phase, of a Sandbox that the controller has not seen yet, is Pending.
func PhaseToProto(p v1alpha1.Phase) sandboxv1.Phase {
	switch p {
	case v1alpha1.PhasePending, "":
		return sandboxv1.Phase_PHASE_PENDING
	case v1alpha1.PhaseBound:
		return sandboxv1.Phase_PHASE_BOUND
	case v1alpha1.PhaseRunning:
		return sandboxv1.Phase_PHASE_RUNNING
	case v1alpha1.PhaseTerminating:
		return sandboxv1.Phase_PHASE_TERMINATING
	case v1alpha1.PhaseExpired:
		return sandboxv1.Phase_PHASE_EXPIRED
	case v1alpha1.PhaseFailed:
		return sandboxv1.Phase_PHASE_FAILED
	}
	return sandboxv1.Phase_PHASE_UNSPECIFIED
}

// ModeToProto converts a consistency mode.
func ModeToProto(m v1alpha1.ConsistencyMode) sandboxv1.ConsistencyMode {
	switch m {
	case v1alpha1.ConsistencyModeFast:
		return sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST
	case v1alpha1.ConsistencyModeStrong:
		return sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	}
	return sandboxv1.ConsistencyMode_CONSISTENCY_MODE_UNSPECIFIED
}

func modeFromProto(m sandboxv1.ConsistencyMode) v1alpha1.ConsistencyMode {
	switch m {
	case sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST:
		return v1alpha1.ConsistencyModeFast
	case sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG:
		return v1alpha1.ConsistencyModeStrong
	case sandboxv1.ConsistencyMode_CONSISTENCY_MODE_UNSPECIFIED:
	}
	return ""
}

func policyToProto(p v1alpha1.FailurePolicy) sandboxv1.FailurePolicy {
	switch p {
	case v1alpha1.FailurePolicyManual:
		return sandboxv1.FailurePolicy_FAILURE_POLICY_MANUAL
	case v1alpha1.FailurePolicyAutoRecreate:
		return sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE
	}
	return sandboxv1.FailurePolicy_FAILURE_POLICY_UNSPECIFIED
}

// PolicyFromProto converts a failure policy. Unspecified is "", which the API server defaults to Manual.
func PolicyFromProto(p sandboxv1.FailurePolicy) v1alpha1.FailurePolicy {
	switch p {
	case sandboxv1.FailurePolicy_FAILURE_POLICY_MANUAL:
		return v1alpha1.FailurePolicyManual
	case sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE:
		return v1alpha1.FailurePolicyAutoRecreate
	case sandboxv1.FailurePolicy_FAILURE_POLICY_UNSPECIFIED:
	}
	return ""
}

func networkToProto(n v1alpha1.NetworkMode) sandboxv1.NetworkMode {
	switch n {
	case v1alpha1.NetworkModeAgent:
		return sandboxv1.NetworkMode_NETWORK_MODE_AGENT
	case v1alpha1.NetworkModeNone:
		return sandboxv1.NetworkMode_NETWORK_MODE_NONE
	}
	return sandboxv1.NetworkMode_NETWORK_MODE_UNSPECIFIED
}

func networkFromProto(n sandboxv1.NetworkMode) v1alpha1.NetworkMode {
	switch n {
	case sandboxv1.NetworkMode_NETWORK_MODE_AGENT:
		return v1alpha1.NetworkModeAgent
	case sandboxv1.NetworkMode_NETWORK_MODE_NONE:
		return v1alpha1.NetworkModeNone
	case sandboxv1.NetworkMode_NETWORK_MODE_UNSPECIFIED:
	}
	return ""
}

// StartPathToProto converts a start path.
func StartPathToProto(p v1alpha1.StartPath) sandboxv1.StartPath {
	switch p {
	case v1alpha1.StartPathSlot:
		return sandboxv1.StartPath_START_PATH_SLOT
	case v1alpha1.StartPathCold:
		return sandboxv1.StartPath_START_PATH_COLD
	}
	return sandboxv1.StartPath_START_PATH_UNSPECIFIED
}

// StartPathFromProto converts a start path. Unspecified is "".
func StartPathFromProto(p sandboxv1.StartPath) v1alpha1.StartPath {
	switch p {
	case sandboxv1.StartPath_START_PATH_SLOT:
		return v1alpha1.StartPathSlot
	case sandboxv1.StartPath_START_PATH_COLD:
		return v1alpha1.StartPathCold
	case sandboxv1.StartPath_START_PATH_UNSPECIFIED:
	}
	return ""
}
