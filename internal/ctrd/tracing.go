package ctrd

import (
	"context"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"
)

// tracing makes spans of calls to containerd, and propagates them to it, so that containerd's own spans join the trace. A
// call outside of a trace gets none: the agent's pings and lists would make a trace each.
type tracing struct{ stats.Handler }

type untracedKey struct{}

// TagRPC implements stats.Handler.
func (t tracing) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return context.WithValue(ctx, untracedKey{}, true)
	}
	return t.Handler.TagRPC(ctx, info)
}

// HandleRPC implements stats.Handler.
func (t tracing) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if ctx.Value(untracedKey{}) == nil {
		t.Handler.HandleRPC(ctx, s)
	}
}
