package app_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/app"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

func TestMain(m *testing.M) {
	_, _, err := obs.Setup(context.Background(), obs.Options{Service: "gateway-test", Output: io.Discard})
	if err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(os.Exit))
}

// fake is a scriptable SandboxService; a call that is not scripted panics.
type fake struct {
	sandboxv1.UnimplementedSandboxServiceServer
	create func(context.Context, *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error)
	remove func(context.Context, *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error)
	update func(context.Context, *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error)
	get    func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error)
	list   func(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error)
	watch  func(*sandboxv1.WatchSandboxesRequest, sandboxv1.SandboxService_WatchSandboxesServer) error
	logs   func(*sandboxv1.StreamLogsRequest, sandboxv1.SandboxService_StreamLogsServer) error
	locate func(*allocatorv1.LocateSandboxRequest) (*allocatorv1.LocateSandboxResponse, error)
}

// locator says where the sandboxes of a fake are.
type locator struct {
	allocatorv1.UnimplementedAllocatorServiceServer
	*fake
}

func (l locator) LocateSandbox(_ context.Context, in *allocatorv1.LocateSandboxRequest) (*allocatorv1.LocateSandboxResponse, error) {
	return l.locate(in)
}

func (f *fake) CreateSandbox(ctx context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	return f.create(ctx, in)
}

func (f *fake) DeleteSandbox(ctx context.Context, in *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	return f.remove(ctx, in)
}

func (f *fake) UpdateSandbox(ctx context.Context, in *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
	return f.update(ctx, in)
}

func (f *fake) GetSandbox(ctx context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	return f.get(ctx, in)
}

func (f *fake) ListSandboxes(ctx context.Context, in *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	return f.list(ctx, in)
}

func (f *fake) WatchSandboxes(in *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
	return f.watch(in, s)
}

func (f *fake) StreamLogs(in *sandboxv1.StreamLogsRequest, s sandboxv1.SandboxService_StreamLogsServer) error {
	return f.logs(in, s)
}

// collector is a garbage collector that explains every object.
type collector struct {
	gcv1.UnimplementedGarbageCollectorServiceServer
}

func (collector) ExplainObject(context.Context, *gcv1.ExplainObjectRequest) (*gcv1.ExplainObjectResponse, error) {
	return &gcv1.ExplainObjectResponse{State: gcv1.State_STATE_OWNED}, nil
}

// gateway is the real gateway, over mutual TLS, in front of a fake allocator and a fake garbage collector.
type gateway struct {
	url       string
	address   string
	authority *pki.Authority
	client    *http.Client
	stop      func() error // ends the gateway and returns what Serve returned
	allocator func()       // ends the fake allocator
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

func start(t *testing.T, f *fake, change ...func(*app.Config)) *gateway {
	t.Helper()
	authority := pki.New(t)
	ctx := logr.NewContext(context.WithoutCancel(t.Context()), logr.Discard())
	upstream, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Listener: listen(t), TLS: authority.TLS(t, rpc.RoleAllocator), DrainTimeout: 10 * time.Millisecond, MaxRecvBytes: 8 << 20,
		Users: forGateway(&sandboxv1.SandboxService_ServiceDesc),
		Allow: map[string][]rpc.Role{allocatorv1.AllocatorService_LocateSandbox_FullMethodName: {rpc.RoleGateway}},
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(upstream, f)
	allocatorv1.RegisterAllocatorServiceServer(upstream, locator{fake: f})
	upstream.SetReady(true)
	stopUpstream := background(ctx, upstream.Run)

	gc, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Listener: listen(t), TLS: authority.TLS(t, rpc.RoleGC), DrainTimeout: 10 * time.Millisecond,
		Users: forGateway(&gcv1.GarbageCollectorService_ServiceDesc),
	})
	require.NoError(t, err)
	gcv1.RegisterGarbageCollectorServiceServer(gc, collector{})
	gc.SetReady(true)
	stopGC := background(ctx, gc.Run)

	listener := listen(t)
	cfg := app.Config{
		AllocatorAddress: upstream.Addr().String(), CollectorAddress: gc.Addr().String(), MaxBodyBytes: 4 << 20, RequestTimeout: 20 * time.Second, DrainTimeout: 5 * time.Second,
	}
	cfg.GRPCAddress = "127.0.0.1:0"
	cfg.Kubeconfig, cfg.Access.KeyNamespace = kubeconfig(t), auth.DefaultKeyNamespace
	cfg.TLS, cfg.MetricsAddress, cfg.HealthSocket = authority.TLS(t, rpc.RoleGateway), "0", "0"
	for _, c := range change {
		c(&cfg)
	}
	stopGateway := background(ctx, func(ctx context.Context) error { return app.Serve(ctx, cfg, listener) })
	g := &gateway{
		url: "https://" + listener.Addr().String(), address: listener.Addr().String(), authority: authority,
		stop: stopGateway, allocator: func() { _ = stopUpstream() },
	}
	t.Cleanup(func() {
		require.NoError(t, stopGateway())
		require.NoError(t, stopUpstream())
		require.NoError(t, stopGC())
	})
	g.client = g.as(t, authority.User(t, "alice"))
	return g
}

// kubeconfig returns a file that names no API server: users with certificates need none.
func kubeconfig(t *testing.T) string { return kubeconfigOf(t, "https://127.0.0.1:1") }

// kubeconfigOf returns a file that names an API server.
func kubeconfigOf(t *testing.T, server string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"none": {Server: server}},
		Contexts: map[string]*clientcmdapi.Context{"none": {Cluster: "none"}}, CurrentContext: "none",
	}, file))
	return file
}

// background runs a part until the returned function is called; further calls return the same result.
func background(ctx context.Context, run func(context.Context) error) func() error {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	return sync.OnceValue(func() error { cancel(); return <-done })
}

// forGateway lets users call, if the gateway names them.
func forGateway(s *grpc.ServiceDesc) *rpc.Users {
	u := users.Open(s)
	u.Proxies = []rpc.Role{rpc.RoleGateway}
	return u
}

// as returns a client with a certificate.
func (g *gateway) as(t *testing.T, files rpc.TLS) *http.Client {
	t.Helper()
	cfg, err := files.ClientConfig(rpc.RoleGateway.ServerName())
	require.NoError(t, err)
	transport := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 20 * time.Second}
}

// answer is the response to a request.
type answer struct {
	code   int
	header http.Header
	body   string
	proto  int
}

func (g *gateway) do(t *testing.T, method, path, body string, headers ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, g.url+path, strings.NewReader(body))
	require.NoError(t, err)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return send(t, g.client, req)
}

func send(t *testing.T, client *http.Client, req *http.Request) answer {
	t.Helper()
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return answer{resp.StatusCode, resp.Header, string(raw), resp.ProtoMajor}
}

// failure is google.rpc.Status as JSON.
type failure struct {
	Code    int
	Message string
	Details []struct {
		Type            string `json:"@type"`
		Reason          string
		Domain          string
		Metadata        map[string]string
		RetryDelay      string
		FieldViolations []struct{ Field, Description string }
	}
}

func (a answer) failure(t *testing.T) failure {
	t.Helper()
	require.Equal(t, "application/json", a.header.Get("Content-Type"))
	var f failure
	dec := json.NewDecoder(strings.NewReader(a.body))
	require.NoError(t, dec.Decode(&f), a.body)
	require.NotZero(t, f.Code, a.body)
	require.NotEmpty(t, f.Details, a.body)
	require.Equal(t, "type.googleapis.com/google.rpc.ErrorInfo", f.Details[0].Type)
	require.Equal(t, "fast-sandbox.io", f.Details[0].Domain)
	return f
}

func pemOf(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}) }
