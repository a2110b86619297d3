package fault_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestErrorHasClassCauseAndMessage(t *testing.T) {
	err := fault.Wrap(io.ErrUnexpectedEOF, errdefs.ErrUnavailable, fault.AgentUnavailable, "agent %s is away", "a1")
	require.True(t, errdefs.IsUnavailable(err))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, "agent a1 is away", err.Message())
	require.Equal(t, "agent a1 is away: unexpected EOF", err.Error())
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(errors.Join(errors.New("first"), err)))
	require.Empty(t, fault.ReasonOf(io.EOF))
}

func TestWithAndRetryInReturnCopies(t *testing.T) {
	base := fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full").With("pool", "p")
	changed := base.With("pool", "q").RetryIn(time.Minute)
	require.Equal(t, map[string]string{"pool": "p"}, base.Metadata())
	require.Equal(t, map[string]string{"pool": "q"}, changed.Metadata())
	_, ok := fault.RetryAfter(base)
	require.False(t, ok)
	after, ok := fault.RetryAfter(changed)
	require.True(t, ok)
	require.Equal(t, time.Minute, after)
}

func TestFieldHasTheFieldAsMetadata(t *testing.T) {
	err := fault.Field("spec.image", "is %q", "")
	require.True(t, errdefs.IsInvalidArgument(err))
	require.Equal(t, "spec.image", err.Metadata()[fault.FieldKey])
	require.Contains(t, err.Error(), "spec.image")
}

func TestFieldsKeepsViolationsApart(t *testing.T) {
	one, two := fault.Violation{Field: "name", Message: "is empty"}, fault.Violation{Field: "spec.image", Message: "is too long"}
	err := fault.Fields(one, two)
	require.True(t, errdefs.IsInvalidArgument(err))
	require.Equal(t, "name: is empty; spec.image: is too long", err.Message())
	require.Equal(t, "name", err.Metadata()[fault.FieldKey])
	require.Equal(t, []fault.Violation{one, two}, err.Violations())
	require.Equal(t, []fault.Violation{two}, err.WithViolations(two).Violations())
	require.Equal(t, []fault.Violation{one, two}, err.Violations(), "the original is not changed")

	named := fault.New(errdefs.ErrInvalidArgument, fault.RequestTooLarge, "too large").With(fault.FieldKey, "spec")
	require.Equal(t, []fault.Violation{{Field: "spec", Message: "too large"}}, named.Violations())
	require.Empty(t, fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "no pool").Violations())
}

// The reasons and the values of the API's enum are equal in both directions.
func TestReasonsEqualTheAPI(t *testing.T) {
	ours := map[string]bool{}
	for _, r := range []fault.Reason{
		fault.InvalidField, fault.PoolNotFound, fault.SandboxNotFound, fault.SandboxExists, fault.RequestIDReused,
		fault.NoCapacity, fault.PortConflict, fault.ImageNotFound, fault.ImagePullFailed, fault.CommandNotFound,
		fault.CommandNotExecutable, fault.UserNotFound, fault.WorkingDirInvalid, fault.FenceMismatch,
		fault.AgentUnavailable, fault.RuntimeUnavailable, fault.NotLeader, fault.DeadlineExceeded,
		fault.SandboxTerminating, fault.PermissionDenied, fault.Internal, fault.Overloaded, fault.PhaseConflict,
		fault.APIUnavailable, fault.Cancelled, fault.RequestTooLarge,
		fault.LeaderSuperseded, fault.AgentDraining, fault.ImageInvalid, fault.Unauthenticated, fault.ServiceAccountNotFound,
		fault.QuotaExceeded, fault.CallerLimitExceeded, fault.ProcessNotFound, fault.ProcessExists, fault.ProcessConflict,
		fault.SandboxLimitExceeded, fault.SandboxUnresponsive, fault.FileNotFound, fault.FileExists, fault.FileAccessDenied,
		fault.FileConflict, fault.FileChanged, fault.SandboxPaused, fault.ProcessLost, fault.CallUnsupported,
		fault.PortUnavailable,
	} {
		ours[string(r)] = true
	}
	theirs := map[string]bool{}
	for value, name := range sandboxv1.ErrorReason_name {
		if value != 0 {
			theirs[strings.TrimPrefix(name, "ERROR_REASON_")] = true
		}
	}
	require.Equal(t, theirs, ours)
}
