package obs

// Attributes of spans. Ids belong here and in logs, never in metric labels.
const (
	AttrSandboxNamespace = "fastsandbox.sandbox.namespace"
	AttrSandboxName      = "fastsandbox.sandbox.name"
	AttrSandboxUID       = "fastsandbox.sandbox.uid"
	AttrAttempt          = "fastsandbox.sandbox.attempt"
	AttrAgentPod         = "fastsandbox.agent.pod"
	AttrAgentUID         = "fastsandbox.agent.uid"
	AttrPool             = "fastsandbox.pool"
	AttrNode             = "fastsandbox.node"
	AttrRequestID        = "fastsandbox.request_id"
	AttrContainer        = "fastsandbox.container"
	AttrReason           = "fastsandbox.reason"
	AttrRemnant          = "fastsandbox.remnant"
	AttrStartPath        = "fastsandbox.start_path"
	AttrCanceled         = "fastsandbox.canceled"
	AttrHTTPRoute        = "http.route" // the OpenTelemetry convention
)

// Keys of log records. A record names a thing by the same key in every component.
const (
	KeyError            = "err"
	KeySandbox          = "sandbox" // namespace/name
	KeySandboxUID       = "sandboxUID"
	KeyAttempt          = "attempt"
	KeyFence            = "fence"
	KeyAgent            = "agent" // the agent Pod's name
	KeyAgentUID         = "agentUID"
	KeyPool             = "pool"
	KeyNode             = "node"
	KeyPod              = "pod" // namespace/name
	KeyContainer        = "container"
	KeyImage            = "image"
	KeyReason           = "reason"
	KeyRequestID        = "requestID"
	KeyMethod           = "method"
	KeyCode             = "code"
	KeyAddress          = "address"
	KeyObject           = "object" // kind and namespace/name
	KeyKind             = "kind"
	KeyNamespace        = "namespace"
	KeyName             = "name"
	KeyUID              = "uid"
	KeyResource         = "resource" // resource.group, with its subresource
	KeyGroup            = "group"    // API group
	KeyVerb             = "verb"
	KeyCause            = "cause"
	KeyPolicy           = "policy"
	KeyCount            = "count"
	KeyCommand          = "command"
	KeyArguments        = "arguments" // a number, with the command
	KeyOwner            = "owner"
	KeyOwners           = "owners" // a number
	KeyFinalizer        = "finalizer"
	KeyScope            = "scope"
	KeyObjects          = "objects"   // a number
	KeyResources        = "resources" // a number
	KeyFailing          = "failing"
	KeyRemnant          = "remnant"
	KeyState            = "state"
	KeyFreedBytes       = "freedBytes"
	KeyPath             = "path"
	KeyLine             = "line" // a line that a library logged
	KeyService          = "service"
	KeyVersion          = "version"
	KeyStack            = "stack"
	KeyTraceID          = "traceID"
	KeyPID              = "pid"
	KeyFrom             = "from" // a phase
	KeyTo               = "to"
	KeyEvent            = "event"
	KeyFinishTime       = "finishTime"
	KeyTTLAfterFinished = "ttlAfterFinished"
	KeySandboxes        = "sandboxes"    // a number
	KeyAnsweredWith     = "answeredWith" // uid of the sandbox that a repeated create returned
	KeyActive           = "active"
	KeyPending          = "pending"
	KeyExitCode         = "exitCode"
	KeyDuration         = "duration"
	KeyAllocator        = "allocator"
	KeyCollector        = "gc"
	KeyUpstream         = "upstream"
	KeyUser             = "user"
	KeyGroups           = "groups" // of a user
	KeyAuthentication   = "authentication"
	KeyDecision         = "decision"
	KeyOmitted          = "omitted" // a number of records
)

// Keys of log records that only the agent writes.
const (
	KeyPings          = "pings"
	KeyDraining       = "draining"
	KeyUserNamespaces = "userNamespaces"
	KeyMemoryShort    = "memoryShort"
	KeyAvailableBytes = "availableBytes"
	KeyRole           = "role"
	KeyTerm           = "term"
	KeyPreviousTerm   = "previousTerm"
	KeyRemoved        = "removed"
	KeyLogsRemoved    = "logsRemoved"
)
