// Package fault defines the errors that components return to each other: an errdefs class that determines how a caller
// reacts, a Reason that states what happened, a message for people, and metadata. It is pure data. internal/rpc alone
// converts a fault to a gRPC status and back. Values are immutable and safe for concurrent use.
package fault

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// Reason states what happened, for machines. It is the name of a value of the API's ErrorReason without the prefix.
type Reason string

// Reasons of errors, documented in proto/fastsandbox/sandbox/v1/errors.proto. A test keeps the two lists equal.
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
	Unauthenticated      Reason = "UNAUTHENTICATED"
	Internal             Reason = "INTERNAL"
	Overloaded           Reason = "OVERLOADED"
	PhaseConflict        Reason = "PHASE_CONFLICT"
	APIUnavailable       Reason = "API_UNAVAILABLE"
	Cancelled            Reason = "CANCELLED"
	RequestTooLarge      Reason = "REQUEST_TOO_LARGE"
	LeaderSuperseded     Reason = "LEADER_SUPERSEDED"
	AgentDraining        Reason = "AGENT_DRAINING"
	ImageInvalid         Reason = "IMAGE_INVALID"

	ServiceAccountNotFound Reason = "SERVICE_ACCOUNT_NOT_FOUND"
	QuotaExceeded          Reason = "QUOTA_EXCEEDED"
	CallerLimitExceeded    Reason = "CALLER_LIMIT_EXCEEDED"

	ProcessNotFound      Reason = "PROCESS_NOT_FOUND"
	ProcessExists        Reason = "PROCESS_EXISTS"
	ProcessConflict      Reason = "PROCESS_CONFLICT"
	SandboxLimitExceeded Reason = "SANDBOX_LIMIT_EXCEEDED"
	SandboxUnresponsive  Reason = "SANDBOX_UNRESPONSIVE"
	SandboxPaused        Reason = "SANDBOX_PAUSED"
	ProcessLost          Reason = "PROCESS_LOST"
	CallUnsupported      Reason = "CALL_UNSUPPORTED"
	PortUnavailable      Reason = "PORT_UNAVAILABLE"

	FileNotFound     Reason = "FILE_NOT_FOUND"
	FileExists       Reason = "FILE_EXISTS"
	FileAccessDenied Reason = "FILE_ACCESS_DENIED"
	FileConflict     Reason = "FILE_CONFLICT"
	FileChanged      Reason = "FILE_CHANGED"
)

// FieldKey is the metadata key of the field that an InvalidField error names, in proto notation (`spec.image`).
const FieldKey = "field"

// OutcomeKey is a metadata key. Its value OutcomeUnknown states that the failed operation may have taken effect, or may
// still take effect. After an error without it, nothing of the operation remains.
const (
	OutcomeKey     = "outcome"
	OutcomeUnknown = "unknown"
)

// Error is an error with a class, a reason, a message and metadata.
type Error struct {
	class      error
	cause      error
	reason     Reason
	message    string
	metadata   map[string]string
	violations []Violation
	retryAfter time.Duration
}

// New returns an error of the class (an errdefs sentinel such as errdefs.ErrNotFound).
func New(class error, reason Reason, format string, args ...any) *Error {
	return &Error{class: class, reason: reason, message: fmt.Sprintf(format, args...)}
}

// Wrap returns an error like New with a cause. The cause appears in logs; clients of an API receive only the message.
func Wrap(cause, class error, reason Reason, format string, args ...any) *Error {
	e := New(class, reason, format, args...)
	e.cause = cause
	return e
}

// Violation says what is wrong with one field of a request.
type Violation struct {
	// Field in proto notation (`spec.image`).
	Field string
	// Message for people. It does not repeat the field.
	Message string
}

// Field returns an InvalidField error that names the field.
func Field(field, format string, args ...any) *Error {
	return Fields(Violation{Field: field, Message: fmt.Sprintf(format, args...)})
}

// Fields returns an invalid-argument error with one violation for each field that is wrong; its message lists them all,
// its metadata names the first.
func Fields(first Violation, others ...Violation) *Error {
	all := append([]Violation{first}, others...)
	messages := make([]string, len(all))
	for i, v := range all {
		messages[i] = v.Field + ": " + v.Message
	}
	return New(errdefs.ErrInvalidArgument, InvalidField, "%s", strings.Join(messages, "; ")).With(FieldKey, first.Field).WithViolations(all...)
}

// With returns a copy with one more metadata entry.
func (e *Error) With(key, value string) *Error {
	c := *e
	c.metadata = maps.Clone(e.metadata)
	if c.metadata == nil {
		c.metadata = map[string]string{}
	}
	c.metadata[key] = value
	return &c
}

// WithViolations returns a copy that carries these violations in place of its own.
func (e *Error) WithViolations(all ...Violation) *Error {
	c := *e
	c.violations = slices.Clone(all)
	return &c
}

// Unsettled returns a copy of the first fault in err's chain that states that the outcome is unknown. Any other error makes
// no statement about the outcome and is returned unchanged.
func Unsettled(err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return err
	}
	return e.With(OutcomeKey, OutcomeUnknown)
}

// IsUnsettled reports whether the first fault in err's chain states that the outcome is unknown.
func IsUnsettled(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.metadata[OutcomeKey] == OutcomeUnknown
}

// RetryIn returns a copy that asks the caller to retry after d.
func (e *Error) RetryIn(d time.Duration) *Error {
	c := *e
	c.retryAfter = d
	return &c
}

// Error returns the message followed by the cause, for logs.
func (e *Error) Error() string {
	if e.cause == nil {
		return e.message
	}
	return e.message + ": " + e.cause.Error()
}

// Unwrap returns the class and the cause, for errors.Is and errors.As.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.class}
	}
	return []error{e.class, e.cause}
}

// Class returns the errdefs sentinel.
func (e *Error) Class() error { return e.class }

// Reason returns the reason.
func (e *Error) Reason() Reason { return e.reason }

// Message returns the message for people, without the cause.
func (e *Error) Message() string { return e.message }

// Metadata returns a copy of the metadata.
func (e *Error) Metadata() map[string]string { return maps.Clone(e.metadata) }

// Violations returns what is wrong with each field. A fault that names a field and no violations has one, its message.
func (e *Error) Violations() []Violation {
	if field := e.metadata[FieldKey]; field != "" && len(e.violations) == 0 {
		return []Violation{{Field: field, Message: e.message}}
	}
	return slices.Clone(e.violations)
}

// ReasonOf returns the reason of the first fault in err's chain, or "" without one.
func ReasonOf(err error) Reason {
	var e *Error
	if errors.As(err, &e) {
		return e.reason
	}
	return ""
}

// RetryAfter returns the retry delay of the first fault in err's chain, and false if it has none.
func RetryAfter(err error) (time.Duration, bool) {
	var e *Error
	if errors.As(err, &e) && e.retryAfter > 0 {
		return e.retryAfter, true
	}
	return 0, false
}
