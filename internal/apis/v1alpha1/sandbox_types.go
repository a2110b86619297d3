package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Phase is where a Sandbox is in its life (seed 002).
// +kubebuilder:validation:Enum=Pending;Bound;Running;Terminating;Expired;Failed
type Phase string

// The phases. internal/lifecycle draws how they follow each other.
const (
	PhasePending     Phase = "Pending"
	PhaseBound       Phase = "Bound"
	PhaseRunning     Phase = "Running"
	PhaseTerminating Phase = "Terminating"
	PhaseExpired     Phase = "Expired"
	PhaseFailed      Phase = "Failed"
)

// FailurePolicy is what happens to a Sandbox whose agent is lost.
// +kubebuilder:validation:Enum=Manual;AutoRecreate
type FailurePolicy string

// The failure policies.
const (
	FailurePolicyManual       FailurePolicy = "Manual"
	FailurePolicyAutoRecreate FailurePolicy = "AutoRecreate"
)

// ConsistencyMode is how a create is made durable before it is acknowledged.
// +kubebuilder:validation:Enum=Fast;Strong
type ConsistencyMode string

// The consistency modes.
const (
	ConsistencyModeFast   ConsistencyMode = "Fast"
	ConsistencyModeStrong ConsistencyMode = "Strong"
)

// NetworkMode is how a Sandbox is connected.
// +kubebuilder:validation:Enum=Agent;None
type NetworkMode string

// The network modes.
const (
	// NetworkModeAgent joins the agent Pod's network namespace.
	NetworkModeAgent NetworkMode = "Agent"
	// NetworkModeNone has nothing but loopback.
	NetworkModeNone NetworkMode = "None"
)

// StartPath is how a Sandbox's container came to run.
// +kubebuilder:validation:Enum=Slot;Cold
type StartPath string

// The start paths.
const (
	// StartPathSlot: it claimed a slot, a container that was started ahead of time without an image.
	StartPathSlot StartPath = "Slot"
	// StartPathCold: it was created and started when it was asked for.
	StartPathCold StartPath = "Cold"
)

// SandboxSpec is what is meant to run. All of it but expireTime, failurePolicy, recoveryTimeoutSeconds and resetRevision
// is fixed at creation: a container cannot change.
// +kubebuilder:validation:XValidation:rule="self.image == oldSelf.image && self.poolRef == oldSelf.poolRef",message="image and poolRef cannot change; delete the Sandbox and create it anew"
// +kubebuilder:validation:XValidation:rule="has(self.command) == has(oldSelf.command) && (!has(self.command) || self.command == oldSelf.command) && has(self.args) == has(oldSelf.args) && (!has(self.args) || self.args == oldSelf.args)",message="command and args cannot change; delete the Sandbox and create it anew"
// +kubebuilder:validation:XValidation:rule="has(self.exposedPorts) == has(oldSelf.exposedPorts) && (!has(self.exposedPorts) || self.exposedPorts == oldSelf.exposedPorts)",message="exposedPorts cannot change; delete the Sandbox and create it anew"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.resetRevision) || (has(self.resetRevision) && self.resetRevision >= oldSelf.resetRevision)",message="resetRevision only moves forward"
type SandboxSpec struct {
	// image is the container image reference.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image"`
	// poolRef is the name of the SandboxPool, in the same namespace, whose agents may run the Sandbox. Unset: the default
	// pool of the namespace, which the namespace's annotation fast-sandbox.io/default-pool names; without the annotation,
	// "default". status.pool is the pool that was used.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$`
	// +optional
	PoolRef string `json:"poolRef,omitempty"`
	// command is the entry point; empty means the image's own.
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=131072
	// +listType=atomic
	// +optional
	Command []string `json:"command,omitempty"`
	// args are the arguments; empty with an empty command means the image's own.
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=131072
	// +listType=atomic
	// +optional
	Args []string `json:"args,omitempty"`
	// envs is laid over the image's environment.
	// +kubebuilder:validation:MaxItems=1024
	// +listType=map
	// +listMapKey=name
	// +optional
	Envs []EnvVar `json:"envs,omitempty"`
	// workingDir is the working directory, absolute; empty means the image's own.
	// +kubebuilder:validation:MaxLength=4096
	// +kubebuilder:validation:Pattern=`^(/.*)?$`
	// +optional
	WorkingDir string `json:"workingDir,omitempty"`
	// exposedPorts are the TCP ports that the Sandbox listens on; placement keeps them apart on one agent.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	// +listType=set
	// +optional
	ExposedPorts []int32 `json:"exposedPorts,omitempty"`
	// consistencyMode is how the create was made durable. A Sandbox that is applied as a manifest is Strong by nature.
	// +optional
	ConsistencyMode ConsistencyMode `json:"consistencyMode,omitempty"`
	// failurePolicy is what happens when the agent is lost.
	// +kubebuilder:default=Manual
	// +optional
	FailurePolicy FailurePolicy `json:"failurePolicy,omitempty"`
	// recoveryTimeoutSeconds is how long AutoRecreate waits for a lost agent before it reschedules.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	// +optional
	RecoveryTimeoutSeconds *int32 `json:"recoveryTimeoutSeconds,omitempty"`
	// expireTime is when the container is removed; the Sandbox itself is kept, as Expired.
	// +optional
	ExpireTime *metav1.Time `json:"expireTime,omitempty"`
	// resetRevision, moved forward, replaces the container by a new one.
	// +optional
	ResetRevision *metav1.MicroTime `json:"resetRevision,omitempty"`
	// resources are the Sandbox's own limits; what is not set takes the pool's defaults.
	// +optional
	Resources *SandboxResources `json:"resources,omitempty"`
	// network is how the Sandbox is connected.
	// +kubebuilder:default=Agent
	// +optional
	Network NetworkMode `json:"network,omitempty"`
	// terminationGracePeriodSeconds is the time between SIGTERM and SIGKILL.
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=3600
	// +optional
	TerminationGracePeriodSeconds *int64 `json:"terminationGracePeriodSeconds,omitempty"`
	// ttlAfterFinished is how long the Sandbox is kept, with its log, after its process has ended; then it is deleted. Its
	// capacity and ports are free as soon as the process has ended. Unset: the pool's.
	// +kubebuilder:validation:XValidation:rule="self >= duration('0s') && self <= duration('8760h')",message="ttlAfterFinished must be between 0s and 8760h"
	// +optional
	TTLAfterFinished *metav1.Duration `json:"ttlAfterFinished,omitempty"`
}

// EnvVar is one variable of the environment.
type EnvVar struct {
	// name of the variable.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[^=]+$`
	Name string `json:"name"`
	// value of the variable.
	// +kubebuilder:validation:MaxLength=131072
	// +optional
	Value string `json:"value,omitempty"`
}

// SandboxResources are limits of a Sandbox's cgroup.
type SandboxResources struct {
	// limits by resource: cpu, memory and pids.
	// +kubebuilder:validation:XValidation:rule="self.all(k, k in ['cpu', 'memory', 'pids'])",message="only cpu, memory and pids can be limited"
	// +optional
	Limits corev1.ResourceList `json:"limits,omitempty"`
}

// SandboxStatus is what is known to be true of a Sandbox.
type SandboxStatus struct {
	// phase is where the Sandbox is in its life.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// observedGeneration is the generation of the spec that this status answers to.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// pool is the pool whose agents run the Sandbox: spec.poolRef, or the namespace's default pool.
	// +optional
	Pool string `json:"pool,omitempty"`
	// assignedPod is the agent Pod.
	// +optional
	AssignedPod string `json:"assignedPod,omitempty"`
	// nodeName is the node.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// sandboxID is the id of the container in containerd.
	// +optional
	SandboxID string `json:"sandboxID,omitempty"`
	// endpoints are the addresses (host:port) of the exposed ports.
	// +listType=atomic
	// +optional
	Endpoints []string `json:"endpoints,omitempty"`
	// acceptedResetRevision is the last reset revision that was acted on.
	// +optional
	AcceptedResetRevision *metav1.MicroTime `json:"acceptedResetRevision,omitempty"`
	// attempt counts the containers that this Sandbox had.
	// +optional
	Attempt int64 `json:"attempt,omitempty"`
	// startPath is how the container came to run.
	// +optional
	StartPath StartPath `json:"startPath,omitempty"`
	// exitCode of the process, once it has ended.
	// +optional
	ExitCode *int32 `json:"exitCode,omitempty"`
	// reason is a word on the phase for machines.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message is a sentence on the phase for people.
	// +optional
	Message string `json:"message,omitempty"`
	// startTime is when the process started.
	// +optional
	StartTime *metav1.MicroTime `json:"startTime,omitempty"`
	// finishTime is when the process ended.
	// +optional
	FinishTime *metav1.MicroTime `json:"finishTime,omitempty"`
	// conditions are Ready, Scheduled, AgentLost and Finished.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Sandbox is one isolated container, run by an agent of its pool.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sbx,categories=fsb
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.poolRef`
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.assignedPod`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`,priority=1
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.image`,priority=1
// +kubebuilder:printcolumn:name="Endpoints",type=string,JSONPath=`.status.endpoints`,priority=1
// +kubebuilder:printcolumn:name="Start",type=string,JSONPath=`.status.startPath`,priority=1
// +kubebuilder:printcolumn:name="Exit",type=integer,JSONPath=`.status.exitCode`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="the name of a Sandbox is a DNS label: at most 63 lower-case letters, digits and dashes"
type Sandbox struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxSpec `json:"spec"`
	// +optional
	Status SandboxStatus `json:"status,omitempty"`
}

// SandboxList is a list of Sandboxes.
// +kubebuilder:object:root=true
type SandboxList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []Sandbox `json:"items"`
}
