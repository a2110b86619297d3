package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SandboxPoolSpec describes the agents of a pool.
// +kubebuilder:validation:XValidation:rule="!has(self.sandboxResources) || !has(self.sandboxResources.limits) || !has(self.maxSandboxResources) || !has(self.maxSandboxResources.limits) || self.sandboxResources.limits.all(k, !(k in self.maxSandboxResources.limits) || quantity(string(self.sandboxResources.limits[k])).compareTo(quantity(string(self.maxSandboxResources.limits[k]))) <= 0)",message="sandboxResources must not exceed maxSandboxResources"
type SandboxPoolSpec struct {
	// capacity bounds the number of agents and the free capacity.
	Capacity PoolCapacity `json:"capacity"`
	// maxSandboxesPerPod is the capacity of each agent: the number of sandboxes that it runs at a time.
	// +kubebuilder:default=5
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	// +optional
	MaxSandboxesPerPod int32 `json:"maxSandboxesPerPod,omitempty"`
	// runtimeHandler is the runtime of the pool's sandboxes: fsb (a shim of Fast Sandbox, which needs containerd 2), runc, crun, runsc,
	// kata, or a containerd runtime name. The condition RuntimeReady shows whether the nodes can run it.
	// +kubebuilder:default=fsb
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[a-zA-Z0-9][a-zA-Z0-9._-]*$`
	// +optional
	RuntimeHandler string `json:"runtimeHandler,omitempty"`
	// userNamespace says whether each sandbox has a user namespace: root in it is a user without any rights on the node, and no
	// two sandboxes of a node have the same users. Auto: where the node can do that, which the condition UserNamespaces shows.
	// Required: nowhere else. Only the runtime handler fsb has user namespaces. A change drains the agents and replaces them.
	// +kubebuilder:default=Auto
	// +optional
	UserNamespace UserNamespacePolicy `json:"userNamespace,omitempty"`
	// sandboxResources are the limits of Sandboxes that do not set them. What neither sets is limited to 1 CPU, 512Mi of memory
	// and 1024 pids, or less if maxSandboxResources is less.
	// +optional
	SandboxResources *SandboxResources `json:"sandboxResources,omitempty"`
	// maxSandboxResources are the largest limits that a Sandbox may ask for. One that asks for more is refused. What is not set
	// here has no maximum. A change drains the agents and replaces them.
	// +kubebuilder:validation:XValidation:rule="!has(self.limits) || self.limits.all(k, quantity(string(self.limits[k])).isGreaterThan(quantity('0')))",message="a maximum must be greater than 0"
	// +optional
	MaxSandboxResources *SandboxResources `json:"maxSandboxResources,omitempty"`
	// admission is when the API server's admission (quotas, webhooks, policies) is asked about a Sandbox that is created on the fast
	// path. AfterStart: when its resource is written, after it has started; one that is refused then is deleted. DryRun: before it
	// starts, too, by a dry run, which adds a call to the API server to each create and fails it while the API server does not
	// answer.
	// +kubebuilder:default=AfterStart
	// +optional
	Admission AdmissionMode `json:"admission,omitempty"`
	// slots are containers that agents start ahead of time, without an image, for a sandbox to claim. They do not change the
	// capacity of an agent, which is maxSandboxesPerPod whether or not slots are started.
	// +optional
	Slots *PoolSlots `json:"slots,omitempty"`
	// ttlAfterFinished is how long a Sandbox that sets none is kept, with its log, after its process has ended; then it is
	// deleted. Unset: 1h.
	// +kubebuilder:validation:Format=duration
	// +kubebuilder:validation:XValidation:rule="self >= duration('0s') && self <= duration('8760h')",message="ttlAfterFinished must be between 0s and 8760h"
	// +optional
	TTLAfterFinished *metav1.Duration `json:"ttlAfterFinished,omitempty"`
	// images are the references of images that every agent pulls ahead and keeps on its node.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=512
	// +listType=set
	// +optional
	Images []string `json:"images,omitempty"`
	// imagePolicy determines what a Sandbox needs to use an image that is on the node already. A change drains the agents and
	// replaces them.
	// +kubebuilder:default=Cached
	// +optional
	ImagePolicy ImagePolicy `json:"imagePolicy,omitempty"`
	// security changes what the pool's sandboxes may do. A change drains the agents and replaces them.
	// +optional
	Security *PoolSecurity `json:"security,omitempty"`
	// agentTemplate is the template of the agent Pods. The controller adds what the agent needs: containerd's socket, host
	// paths, environment, security context, certificate, probes.
	AgentTemplate AgentTemplate `json:"agentTemplate"`
}

// AdmissionMode is when admission is asked about a Sandbox that is created on the fast path.
// +kubebuilder:validation:Enum=AfterStart;DryRun
type AdmissionMode string

// The admission modes.
const (
	AdmissionAfterStart AdmissionMode = "AfterStart"
	AdmissionDryRun     AdmissionMode = "DryRun"
)

// UserNamespacePolicy says whether sandboxes have user namespaces.
// +kubebuilder:validation:Enum=Auto;Required;Disabled
type UserNamespacePolicy string

// The policies of user namespaces.
const (
	UserNamespaceAuto     UserNamespacePolicy = "Auto"
	UserNamespaceRequired UserNamespacePolicy = "Required"
	UserNamespaceDisabled UserNamespacePolicy = "Disabled"
)

// ImagePolicy determines what a Sandbox needs to use an image that is on the node already.
// +kubebuilder:validation:Enum=Cached;Verify
type ImagePolicy string

// The image policies.
const (
	// ImagePolicyCached: nothing. Any Sandbox on the node can use the image, also one that another pool pulled.
	ImagePolicyCached ImagePolicy = "Cached"
	// ImagePolicyVerify: the image's registry has it under its name, and lets the pool's credentials have it. The agent asks at
	// each create, and pulls the image again if the registry has another one by now.
	ImagePolicyVerify ImagePolicy = "Verify"
)

// PoolCapacity bounds the number of agents and the free capacity of a pool.
// +kubebuilder:validation:XValidation:rule="self.poolMin <= self.poolMax",message="poolMin must not exceed poolMax: to scale further, raise poolMax first"
// +kubebuilder:validation:XValidation:rule="self.bufferMin <= self.bufferMax",message="bufferMin must not exceed bufferMax"
type PoolCapacity struct {
	// poolMin is the minimum number of agents.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	PoolMin int32 `json:"poolMin"`
	// poolMax is the maximum number of agents that accept sandboxes. Draining agents do not count: a rollout drains up to a
	// quarter of poolMax, rounded up, at a time.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	PoolMax int32 `json:"poolMax"`
	// bufferMin is the minimum free capacity, in sandboxes, to keep ready.
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +optional
	BufferMin int32 `json:"bufferMin"`
	// bufferMax is the free capacity, in sandboxes, above which idle agents are removed.
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +optional
	BufferMax int32 `json:"bufferMax"`
}

// PoolSlots bounds the number of free slots of each agent. A slot is free until a sandbox claims it.
// +kubebuilder:validation:XValidation:rule="!has(self.min) || !has(self.max) || self.min <= self.max",message="slots.min must not exceed slots.max"
type PoolSlots struct {
	// min is the minimum number of free slots that an agent keeps, within its free capacity, even if it would keep fewer by
	// itself, for example because memory is short. Unset: 0.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	// +optional
	Min *int32 `json:"min,omitempty"`
	// max is the maximum number of free slots that an agent keeps. Unset: its free capacity. 0: no slots; every sandbox takes
	// the cold path.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	// +optional
	Max *int32 `json:"max,omitempty"`
}

// PoolSecurity changes what the sandboxes of a pool may do.
type PoolSecurity struct {
	// addCapabilities are Linux capabilities that root in a sandbox has besides the default ones, which are CHOWN, DAC_OVERRIDE,
	// FSETID, FOWNER, SETGID, SETUID, SETFCAP, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT and KILL. NET_RAW lets a sandbox read and forge
	// packets of the network that it shares with its agent, MKNOD make device nodes, and AUDIT_WRITE write to the node's audit log.
	// +kubebuilder:validation:MaxItems=3
	// +listType=set
	// +optional
	AddCapabilities []Capability `json:"addCapabilities,omitempty"`
}

// Capability is a Linux capability that a pool can add to those of its sandboxes.
// +kubebuilder:validation:Enum=NET_RAW;MKNOD;AUDIT_WRITE
type Capability string

// The capabilities that a pool can add.
const (
	CapabilityNetRaw     Capability = "NET_RAW"
	CapabilityMknod      Capability = "MKNOD"
	CapabilityAuditWrite Capability = "AUDIT_WRITE"
)

// AddedCapabilities returns the capabilities that the pool adds; nil if there are none.
func (s *SandboxPoolSpec) AddedCapabilities() []Capability {
	if s.Security == nil {
		return nil
	}
	return s.Security.AddCapabilities
}

// Off reports whether the pool disables slots.
func (s *PoolSlots) Off() bool { return s != nil && s.Max != nil && *s.Max == 0 }

// AgentTemplate is the template of agent Pods: labels, annotations and spec. It must have a container named `agent` with an
// image.
type AgentTemplate struct {
	// metadata of the agent Pods: labels and annotations.
	// +optional
	Metadata AgentTemplateMetadata `json:"metadata,omitempty"`
	// spec of the agent Pods.
	// +kubebuilder:pruning:PreserveUnknownFields
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	Spec corev1.PodSpec `json:"spec"`
}

// AgentTemplateMetadata is the metadata that a template can set.
type AgentTemplateMetadata struct {
	// labels of the agent Pods.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// annotations of the agent Pods.
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
}

// SandboxPoolStatus is the observed state of a SandboxPool.
type SandboxPoolStatus struct {
	// observedGeneration is the generation of the spec that the controller has processed.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// desiredAgents is the number of agents that the pool should have now.
	// +optional
	DesiredAgents int32 `json:"desiredAgents"`
	// currentAgents is the number of agent Pods, draining ones included.
	// +optional
	CurrentAgents int32 `json:"currentAgents"`
	// readyAgents is the number of ready agent Pods, without draining ones.
	// +optional
	ReadyAgents int32 `json:"readyAgents"`
	// drainingAgents is the number of agent Pods that accept no new sandboxes and are deleted when they have none left. They do
	// not count toward poolMax.
	// +optional
	DrainingAgents int32 `json:"drainingAgents"`
	// capacity is the number of sandboxes that the ready agents can run at a time.
	// +optional
	Capacity int32 `json:"capacity"`
	// activeSandboxes is the number of sandboxes that use capacity of the pool's agents. A sandbox whose process has ended uses
	// none.
	// +optional
	ActiveSandboxes int32 `json:"activeSandboxes"`
	// freeCapacity is the number of further sandboxes that the ready agents can run.
	// +optional
	FreeCapacity int32 `json:"freeCapacity"`
	// readySlots is the number of free slots on ready agents: that many sandboxes can start without the cold path.
	// +optional
	ReadySlots int32 `json:"readySlots"`
	// images is the state of each image of spec.images.
	// +listType=map
	// +listMapKey=image
	// +optional
	Images []PoolImageStatus `json:"images,omitempty"`
	// selector is the label selector of the agent Pods, for the scale subresource.
	// +optional
	Selector string `json:"selector,omitempty"`
	// conditions are Ready, Progressing, RuntimeReady, SlotsReady, ImagesReady and UserNamespaces.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PoolImageStatus is the state of one image of a pool.
type PoolImageStatus struct {
	// image is the reference as spec.images has it.
	Image string `json:"image"`
	// readyNodes is the number of nodes of the pool's agents that have the image.
	ReadyNodes int32 `json:"readyNodes"`
	// nodes lists the nodes of the pool's agents. Of more than 100 nodes, those that are not ready are listed first.
	// +listType=map
	// +listMapKey=node
	// +optional
	Nodes []NodeImageStatus `json:"nodes,omitempty"`
}

// ImageState is the state of an image on a node.
// +kubebuilder:validation:Enum=Pulling;Ready;Failed
type ImageState string

// The image states.
const (
	// ImageStatePulling: the image is being pulled, or the agent has not reported it yet.
	ImageStatePulling ImageState = "Pulling"
	// ImageStateReady: the image is on the node and is kept there.
	ImageStateReady ImageState = "Ready"
	// ImageStateFailed: the last pull failed. The agent pulls again, with backoff.
	ImageStateFailed ImageState = "Failed"
)

// NodeImageStatus is the state of one image on one node.
type NodeImageStatus struct {
	// node is the name of the node.
	Node string `json:"node"`
	// state of the image on the node.
	State ImageState `json:"state"`
	// message explains why the last pull failed, for people.
	// +optional
	Message string `json:"message,omitempty"`
}

// SandboxPool keeps agents ready for sandboxes.
//
// The scale subresource sets capacity.poolMin, the number of agents that are kept regardless of the load.
//
// A SandboxPool that is deleted accepts no new sandboxes, and stays until the sandboxes of its agents are gone.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.capacity.poolMin,statuspath=.status.currentAgents,selectorpath=.status.selector
// +kubebuilder:resource:shortName=sbp,categories=fsb
// +kubebuilder:printcolumn:name="Agents",type=integer,JSONPath=`.status.currentAgents`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyAgents`
// +kubebuilder:printcolumn:name="Draining",type=integer,JSONPath=`.status.drainingAgents`,priority=1
// +kubebuilder:printcolumn:name="Min",type=integer,JSONPath=`.spec.capacity.poolMin`
// +kubebuilder:printcolumn:name="Max",type=integer,JSONPath=`.spec.capacity.poolMax`
// +kubebuilder:printcolumn:name="Sandboxes",type=integer,JSONPath=`.status.activeSandboxes`
// +kubebuilder:printcolumn:name="Free",type=integer,JSONPath=`.status.freeCapacity`
// +kubebuilder:printcolumn:name="Slots",type=integer,JSONPath=`.status.readySlots`,priority=1
// +kubebuilder:printcolumn:name="Runtime",type=string,JSONPath=`.spec.runtimeHandler`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SandboxPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxPoolSpec `json:"spec"`
	// +optional
	Status SandboxPoolStatus `json:"status,omitempty"`
}

// SandboxPoolList is a list of SandboxPools.
// +kubebuilder:object:root=true
type SandboxPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SandboxPool `json:"items"`
}
