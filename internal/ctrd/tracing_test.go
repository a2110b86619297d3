package ctrd_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/api/services/version/v1"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// versionServer is the part of containerd that the test calls. It keeps the trace contexts that it receives.
type versionServer struct {
	version.UnimplementedVersionServer

	received chan []string
}

func (s *versionServer) Version(ctx context.Context, _ *emptypb.Empty) (*version.VersionResponse, error) {
	s.received <- metadata.ValueFromIncomingContext(ctx, "traceparent")
	return &version.VersionResponse{Version: "test"}, nil
}

// TestCallsJoinTheTrace calls containerd inside and outside of a trace.
func TestCallsJoinTheTrace(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	oldProvider, oldPropagator := otel.GetTracerProvider(), otel.GetTextMapPropagator()
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	t.Cleanup(func() { otel.SetTracerProvider(oldProvider); otel.SetTextMapPropagator(oldPropagator) })

	socket := filepath.Join(t.TempDir(), "containerd.sock")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	server, service := grpc.NewServer(), &versionServer{received: make(chan []string, 1)}
	version.RegisterVersionServer(server, service)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); require.NoError(t, <-served) })
	client, err := ctrd.Dial(socket, "test")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })

	_, err = client.Version(t.Context())
	require.NoError(t, err)
	require.Empty(t, <-service.received)
	require.Empty(t, recorder.Ended(), "a call outside of a trace begins none")

	ctx, parent := provider.Tracer("test").Start(t.Context(), "parent")
	_, err = client.Version(ctx)
	require.NoError(t, err)
	parent.End()
	spans := recorder.Ended()
	require.Len(t, spans, 2)
	require.Equal(t, parent.SpanContext().SpanID(), spans[0].Parent().SpanID())
	call := spans[0].SpanContext()
	require.Equal(t, []string{"00-" + call.TraceID().String() + "-" + call.SpanID().String() + "-01"}, <-service.received)
}
