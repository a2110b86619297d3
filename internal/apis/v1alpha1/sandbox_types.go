package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Phase is the phase of a Sandbox's lifecycle (seed 002).
// +kubebuilder:validation:Enum=Pending;Bound;Running;Terminating;Expired;Failed
type Phase string

// The phases. internal/lifecycle documents the transitions.
const (
	PhasePending     Phase = "Pending"
	PhaseBound       Phase = "Bound"
	PhaseRunning     Phase = "Running"
	PhaseTerminating Phase = "Terminating"
	PhaseExpired     Phase = "Expired"
	PhaseFailed      Phase = "Failed"
)

// FailurePolicy determines what happens to a Sandbox whose agent is lost.
// +kubebuilder:validation:Enum=Manual;AutoRecreate
type FailurePolicy string

// The failure policies.
const (
	FailurePolicyManual       FailurePolicy = "Manual"
	FailurePolicyAutoRecreate FailurePolicy = "AutoRecreate"
)

// ConsistencyMode is how a create call is made durable before it is acknowledged.
// +kubebuilder:validation:Enum=Fast;Strong
type ConsistencyMode string

// The consistency modes.
const (
	// ConsistencyModeFast: the agent started the container and recorded it before the resource was written.
	ConsistencyModeFast ConsistencyMode = "Fast"
	// ConsistencyModeStrong: the resource was written before an agent was asked for the container.
	ConsistencyModeStrong ConsistencyMode = "Strong"
)

// NetworkMode is the network of a Sandbox.
// +kubebuilder:validation:Enum=Agent;None
type NetworkMode string

// The network modes.
const (
	// NetworkModeAgent joins the agent Pod's network namespace.
	NetworkModeAgent NetworkMode = "Agent"
	// NetworkModeNone has only the loopback interface.
	NetworkModeNone NetworkMode = "None"
)

// StartPath is how a Sandbox's container was started.
// +kubebuilder:validation:Enum=Slot;Cold
type StartPath string

// The start paths.
const (
	// StartPathSlot: the Sandbox claimed a slot, a container that was started ahead of time without an image.
	StartPathSlot StartPath = "Slot"
	// StartPathCold: the container was created and started on request.
	StartPathCold StartPath = "Cold"
)

// SandboxSpec describes a Sandbox. The fields expireTime, failurePolicy, recoveryTimeoutSeconds, resetRevision,
// terminationGracePeriodSeconds and ttlAfterFinished can be changed at any time. All others are immutable, because they
// cannot be changed on a running container; the API server rejects the change.
// +kubebuilder:validation:XValidation:rule="self.image == oldSelf.image",message="image is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule=`(has(self.poolRef) ? self.poolRef : "") == (has(oldSelf.poolRef) ? oldSelf.poolRef : "")`,message="poolRef is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule="(has(self.command) ? self.command : []) == (has(oldSelf.command) ? oldSelf.command : []) && (has(self.args) ? self.args : []) == (has(oldSelf.args) ? oldSelf.args : [])",message="command and args are immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule="(has(self.envs) ? self.envs : []) == (has(oldSelf.envs) ? oldSelf.envs : [])",message="envs is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule=`(has(self.workingDir) ? self.workingDir : "") == (has(oldSelf.workingDir) ? oldSelf.workingDir : "")`,message="workingDir is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule="(has(self.exposedPorts) ? self.exposedPorts : []) == (has(oldSelf.exposedPorts) ? oldSelf.exposedPorts : [])",message="exposedPorts is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule=`(has(self.consistencyMode) ? self.consistencyMode : "") == (has(oldSelf.consistencyMode) ? oldSelf.consistencyMode : "")`,message="consistencyMode is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule=`(has(self.network) ? self.network : "") == (has(oldSelf.network) ? oldSelf.network : "")`,message="network is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule="(has(self.resources) && has(self.resources.limits) ? self.resources.limits.size() : 0) == (has(oldSelf.resources) && has(oldSelf.resources.limits) ? oldSelf.resources.limits.size() : 0) && (!has(self.resources) || !has(self.resources.limits) || self.resources.limits.all(k, k in oldSelf.resources.limits && quantity(string(self.resources.limits[k])).compareTo(quantity(string(oldSelf.resources.limits[k]))) == 0))",message="resources is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule="(has(self.keepAlive) && self.keepAlive) == (has(oldSelf.keepAlive) && oldSelf.keepAlive)",message="keepAlive is immutable: delete the Sandbox and create it again"
// +kubebuilder:validation:XValidation:rule="!has(self.keepAlive) || !self.keepAlive || ((!has(self.command) || self.command.size() == 0) && (!has(self.args) || self.args.size() == 0))",message="a Sandbox with keepAlive has no process of its own: command and args must be empty"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.resetRevision) || (has(self.resetRevision) && self.resetRevision >= oldSelf.resetRevision)",message="resetRevision can only be increased"
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
	// command is the entry point. Empty: the image's.
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=131072
	// +listType=atomic
	// +optional
	Command []string `json:"command,omitempty"`
	// args are the arguments of the entry point. Empty, with an empty command: the image's.
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=131072
	// +listType=atomic
	// +optional
	Args []string `json:"args,omitempty"`
	// keepAlive is true for a Sandbox without a process of its own: it runs until it is deleted or expires, and processes are
	// started in it by ProcessService. The image's command has no effect. Needs agents with the runtime handler fsb.
	// +optional
	KeepAlive bool `json:"keepAlive,omitempty"`
	// envs are environment variables, which are added to those of the image or replace them.
	// +kubebuilder:validation:MaxItems=1024
	// +listType=map
	// +listMapKey=name
	// +optional
	Envs []EnvVar `json:"envs,omitempty"`
	// workingDir is the working directory, an absolute path. Empty: the image's.
	// +kubebuilder:validation:MaxLength=4096
	// +kubebuilder:validation:Pattern=`^(/.*)?$`
	// +optional
	WorkingDir string `json:"workingDir,omitempty"`
	// exposedPorts are the TCP ports that the Sandbox listens on. Two Sandboxes with the same port are not placed on the same
	// agent.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	// +listType=set
	// +optional
	ExposedPorts []int32 `json:"exposedPorts,omitempty"`
	// consistencyMode records how the create call was made durable. It has no effect in a manifest: the API server stores the
	// Sandbox before the controller asks an agent for a container, so the create is Strong even if the manifest says Fast.
	// +optional
	ConsistencyMode ConsistencyMode `json:"consistencyMode,omitempty"`
	// failurePolicy determines what happens when the agent is lost: Manual waits for the agent or a reset, AutoRecreate starts
	// the Sandbox on another agent. When the process ends because its shim on the node does (reason RuntimeLost), Manual makes the
	// Sandbox Failed, and AutoRecreate starts it again at once.
	// +kubebuilder:default=Manual
	// +optional
	FailurePolicy FailurePolicy `json:"failurePolicy,omitempty"`
	// recoveryTimeoutSeconds is how long AutoRecreate waits for a lost agent before it starts the Sandbox on another one.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	// +optional
	RecoveryTimeoutSeconds *int32 `json:"recoveryTimeoutSeconds,omitempty"`
	// expireTime is when the container is removed. The Sandbox is kept, in the phase Expired.
	// +optional
	ExpireTime *metav1.Time `json:"expireTime,omitempty"`
	// resetRevision, when it is increased, replaces the container with a new one.
	// +optional
	ResetRevision *metav1.MicroTime `json:"resetRevision,omitempty"`
	// resources are the resource limits, at most the pool's maxSandboxResources. A limit that is not set is taken from the pool.
	// +optional
	Resources *SandboxResources `json:"resources,omitempty"`
	// network is the network of the Sandbox.
	// +kubebuilder:default=Agent
	// +optional
	Network NetworkMode `json:"network,omitempty"`
	// terminationGracePeriodSeconds is the time between SIGTERM and SIGKILL. A change applies to a container that is already
	// running, and to one that is being terminated.
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=3600
	// +optional
	TerminationGracePeriodSeconds *int64 `json:"terminationGracePeriodSeconds,omitempty"`
	// ttlAfterFinished is how long the Sandbox is kept, with its log, after its process has ended; then it is deleted. Its
	// capacity and ports are free as soon as the process has ended. Unset: the pool's.
	// +kubebuilder:validation:Format=duration
	// +kubebuilder:validation:XValidation:rule="self >= duration('0s') && self <= duration('8760h')",message="ttlAfterFinished must be between 0s and 8760h"
	// +optional
	TTLAfterFinished *metav1.Duration `json:"ttlAfterFinished,omitempty"`
}

// EnvVar is an environment variable.
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

// SandboxResources are the resource limits of a Sandbox's cgroup.
type SandboxResources struct {
	// limits by resource name: cpu, memory and pids.
	// +kubebuilder:validation:MaxProperties=3
	// +kubebuilder:validation:XValidation:rule="self.all(k, k in ['cpu', 'memory', 'pids'])",message="only cpu, memory and pids can be limited"
	// +optional
	Limits corev1.ResourceList `json:"limits,omitempty"`
}

// SandboxStatus is the observed state of a Sandbox.
type SandboxStatus struct {
	// phase of the lifecycle.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// observedGeneration is the generation of the spec that the controller has processed.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// pool is the pool whose agents run the Sandbox: spec.poolRef, or the namespace's default pool.
	// +optional
	Pool string `json:"pool,omitempty"`
	// assignedPod is the name of the agent Pod.
	// +optional
	AssignedPod string `json:"assignedPod,omitempty"`
	// nodeName is the name of the agent Pod's node.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// sandboxID is the ID of the container in containerd.
	// +optional
	SandboxID string `json:"sandboxID,omitempty"`
	// endpoints are the addresses (host:port) of the exposed ports.
	// +listType=atomic
	// +optional
	Endpoints []string `json:"endpoints,omitempty"`
	// acceptedResetRevision is the last reset revision that was carried out.
	// +optional
	AcceptedResetRevision *metav1.MicroTime `json:"acceptedResetRevision,omitempty"`
	// attempt counts the containers of the Sandbox from 1.
	// +optional
	Attempt int64 `json:"attempt,omitempty"`
	// startPath is how the container was started.
	// +optional
	StartPath StartPath `json:"startPath,omitempty"`
	// exitCode of the process, after it has ended.
	// +optional
	ExitCode *int32 `json:"exitCode,omitempty"`
	// reason for the phase, in CamelCase, for programs.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message explains the phase, for people.
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
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.status.pool`
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.assignedPod`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`,priority=1
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.image`,priority=1
// +kubebuilder:printcolumn:name="Endpoints",type=string,JSONPath=`.status.endpoints`,priority=1
// +kubebuilder:printcolumn:name="Start",type=string,JSONPath=`.status.startPath`,priority=1
// +kubebuilder:printcolumn:name="Exit",type=integer,JSONPath=`.status.exitCode`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="the name of a Sandbox must be a DNS label: at most 63 lower-case letters, digits and dashes"
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
