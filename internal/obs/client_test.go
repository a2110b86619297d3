package obs_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// watched answers a watch once, and then keeps it open or ends it with an error.
type watched struct {
	healthpb.UnimplementedHealthServer
	end error
}

func (w *watched) Watch(_ *healthpb.HealthCheckRequest, stream healthpb.Health_WatchServer) error {
	if err := stream.Send(&healthpb.HealthCheckResponse{}); err != nil {
		return err
	}
	if w.end == nil {
		<-stream.Context().Done()
	}
	return w.end
}

// TestCanceledByItsCaller: a watch that its caller cancels has not failed; one that the server cancels has.
func TestCanceledByItsCaller(t *testing.T) {
	for name, test := range map[string]struct {
		end  error
		code otelcodes.Code
	}{
		"by the caller": {nil, otelcodes.Unset},
		"by the server": {status.Error(codes.Canceled, "shutting down"), otelcodes.Error},
	} {
		t.Run(name, func(t *testing.T) {
			spans := tracetest.NewSpanRecorder()
			before := otel.GetTracerProvider()
			otel.SetTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)))
			t.Cleanup(func() { otel.SetTracerProvider(before) })
			client := healthpb.NewHealthClient(serve(t, &watched{end: test.end}))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stream, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
			require.NoError(t, err)
			_, err = stream.Recv()
			require.NoError(t, err)
			if test.end == nil {
				cancel()
			}
			_, err = stream.Recv()
			require.Equal(t, codes.Canceled, status.Code(err))
			require.Eventually(t, func() bool { return len(spans.Ended()) == 1 }, testkit.Timeout, time.Millisecond)
			span := spans.Ended()[0]
			require.Equal(t, test.code, span.Status().Code)
			require.Equal(t, test.end == nil, hasAttribute(span, attribute.Bool(obs.AttrCanceled, true)))
		})
	}
}

func hasAttribute(span sdktrace.ReadOnlySpan, want attribute.KeyValue) bool {
	for _, a := range span.Attributes() {
		if a == want {
			return true
		}
	}
	return false
}

// serve serves health and returns a connection to it that makes spans.
func serve(t *testing.T, s healthpb.HealthServer) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, s)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-done)
	})
	conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithStatsHandler(obs.ClientHandler()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}
