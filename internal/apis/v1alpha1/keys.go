package v1alpha1

// Labels of containerd containers (the janitor's only evidence), of agent Pods and of Sandboxes.
const (
	// LabelManaged is "true" on every container of this project. Containers without it are never modified.
	LabelManaged = Group + "/managed"
	// LabelAgentUID is the uid of the agent Pod that a container belongs to.
	LabelAgentUID = Group + "/agent-uid"
	// LabelPool is the name of a pool, on containers, agent Pods and Sandboxes.
	LabelPool = Group + "/pool"
	// LabelSandboxNamespace is the namespace of a container's Sandbox.
	LabelSandboxNamespace = Group + "/sandbox-namespace"
	// LabelSandboxName is the name of a container's Sandbox.
	LabelSandboxName = Group + "/sandbox-name"
	// LabelSandboxUID is the uid of a container's Sandbox.
	LabelSandboxUID = Group + "/sandbox-uid"
	// LabelAttempt counts the containers of one Sandbox from 1.
	LabelAttempt = Group + "/attempt"
	// LabelState is StateSlot on a container that no sandbox has claimed, and StateClaimed on a sandbox's.
	LabelState = Group + "/state"
	// LabelPersisted is "true" on a container whose Sandbox was written to the API server.
	LabelPersisted = Group + "/persisted"
	// LabelAgentProcess identifies the process of the agent that made a container.
	LabelAgentProcess = Group + "/agent-process"
	// LabelComponent is the component that a Pod of this project runs. Agent Pods have ComponentAgent.
	LabelComponent = Group + "/component"
	// LabelTemplateHash is the hash of the agent template that an agent Pod was created from.
	LabelTemplateHash = Group + "/template-hash"
	// LabelNode, on a Sandbox, is the node that runs it. Each node's janitor selects its Sandboxes by it.
	LabelNode = Group + "/node"
)

// Values of the labels above.
const (
	ComponentAgent = "agent"
	StateSlot      = "slot"
	StateClaimed   = "claimed"
)

// Annotations of Sandboxes.
const (
	// AnnotationAssignment is the JSON of an Assignment, the agent that runs the Sandbox.
	AnnotationAssignment = Group + "/assignment"
	// AnnotationSandboxUID is the uid of a Sandbox that was created on the fast path, where it needs a uid before the API
	// server can assign one. Without it metadata.uid is used; see Sandbox.EffectiveUID.
	AnnotationSandboxUID = Group + "/sandbox-uid"
	// AnnotationRequestID is the request_id of the create call.
	AnnotationRequestID = Group + "/request-id"
	// AnnotationTraceparent is the W3C traceparent of the create call, so that reconcilers link to its trace.
	AnnotationTraceparent = Group + "/traceparent"
	// AnnotationCreateTime is when a fast create was accepted (RFC 3339 with nanoseconds), before metadata.creationTimestamp.
	AnnotationCreateTime = Group + "/create-time"
	// AnnotationAbandoned marks a Sandbox that is deleted because its create call failed: its request_id can be used again.
	AnnotationAbandoned = Group + "/abandoned"
	// AnnotationResumed marks a Sandbox whose create call a later leader has resumed: only that leader may roll it back.
	AnnotationResumed = Group + "/resumed"
	// AnnotationUpdateRequestID is the request_id of the last update call that had one.
	AnnotationUpdateRequestID = Group + "/update-request-id"
	// AnnotationDeleteGracePeriod is the grace period of the delete call, a whole number of seconds, which overrides that of
	// the spec. It is written before the deletion; see Sandbox.DeleteGracePeriod.
	AnnotationDeleteGracePeriod = Group + "/delete-grace-period-seconds"
	// AnnotationDeleteRequestID is the request_id of the delete call.
	AnnotationDeleteRequestID = Group + "/delete-request-id"
	// AnnotationDeleteTraceparent is the W3C traceparent of the delete call, so that the deletion's spans join its trace.
	AnnotationDeleteTraceparent = Group + "/delete-traceparent"
	// AnnotationRequestDigest is a digest of the create request. It distinguishes a retry from another request with the same
	// request_id, even after the Sandbox was changed.
	AnnotationRequestDigest = Group + "/request-digest"
)

// AnnotationDefaultPool, on a Namespace, is the pool of its Sandboxes that do not name one. Without it the pool is
// DefaultPool. See DefaultPoolOf.
const (
	AnnotationDefaultPool = Group + "/default-pool"
	DefaultPool           = "default"
)

// AnnotationDraining is an annotation of an agent Pod, the reason why the agent is drained: it accepts no new sandboxes, and is
// deleted when it has none left. It is one of the reasons below, or any other text that a person has written; then the agent drains
// until the annotation is removed.
const AnnotationDraining = Group + "/draining"

// The reasons why the controller drains agents.
const (
	// DrainScaleDown: the pool has more agents than it needs.
	DrainScaleDown = "scale-down"
	// DrainOutdated: the pool's agent template has changed.
	DrainOutdated = "template-changed"
	// DrainPoolDeleted: the pool is being deleted.
	DrainPoolDeleted = "pool-deleted"
)

// Finalizer keeps a Sandbox until its container is removed, and a SandboxPool until its agents are drained.
const Finalizer = Group + "/cleanup"

// Condition types of Sandboxes and SandboxPools.
const (
	// ConditionReady is True while the process of a Sandbox runs; on a pool, while it has a ready agent.
	ConditionReady = "Ready"
	// ConditionScheduled is True while the Sandbox is assigned to an agent.
	ConditionScheduled = "Scheduled"
	// ConditionAgentLost is True while the agent of an assigned Sandbox is unreachable or its Pod does not exist.
	ConditionAgentLost = "AgentLost"
	// ConditionFinished is True after the process has exited.
	ConditionFinished = "Finished"
	// ConditionProgressing is True on a pool while agents are created or drained.
	ConditionProgressing = "Progressing"
	// ConditionSlotsReady is True on a pool while each ready agent that keeps slots has a free one. A pool that disables slots
	// (slots.max is 0) does not have this condition.
	ConditionSlotsReady = "SlotsReady"
	// ConditionImagesReady is True on a pool while every image of spec.images is on every node of its agents. A pool without
	// images does not have this condition.
	ConditionImagesReady = "ImagesReady"
	// ConditionUserNamespaces is True on a pool while the sandboxes of all its agents have user namespaces, and says why not
	// otherwise. A pool that disables them does not have this condition.
	ConditionUserNamespaces = "UserNamespaces"
	// ConditionRuntimeReady is True on a pool while the container runtimes of its agents can run new sandboxes. It is False if that of
	// any agent cannot, and says why: containerd is lost, it is too old for the pool's runtime handler, or the node has no user
	// namespaces although the pool requires them.
	ConditionRuntimeReady = "RuntimeReady"
)
