package rest

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	retryTries   = 5
	retryInitial = 50 * time.Millisecond
	retryMax     = 500 * time.Millisecond
)

// client is the allocator's client with what HTTP brings along: a create's request_id from the Idempotency-Key, the other
// mutations' from the X-Request-Id, and a short second chance while the allocator's leader changes.
type client struct {
	sandboxv1.SandboxServiceClient
}

// CreateSandbox takes the Idempotency-Key for the request_id. A create without either gets one of its own, so that the
// second chance below cannot make a second sandbox.
func (c client) CreateSandbox(ctx context.Context, in *sandboxv1.CreateSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.CreateSandboxResponse, error) {
	key := exchangeOf(ctx).idempotencyKey
	switch {
	case key != "" && in.GetRequestId() != "" && key != in.GetRequestId():
		return nil, rpc.ToStatus(fault.Field("request_id", "the body says %q and the header %s says %q", in.GetRequestId(), idempotencyHeader, key))
	case key != "":
		in.RequestId = key
	case in.GetRequestId() == "":
		in.RequestId = uuid.NewString()
	}
	return again(ctx, func() (*sandboxv1.CreateSandboxResponse, error) {
		return c.SandboxServiceClient.CreateSandbox(ctx, in, opts...)
	})
}

// DeleteSandbox names the request by its X-Request-Id.
func (c client) DeleteSandbox(ctx context.Context, in *sandboxv1.DeleteSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.DeleteSandboxResponse, error) {
	if in.GetRequestId() == "" {
		in.RequestId = exchangeOf(ctx).requestID
	}
	return again(ctx, func() (*sandboxv1.DeleteSandboxResponse, error) {
		return c.SandboxServiceClient.DeleteSandbox(ctx, in, opts...)
	})
}

// UpdateSandbox names the request by its X-Request-Id, and the mask's fields by their proto names: JSON callers write
// spec.expireTime, and grpc-gateway hands a mask from the query on as it came.
func (c client) UpdateSandbox(ctx context.Context, in *sandboxv1.UpdateSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.UpdateSandboxResponse, error) {
	if in.GetRequestId() == "" {
		in.RequestId = exchangeOf(ctx).requestID
	}
	for i, path := range in.GetUpdateMask().GetPaths() {
		in.UpdateMask.Paths[i] = protoPath(&sandboxv1.Sandbox{}, path)
	}
	return again(ctx, func() (*sandboxv1.UpdateSandboxResponse, error) {
		return c.SandboxServiceClient.UpdateSandbox(ctx, in, opts...)
	})
}

// GetSandbox reads one sandbox.
func (c client) GetSandbox(ctx context.Context, in *sandboxv1.GetSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.GetSandboxResponse, error) {
	return again(ctx, func() (*sandboxv1.GetSandboxResponse, error) {
		return c.SandboxServiceClient.GetSandbox(ctx, in, opts...)
	})
}

// ListSandboxes reads one page.
func (c client) ListSandboxes(ctx context.Context, in *sandboxv1.ListSandboxesRequest, opts ...grpc.CallOption) (*sandboxv1.ListSandboxesResponse, error) {
	return again(ctx, func() (*sandboxv1.ListSandboxesResponse, error) {
		return c.SandboxServiceClient.ListSandboxes(ctx, in, opts...)
	})
}

// again repeats a call that did not reach a leader, for about a second. Every other failure is the caller's to judge.
func again[T any](ctx context.Context, call func() (T, error)) (T, error) {
	var last error
	out, err := backoff.Retry(ctx, func() (T, error) {
		var out T
		if out, last = call(); last != nil && !leaderless(last) {
			return out, backoff.Permanent(last)
		}
		return out, last
	}, backoff.WithMaxTries(retryTries), backoff.WithBackOff(&backoff.ExponentialBackOff{
		InitialInterval: retryInitial, RandomizationFactor: 0.3, Multiplier: 2, MaxInterval: retryMax,
	}))
	if err != nil {
		return out, last
	}
	return out, nil
}

// leaderless tells whether a call failed because it reached no server, or one that is not the leader.
func leaderless(err error) bool {
	st := status.Convert(err)
	if st.Code() != codes.Unavailable {
		return false
	}
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason() == string(fault.NotLeader)
		}
	}
	return true
}
