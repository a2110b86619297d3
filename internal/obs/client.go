package obs

import (
	"context"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// ClientHandler returns the stats handler that makes a span of each call of a gRPC client. It is otelgrpc's, except that a call
// that its own caller canceled has not failed: watches end so, and streams whose reader has what it needs.
func ClientHandler() stats.Handler { return client{otelgrpc.NewClientHandler()} }

type client struct{ stats.Handler }

// HandleRPC implements stats.Handler.
func (c client) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if end, ok := s.(*stats.End); ok && status.Code(end.Error) == codes.Canceled && ctx.Err() != nil {
		trace.SpanFromContext(ctx).SetAttributes(attribute.Bool(AttrCanceled, true))
		without := *end
		without.Error = nil
		s = &without
	}
	c.Handler.HandleRPC(ctx, s)
}
