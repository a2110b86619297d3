package cmd_test

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

func TestMain(m *testing.M) {
	if _, _, err := obs.Setup(context.Background(), obs.Options{Service: "fsb-ctl-test", Output: io.Discard}); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// setup replaces obs.Setup, which TestMain has called.
func setup(ctx context.Context, _ obs.Options) (context.Context, func(context.Context) error, error) {
	return ctx, func(context.Context) error { return nil }, nil
}

// now is the time of the clock that stands still.
var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// stopped is a clock that stands still, for output with ages, and whose timers are real: a call that a busy machine made fail is
// repeated.
type stopped struct{ clock.RealClock }

func (stopped) Now() time.Time { return now }

func (stopped) Since(t time.Time) time.Duration { return now.Sub(t) }

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

// fake is a scriptable allocator; a call that is not scripted panics, which the client sees as INTERNAL.
type fake struct {
	sandboxv1.UnimplementedSandboxServiceServer
	allocatorv1.UnimplementedAllocatorServiceServer
	create func(context.Context, *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error)
	remove func(context.Context, *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error)
	update func(context.Context, *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error)
	get    func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error)
	list   func(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error)
	watch  func(*sandboxv1.WatchSandboxesRequest, sandboxv1.SandboxService_WatchSandboxesServer) error
	logs   func(*sandboxv1.StreamLogsRequest, sandboxv1.SandboxService_StreamLogsServer) error
	ticket func(context.Context, *sandboxv1.CreateLogTicketRequest) (*sandboxv1.CreateLogTicketResponse, error)
	images func(context.Context, *allocatorv1.ListImagesRequest) (*allocatorv1.ListImagesResponse, error)
	pull   func(*allocatorv1.PullImageRequest, allocatorv1.AllocatorService_PullImageServer) error
	pools  []*allocatorv1.Pool
	agents []*allocatorv1.Agent
	// Served if they are set.
	files     filesystemv1.FilesystemServiceServer
	tunnels   tunnelv1.TunnelServiceServer
	processes processv1.ProcessServiceServer
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

func (f *fake) CreateLogTicket(ctx context.Context, in *sandboxv1.CreateLogTicketRequest) (*sandboxv1.CreateLogTicketResponse, error) {
	return f.ticket(ctx, in)
}

func (f *fake) ListImages(ctx context.Context, in *allocatorv1.ListImagesRequest) (*allocatorv1.ListImagesResponse, error) {
	return f.images(ctx, in)
}

func (f *fake) PullImage(in *allocatorv1.PullImageRequest, s allocatorv1.AllocatorService_PullImageServer) error {
	return f.pull(in, s)
}

func (f *fake) ListPools(context.Context, *allocatorv1.ListPoolsRequest) (*allocatorv1.ListPoolsResponse, error) {
	return &allocatorv1.ListPoolsResponse{Pools: f.pools}, nil
}

func (f *fake) GetPool(context.Context, *allocatorv1.GetPoolRequest) (*allocatorv1.GetPoolResponse, error) {
	return &allocatorv1.GetPoolResponse{Pool: f.pools[0]}, nil
}

func (f *fake) ListAgents(context.Context, *allocatorv1.ListAgentsRequest) (*allocatorv1.ListAgentsResponse, error) {
	return &allocatorv1.ListAgentsResponse{Agents: f.agents}, nil
}

// harness runs command lines against a fake allocator over mutual TLS.
type harness struct {
	addr, config string
	env          map[string]string
	clock        clock.WithTicker
	in           string
	terminal     io.Reader // replaces in
	name         string    // of the program; empty: fsb-ctl
	authority    *pki.Authority
	stop         func()
	cluster      func(tunnel.Options) (cmd.Cluster, error)
}

func start(t *testing.T, f *fake) *harness {
	t.Helper()
	authority := pki.New(t)
	b := &harness{clock: stopped{}, authority: authority}
	b.addr, b.stop = serve(t, f, authority, "127.0.0.1:0")
	client := authority.User(t, "alice")
	b.env = map[string]string{"FSB_ADDR": b.addr, "FSB_CACERT": client.CAFile, "FSB_CERT": client.CertFile, "FSB_KEY": client.KeyFile}
	return b
}

// serve runs a fake allocator until the returned function is called or the test ends.
func serve(t *testing.T, f *fake, authority *pki.Authority, address string) (string, func()) {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", address)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), logr.Discard()))
	s, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Listener: l, TLS: authority.TLS(t, rpc.RoleAllocator), DrainTimeout: 10 * time.Millisecond,
		Users: users.Open(
			&sandboxv1.SandboxService_ServiceDesc, &allocatorv1.AllocatorService_ServiceDesc, &filesystemv1.FilesystemService_ServiceDesc,
			&tunnelv1.TunnelService_ServiceDesc, &processv1.ProcessService_ServiceDesc,
		),
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(s, f)
	allocatorv1.RegisterAllocatorServiceServer(s, f)
	if f.files != nil {
		filesystemv1.RegisterFilesystemServiceServer(s, f.files)
	}
	if f.tunnels != nil {
		tunnelv1.RegisterTunnelServiceServer(s, f.tunnels)
	}
	if f.processes != nil {
		processv1.RegisterProcessServiceServer(s, f.processes)
	}
	s.SetReady(true)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop := sync.OnceFunc(func() { cancel(); require.NoError(t, <-done) })
	t.Cleanup(stop)
	return l.Addr().String(), stop
}

// result is the exit code and the output of a command line.
type result struct {
	code     int
	out, err string
}

func (b *harness) run(t *testing.T, args ...string) result {
	t.Helper()
	return b.runIn(t.Context(), args...)
}

func (b *harness) runIn(ctx context.Context, args ...string) result {
	return b.runTo(ctx, &buffer{}, args...)
}

// runTo is runIn with an output that can be read before the end.
func (b *harness) runTo(ctx context.Context, out *buffer, args ...string) result {
	return b.runBoth(ctx, out, &buffer{}, args...)
}

// runBoth is runTo with standard error, too.
func (b *harness) runBoth(ctx context.Context, out, err *buffer, args ...string) result {
	in := b.terminal
	if in == nil {
		in = strings.NewReader(b.in)
	}
	code := cmd.Main(ctx, cmd.Env{
		Name: cmp.Or(b.name, "fsb-ctl"), Version: "v1.2.3", In: in, Out: out, Err: err, Clock: b.clock,
		Getenv: func(name string) string { return b.env[name] }, DefaultConfigFile: b.config, Setup: setup, Cluster: b.cluster,
	}, args)
	return result{code, out.String(), err.String()}
}

// buffer is a bytes.Buffer that may be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func running(name string) *sandboxv1.Sandbox {
	return &sandboxv1.Sandbox{
		Namespace: "default", Name: name, Uid: "uid-" + name, CreateTime: ago(5 * time.Minute), Labels: map[string]string{"k": "v"},
		Spec: &sandboxv1.SandboxSpec{Image: "docker.io/library/busybox:1.37", Pool: "default", Command: []string{"sh", "-c", "sleep 1"}},
		Status: &sandboxv1.SandboxStatus{
			Phase: sandboxv1.Phase_PHASE_RUNNING, AssignedPod: "agent-1", NodeName: "node-1", Endpoints: []string{"10.0.0.3:80"},
			SandboxId: "uid-" + name + "-1", Attempt: 1, StartPath: sandboxv1.StartPath_START_PATH_SLOT,
		},
	}
}

func exited(name string, code int32) *sandboxv1.Sandbox {
	s := running(name)
	s.Status.ExitCode = &code
	if code != 0 {
		s.Status.Phase, s.Status.Reason = sandboxv1.Phase_PHASE_FAILED, "Error"
	}
	return s
}
