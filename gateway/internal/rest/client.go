package rest

import (
	"context"

	"github.com/google/uuid"
	"google.golang.org/grpc"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// client adds to mutations what HTTP carries in headers: the request_id of a create from the Idempotency-Key, those of the
// others from the X-Request-Id.
type client struct {
	sandboxv1.SandboxServiceClient
}

// CreateSandbox takes the request_id from the Idempotency-Key. A create without either gets a new one, so that a retry by
// the gateway cannot create a second sandbox.
func (c client) CreateSandbox(ctx context.Context, in *sandboxv1.CreateSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.CreateSandboxResponse, error) {
	key := exchangeOf(ctx).idempotencyKey
	switch {
	case key != "" && in.GetRequestId() != "" && key != in.GetRequestId():
		return nil, rpc.ToStatus(fault.Field("request_id", "the body has %q and the header %s has %q", in.GetRequestId(), idempotencyHeader, key))
	case key != "":
		in.RequestId = key
	case in.GetRequestId() == "":
		in.RequestId = uuid.NewString()
	}
	return c.SandboxServiceClient.CreateSandbox(ctx, in, opts...)
}

// DeleteSandbox takes the request_id from the X-Request-Id.
func (c client) DeleteSandbox(ctx context.Context, in *sandboxv1.DeleteSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.DeleteSandboxResponse, error) {
	if in.GetRequestId() == "" {
		in.RequestId = exchangeOf(ctx).requestID
	}
	return c.SandboxServiceClient.DeleteSandbox(ctx, in, opts...)
}

// UpdateSandbox takes the request_id from the X-Request-Id. It converts the fields of the mask to their proto names: JSON
// callers write spec.expireTime, and grpc-gateway passes a mask from the query unchanged.
func (c client) UpdateSandbox(ctx context.Context, in *sandboxv1.UpdateSandboxRequest, opts ...grpc.CallOption) (*sandboxv1.UpdateSandboxResponse, error) {
	if in.GetRequestId() == "" {
		in.RequestId = exchangeOf(ctx).requestID
	}
	for i, path := range in.GetUpdateMask().GetPaths() {
		in.UpdateMask.Paths[i] = protoPath(&sandboxv1.Sandbox{}, path)
	}
	return c.SandboxServiceClient.UpdateSandbox(ctx, in, opts...)
}
