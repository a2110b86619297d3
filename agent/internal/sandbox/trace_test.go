package sandbox_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestDeleteStaysInItsTrace deletes a sandbox whose removal fails until the agent restarts. Every attempt, also that of the
// next agent process, belongs to the trace of the delete call.
func TestDeleteStaysInItsTrace(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(provider)
	t.Cleanup(func() { otel.SetTracerProvider(before) })

	rt, root := newRuntime(), t.TempDir()
	removals := make(chan trace.TraceID, 10)
	away := true
	rt.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op != fake.OpDelete {
			return nil
		}
		removals <- trace.SpanContextFromContext(ctx).TraceID()
		if away {
			return errAway
		}
		return nil
	})
	env := boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("u", 1))
	ctx, call := provider.Tracer("test").Start(t.Context(), "delete")
	require.ErrorIs(t, env.deleteWithTombstone(ctx, "u", 1, 0), errAway)
	require.Equal(t, call.SpanContext().TraceID(), <-removals)
	require.NoError(t, env.Close(t.Context()))
	for len(removals) > 0 {
		require.Equal(t, call.SpanContext().TraceID(), <-removals)
	}

	away = false
	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	require.Equal(t, call.SpanContext().TraceID(), <-removals)
	require.Eventually(t, func() bool { return len(env.reports()) == 0 }, testkit.Timeout, testkit.Tick)
	require.NoError(t, env.Close(t.Context()))
	terminations := 0
	for _, span := range recorder.Ended() {
		if span.Name() == "terminate" {
			terminations++
			require.Equal(t, call.SpanContext().SpanID(), span.Parent().SpanID())
		}
	}
	require.Equal(t, 2, terminations)
}
