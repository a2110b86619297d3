package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

func TestStatusRoundTrip(t *testing.T) {
	tests := []struct {
		name   string
		err    error
		code   codes.Code
		reason fault.Reason
		is     func(error) bool
		retry  bool
	}{
		{"fault", fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "no pool").With("pool", "p"), codes.NotFound, fault.PoolNotFound, errdefs.IsNotFound, false},
		{"field", fault.Field("spec.image", "empty"), codes.InvalidArgument, fault.InvalidField, errdefs.IsInvalidArgument, false},
		{"exhausted", fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"), codes.ResourceExhausted, fault.NoCapacity, errdefs.IsResourceExhausted, true},
		{"unavailable", fault.New(errdefs.ErrUnavailable, fault.NotLeader, "standby"), codes.Unavailable, fault.NotLeader, errdefs.IsUnavailable, true},
		{"precondition", fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "old"), codes.FailedPrecondition, fault.FenceMismatch, errdefs.IsFailedPrecondition, false},
		{"aborted", fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "going"), codes.Aborted, fault.SandboxTerminating, errdefs.IsAborted, false},
		{"exists", fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "taken"), codes.AlreadyExists, fault.SandboxExists, errdefs.IsAlreadyExists, false},
		{"deadline", fmt.Errorf("creating: %w", context.DeadlineExceeded), codes.DeadlineExceeded, fault.DeadlineExceeded, func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }, false},
		{"cancelled", context.Canceled, codes.Canceled, fault.Cancelled, func(err error) bool { return errors.Is(err, context.Canceled) }, false},
		{"the fault's class wins over its cause's", fault.Wrap(context.DeadlineExceeded, errdefs.ErrUnavailable, fault.AgentUnavailable, "away"), codes.Unavailable, fault.AgentUnavailable, errdefs.IsUnavailable, true},
		{"wrapped fault", fmt.Errorf("outer: %w", fault.Field("name", "bad")), codes.InvalidArgument, fault.InvalidField, errdefs.IsInvalidArgument, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			st := rpc.ToStatus(tt.err)
			require.Equal(t, tt.code, status.Code(st))
			var info *errdetails.ErrorInfo
			var retry *errdetails.RetryInfo
			for _, d := range status.Convert(st).Details() {
				switch d := d.(type) {
				case *errdetails.ErrorInfo:
					info = d
				case *errdetails.RetryInfo:
					retry = d
				}
			}
			require.Equal(t, string(tt.reason), info.GetReason())
			require.Equal(t, rpc.Domain, info.GetDomain())
			require.Equal(t, tt.retry, retry != nil)
			back := rpc.FromStatus(st)
			require.True(t, tt.is(back), "%v", back)
			require.Equal(t, tt.reason, fault.ReasonOf(back))
		})
	}
}

func TestStatusHidesErrorsWithoutClass(t *testing.T) {
	st := rpc.ToStatus(errors.New("password is hunter2"))
	require.Equal(t, codes.Internal, status.Code(st))
	require.NotContains(t, st.Error(), "hunter2")
	require.NoError(t, rpc.ToStatus(nil))
	require.NoError(t, rpc.FromStatus(nil))
}

func TestStatusKeepsRetryDelayAndMetadata(t *testing.T) {
	in := fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full").RetryIn(7*time.Second).With("pool", "p")
	back := rpc.FromStatus(rpc.ToStatus(in))
	after, ok := fault.RetryAfter(back)
	require.True(t, ok)
	require.Equal(t, 7*time.Second, after)
	var f *fault.Error
	require.ErrorAs(t, back, &f)
	require.Equal(t, map[string]string{"pool": "p"}, f.Metadata())
	require.Equal(t, "full", f.Message())
}
