// Package fault holds the errors that cross a component's border: an errdefs class that says how a caller should react,
// a Reason that says what happened, a message for people, and metadata. It is pure data; internal/rpc alone turns a
// fault into a gRPC status and back. Values are immutable once returned and safe for concurrent use.
package fault

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/containerd/errdefs"
)

// Reason says what happened, for machines. It equals the name of a value of the API's ErrorReason without its prefix.
type Reason string

// The reasons. proto/fastsandbox/sandbox/v1/errors.proto documents each; a test keeps the two lists equal.
const (
	InvalidField         Reason = "INVALID_FIELD"
	PoolNotFound         Reason = "POOL_NOT_FOUND"
	SandboxNotFound      Reason = "SANDBOX_NOT_FOUND"
	SandboxExists        Reason = "SANDBOX_EXISTS"
	RequestIDReused      Reason = "REQUEST_ID_REUSED"
	NoCapacity           Reason = "NO_CAPACITY"
	PortConflict         Reason = "PORT_CONFLICT"
	ImageNotFound        Reason = "IMAGE_NOT_FOUND"
	ImagePullFailed      Reason = "IMAGE_PULL_FAILED"
	CommandNotFound      Reason = "COMMAND_NOT_FOUND"
	CommandNotExecutable Reason = "COMMAND_NOT_EXECUTABLE"
	UserNotFound         Reason = "USER_NOT_FOUND"
	WorkingDirInvalid    Reason = "WORKING_DIR_INVALID"
	FenceMismatch        Reason = "FENCE_MISMATCH"
	AgentUnavailable     Reason = "AGENT_UNAVAILABLE"
	RuntimeUnavailable   Reason = "RUNTIME_UNAVAILABLE"
	NotLeader            Reason = "NOT_LEADER"
	DeadlineExceeded     Reason = "DEADLINE_EXCEEDED"
	SandboxTerminating   Reason = "SANDBOX_TERMINATING"
	PermissionDenied     Reason = "PERMISSION_DENIED"
	Internal             Reason = "INTERNAL"
	Overloaded           Reason = "OVERLOADED"
	PhaseConflict        Reason = "PHASE_CONFLICT"
	APIUnavailable       Reason = "API_UNAVAILABLE"
	AgentNotFound        Reason = "AGENT_NOT_FOUND"
	Cancelled            Reason = "CANCELLED"
	RequestTooLarge      Reason = "REQUEST_TOO_LARGE"
	LeaderSuperseded     Reason = "LEADER_SUPERSEDED"
	AgentDraining        Reason = "AGENT_DRAINING"
	ImageInvalid         Reason = "IMAGE_INVALID"
)

// FieldKey is the metadata key under which an InvalidField error names the field, in proto notation (`spec.image`).
const FieldKey = "field"

// OutcomeKey is the metadata key that an error has, with the value OutcomeUnknown, if what it reports on may still have
// been, or come to be, carried out. An error without it leaves nothing behind.
const (
	OutcomeKey     = "outcome"
	OutcomeUnknown = "unknown"
)

// Error is a classified error.
type Error struct {
	class      error
	cause      error
	reason     Reason
	message    string
	metadata   map[string]string
	retryAfter time.Duration
}

// New returns an error of the class (an errdefs sentinel such as errdefs.ErrNotFound).
func New(class error, reason Reason, format string, args ...any) *Error {
	return &Error{class: class, reason: reason, message: fmt.Sprintf(format, args...)}
}

// Wrap is New with a cause, which is for logs: clients of an API see the message alone.
func Wrap(cause, class error, reason Reason, format string, args ...any) *Error {
	e := New(class, reason, format, args...)
	e.cause = cause
	return e
}

// Field returns an invalid-argument error that names the field.
func Field(field, format string, args ...any) *Error {
	return New(errdefs.ErrInvalidArgument, InvalidField, "%s: %s", field, fmt.Sprintf(format, args...)).With(FieldKey, field)
}

// With returns a copy that carries one more metadata entry.
func (e *Error) With(key, value string) *Error {
	c := *e
	c.metadata = maps.Clone(e.metadata)
	if c.metadata == nil {
		c.metadata = map[string]string{}
	}
	c.metadata[key] = value
	return &c
}

// Unsettled returns a copy of the first fault in err's chain that tells that the outcome is not known; any other error as
// it is: it promises nothing anyway.
func Unsettled(err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return err
	}
	return e.With(OutcomeKey, OutcomeUnknown)
}

// IsUnsettled tells whether the first fault in err's chain says that the outcome is not known.
func IsUnsettled(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.metadata[OutcomeKey] == OutcomeUnknown
}

// RetryIn returns a copy that tells the caller to retry after d.
func (e *Error) RetryIn(d time.Duration) *Error {
	c := *e
	c.retryAfter = d
	return &c
}

// Error is the message followed by the cause, for logs.
func (e *Error) Error() string {
	if e.cause == nil {
		return e.message
	}
	return e.message + ": " + e.cause.Error()
}

// Unwrap makes errors.Is see the class and the cause.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.class}
	}
	return []error{e.class, e.cause}
}

// Class is the errdefs sentinel.
func (e *Error) Class() error { return e.class }

// Reason says what happened.
func (e *Error) Reason() Reason { return e.reason }

// Message is the sentence for people, without the cause.
func (e *Error) Message() string { return e.message }

// Metadata is a copy of the metadata.
func (e *Error) Metadata() map[string]string { return maps.Clone(e.metadata) }

// ReasonOf is the reason of the first fault in err's chain, or "" if there is none.
func ReasonOf(err error) Reason {
	var e *Error
	if errors.As(err, &e) {
		return e.reason
	}
	return ""
}

// RetryAfter is how long the first fault in err's chain tells its caller to wait; false if it does not say.
func RetryAfter(err error) (time.Duration, bool) {
	var e *Error
	if errors.As(err, &e) && e.retryAfter > 0 {
		return e.retryAfter, true
	}
	return 0, false
}
