package rpc_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// logBuffer collects log output from several goroutines.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// accessRecords returns the records of the access log that have the request id.
func accessRecords(t *testing.T, logs *logBuffer, requestID string) (records []map[string]any) {
	t.Helper()
	for line := range strings.Lines(logs.String()) {
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record))
		if record[obs.KeyRequestID] == requestID {
			records = append(records, record)
		}
	}
	return records
}

// requestIDs returns the request ids on the recorded spans.
func requestIDs(spans *tracetest.SpanRecorder) (ids []string) {
	for _, span := range spans.Ended() {
		for _, a := range span.Attributes() {
			if string(a.Key) == obs.AttrRequestID {
				ids = append(ids, a.Value.AsString())
			}
		}
	}
	return ids
}

// sandboxes implements the methods of SandboxService that the tests call.
type sandboxes struct {
	sandboxv1.UnimplementedSandboxServiceServer
}

func (sandboxes) GetSandbox(_ context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	switch req.GetName() {
	case "panics":
		panic("at the handler")
	case "missing":
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s", req.GetName())
	}
	return &sandboxv1.GetSandboxResponse{Sandbox: &sandboxv1.Sandbox{Name: req.GetName()}}, nil
}

func (sandboxes) CreateSandbox(context.Context, *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	return &sandboxv1.CreateSandboxResponse{}, nil
}

func (sandboxes) StreamLogs(*sandboxv1.StreamLogsRequest, sandboxv1.SandboxService_StreamLogsServer) error {
	return nil
}

func serve(t *testing.T, ctx context.Context, ca *pki.Authority) *rpc.Server {
	t.Helper()
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: ca.TLS(t, rpc.RoleAllocator), Registry: obs.NewRegistry(), DrainTimeout: time.Second,
		Allow: map[string][]rpc.Role{
			"fastsandbox.sandbox.v1.SandboxService":             {rpc.RoleController},
			"/fastsandbox.sandbox.v1.SandboxService/StreamLogs": {rpc.RoleGateway},
		},
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, sandboxes{})
	runCtx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	server.SetReady(true)
	go func() { done <- server.Run(runCtx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return server
}

func dial(t *testing.T, server *rpc.Server, cfg rpc.ClientConfig) sandboxv1.SandboxServiceClient {
	t.Helper()
	conn, err := rpc.Dial("passthrough:///"+server.Addr().String(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return sandboxv1.NewSandboxServiceClient(conn)
}

func TestServerChecksCalls(t *testing.T) {
	ca := pki.New(t)
	var logs logBuffer
	ctx, flush, err := obs.Setup(t.Context(), obs.Options{Service: "test", Output: &logs, Verbosity: 2})
	require.NoError(t, err)
	spans := tracetest.NewSpanRecorder()
	otel.GetTracerProvider().(*sdktrace.TracerProvider).RegisterSpanProcessor(spans)
	t.Cleanup(func() { require.NoError(t, flush(context.WithoutCancel(ctx))) })
	server := serve(t, ctx, ca)
	client := dial(t, server, rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleController), ServerName: rpc.RoleAllocator.ServerName()})

	t.Run("allowed", func(t *testing.T) {
		resp, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
		require.NoError(t, err)
		require.Equal(t, "a", resp.GetSandbox().GetName())
	})
	t.Run("domain error keeps its reason", func(t *testing.T) {
		_, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "missing"})
		require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(rpc.FromStatus(err)))
	})
	t.Run("panic becomes a logged internal error", func(t *testing.T) {
		_, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "panics"})
		require.Equal(t, fault.Internal, fault.ReasonOf(rpc.FromStatus(err)))
		require.NotContains(t, err.Error(), "at the handler")
		require.Contains(t, logs.String(), "at the handler")
	})
	t.Run("violation names the field", func(t *testing.T) {
		_, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "No_Label"})
		err = rpc.FromStatus(err)
		require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
		var f *fault.Error
		require.ErrorAs(t, err, &f)
		require.Equal(t, "name", f.Metadata()[fault.FieldKey])
	})
	t.Run("each broken rule is a violation of its own field", func(t *testing.T) {
		_, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "No_Namespace", Name: "No_Label"})
		violations := map[string]string{}
		for _, d := range status.Convert(err).Details() {
			if bad, ok := d.(*errdetails.BadRequest); ok {
				for _, v := range bad.GetFieldViolations() {
					violations[v.GetField()] = v.GetDescription()
				}
			}
		}
		require.Len(t, violations, 2, "%v", violations)
		require.NotEmpty(t, violations["namespace"])
		require.NotContains(t, violations["namespace"], "name:", "the message of another field")
		require.NotEmpty(t, violations["name"])
		require.Equal(t, status.Convert(err).Proto().GetDetails()[1].GetValue(),
			status.Convert(rpc.ToStatus(rpc.FromStatus(err))).Proto().GetDetails()[1].GetValue(), "a server that passes the error on keeps them")
	})
	t.Run("request id is on the access log and the span", func(t *testing.T) {
		_, err := client.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Namespace: "ns", Name: "n", RequestId: "create-7",
			Spec: &sandboxv1.SandboxSpec{Image: "i", Pool: "p"}})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return len(accessRecords(t, &logs, "create-7")) == 1 }, testkit.Timeout, testkit.Tick)
		record := accessRecords(t, &logs, "create-7")[0]
		require.Equal(t, "/fastsandbox.sandbox.v1.SandboxService/CreateSandbox", record[obs.KeyMethod])
		require.Equal(t, "OK", record[obs.KeyCode])
		require.Contains(t, record, obs.KeyDuration)
		require.Contains(t, record, obs.KeyAddress)
		require.Len(t, record[obs.KeyTraceID], 32)
		require.Eventually(t, func() bool { return slices.Contains(requestIDs(spans), "create-7") }, testkit.Timeout, testkit.Tick)
	})
	t.Run("oversized request is refused", func(t *testing.T) {
		_, err := client.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Namespace: "ns", Name: "n",
			Spec: &sandboxv1.SandboxSpec{Image: "i", Pool: "p", Args: []string{string(make([]byte, 2<<20))}}})
		require.Equal(t, fault.RequestTooLarge, fault.ReasonOf(rpc.FromStatus(err)))
	})
	t.Run("entry of a method wins over that of its service", func(t *testing.T) {
		stream, err := client.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: "ns", Name: "n"})
		require.NoError(t, err)
		_, err = stream.Recv()
		require.True(t, errdefs.IsPermissionDenied(rpc.FromStatus(err)), "%v", err)
	})
	t.Run("other role is refused", func(t *testing.T) {
		agent := dial(t, server, rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleAgent), ServerName: rpc.RoleAllocator.ServerName()})
		_, err := agent.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
		require.Equal(t, fault.PermissionDenied, fault.ReasonOf(rpc.FromStatus(err)))
	})
	t.Run("unknown service is unimplemented", func(t *testing.T) {
		conn, err := rpc.Dial("passthrough:///"+server.Addr().String(), rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleController), ServerName: rpc.RoleAllocator.ServerName()})
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		_, err = allocatorv1.NewAllocatorServiceClient(conn).ListAgents(ctx, &allocatorv1.ListAgentsRequest{})
		require.True(t, errdefs.IsNotImplemented(rpc.FromStatus(err)), "%v", err)
		_, err = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: "fastsandbox.sandbox.v1.SandboxService"})
		require.NoError(t, err, "every role may check health")
	})
}

func TestBothSidesVerifyCertificates(t *testing.T) {
	ca, unknown := pki.New(t), pki.New(t)
	server := serve(t, t.Context(), ca)
	good := ca.TLS(t, rpc.RoleController)
	for name, cfg := range map[string]rpc.ClientConfig{
		"client certificate of an unknown authority": {TLS: withCA(unknown.TLS(t, rpc.RoleController), good.CAFile), ServerName: rpc.RoleAllocator.ServerName()},
		"server certificate of an unknown authority": {TLS: withCA(good, unknown.TLS(t, rpc.RoleController).CAFile), ServerName: rpc.RoleAllocator.ServerName()},
		"server certificate for another name":        {TLS: good, ServerName: rpc.RoleAgent.ServerName()},
		"plaintext":                                  {TLS: rpc.TLS{Insecure: true}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := dial(t, server, cfg).GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
			require.True(t, errdefs.IsUnavailable(rpc.FromStatus(err)), "%v", err)
		})
	}
	t.Run("server name defaults to the host of the target", func(t *testing.T) {
		_, err := dial(t, server, rpc.ClientConfig{TLS: good}).GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
		require.NoError(t, err)
	})
}

func withCA(t rpc.TLS, ca string) rpc.TLS {
	t.CAFile = ca
	return t
}

func TestCertificatesReload(t *testing.T) {
	old, next := pki.New(t), pki.New(t)
	server := serve(t, t.Context(), old)
	replaced := old.TLS(t, rpc.RoleAllocator)
	issued := next.TLS(t, rpc.RoleAllocator)
	for from, to := range map[string]string{
		issued.CertFile: replaced.CertFile, issued.KeyFile: replaced.KeyFile, issued.CAFile: replaced.CAFile,
	} {
		raw, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, raw, 0o600))
	}
	require.Eventually(t, func() bool {
		_, err := dial(t, server, rpc.ClientConfig{TLS: next.TLS(t, rpc.RoleController), ServerName: rpc.RoleAllocator.ServerName()}).
			GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
		return err == nil
	}, testkit.Timeout, 100*time.Millisecond)
}

func TestTLSValidateNamesEveryMissingFlag(t *testing.T) {
	require.Len(t, rpc.TLS{}.Validate(), 3)
	require.Len(t, rpc.TLS{CertFile: "c", KeyFile: "k", CAFile: "ca", ClientCertFile: "c"}.Validate(), 1)
	require.Empty(t, rpc.TLS{Insecure: true}.Validate())
}
