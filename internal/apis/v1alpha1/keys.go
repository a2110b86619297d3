package v1alpha1

// Labels of containerd containers (the janitor's only evidence), of agent Pods and of Sandboxes.
const (
	// LabelManaged is "true" on every container that is ours. Nothing without it is ever touched.
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
	// LabelState is "slot" on a started, unclaimed container and "claimed" on a sandbox's.
	LabelState = Group + "/state"
	// LabelPersisted is "true" on a container whose Sandbox is known to have been written to the API server.
	LabelPersisted = Group + "/persisted"
	// LabelComponent tells what a Pod of ours is; agent Pods carry ComponentAgent.
	LabelComponent = Group + "/component"
	// LabelTemplateHash is the hash of the agent template that an agent Pod was made from.
	LabelTemplateHash = Group + "/template-hash"
	// LabelNode is the node that runs a Sandbox, on the Sandbox, so that a node's janitor can select its own.
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
	// AnnotationAssignment is the JSON of an Assignment: where the Sandbox runs, written in one piece.
	AnnotationAssignment = Group + "/assignment"
	// AnnotationSandboxUID is the uid of a Sandbox that was created on the fast path, which had to have one before the
	// API server could give it one. Sandboxes without it go by metadata.uid; see Sandbox.EffectiveUID.
	AnnotationSandboxUID = Group + "/sandbox-uid"
	// AnnotationRequestID is the request_id of the create call.
	AnnotationRequestID = Group + "/request-id"
	// AnnotationTraceparent is the W3C traceparent of the create call, so that reconcilers link to its trace.
	AnnotationTraceparent = Group + "/traceparent"
	// AnnotationCreateTime is when a fast create was accepted (RFC 3339 with nanoseconds): before metadata.creationTimestamp.
	AnnotationCreateTime = Group + "/create-time"
	// AnnotationAbandoned marks a Sandbox whose create call failed and that is deleted for that: its request_id is free.
	AnnotationAbandoned = Group + "/abandoned"
	// AnnotationResumed marks a Sandbox whose create call a later leader has taken up: the one that began it undoes it no more.
	AnnotationResumed = Group + "/resumed"
	// AnnotationDeleteGracePeriod is the grace period, in seconds, of the delete call, which overrides that of the spec.
	// It is written before the deletion.
	AnnotationDeleteGracePeriod = Group + "/delete-grace-period-seconds"
	// AnnotationDeleteRequestID is the request_id of the delete call.
	AnnotationDeleteRequestID = Group + "/delete-request-id"
	// AnnotationDeleteTraceparent is the W3C traceparent of the delete call, so that the deletion's spans join its trace.
	AnnotationDeleteTraceparent = Group + "/delete-traceparent"
	// AnnotationRequestDigest is a digest of what the create call asked for, so that a retry is told from another request
	// with the same request_id even after the Sandbox was changed.
	AnnotationRequestDigest = Group + "/request-digest"
)

// AnnotationDefaultPool, on a Namespace, names the pool of Sandboxes that name none. DefaultPool is the name without it.
const (
	AnnotationDefaultPool = Group + "/default-pool"
	DefaultPool           = "default"
)

// AnnotationDraining tells, on an agent Pod, that the agent takes no new sandboxes and goes when it has none left, and why:
// for one of the reasons below, or by a person's own word, for whom it drains until the annotation is taken away.
const AnnotationDraining = Group + "/draining"

// Reasons for which the controller drains agents.
const (
	// DrainScaleDown: the pool has more agents than it wants.
	DrainScaleDown = "scale-down"
	// DrainOutdated: the pool's agent template has changed.
	DrainOutdated = "template-changed"
	// DrainPoolDeleted: the pool is being deleted.
	DrainPoolDeleted = "pool-deleted"
)

// Finalizer keeps a Sandbox until its container is gone, and a SandboxPool until its agents are drained.
const Finalizer = Group + "/cleanup"

// Condition types of Sandboxes and SandboxPools, and the reasons that more than one component uses.
const (
	// ConditionReady is True while the sandbox's process runs; on a pool, while it has an agent that takes sandboxes.
	ConditionReady = "Ready"
	// ConditionScheduled is True while the Sandbox is assigned to an agent.
	ConditionScheduled = "Scheduled"
	// ConditionAgentLost is True while the agent of an assigned Sandbox cannot be reached or is gone.
	ConditionAgentLost = "AgentLost"
	// ConditionFinished is True once the process has ended by itself.
	ConditionFinished = "Finished"
	// ConditionProgressing is True on a pool while agents come or go.
	ConditionProgressing = "Progressing"
	// ConditionSlotsReady is True on a pool while each ready agent that means to keep slots has one free. A pool that wants
	// none (slots.max is 0) has no such condition.
	ConditionSlotsReady = "SlotsReady"
)
