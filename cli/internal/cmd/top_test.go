package cmd_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// meters is a scriptable UsageService.
type meters struct {
	usagev1.UnimplementedUsageServiceServer

	mu    sync.Mutex
	lists []*usagev1.ListSandboxUsageRequest
	gets  int
	// answer is that of the n-th list, one of them with each message.
	answer func(n int) []*usagev1.ListSandboxUsageResponse
	get    func(n int) (*usagev1.SandboxUsage, error)
	watch  func(*usagev1.WatchSandboxUsageRequest, usagev1.UsageService_WatchSandboxUsageServer) error
}

func (m *meters) ListSandboxUsage(in *usagev1.ListSandboxUsageRequest, s usagev1.UsageService_ListSandboxUsageServer) error {
	m.mu.Lock()
	n := len(m.lists)
	m.lists = append(m.lists, in)
	m.mu.Unlock()
	for _, r := range m.answer(n) {
		if err := s.Send(r); err != nil {
			return err
		}
	}
	return nil
}

func (m *meters) GetSandboxUsage(context.Context, *usagev1.GetSandboxUsageRequest) (*usagev1.GetSandboxUsageResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gets++
	u, err := m.get(m.gets - 1)
	return &usagev1.GetSandboxUsageResponse{Usage: u}, err
}

func (m *meters) WatchSandboxUsage(in *usagev1.WatchSandboxUsageRequest, s usagev1.UsageService_WatchSandboxUsageServer) error {
	return m.watch(in, s)
}

// startTop returns a harness whose server has UsageService.
func startTop(t *testing.T, m *meters, f *fake) *harness {
	t.Helper()
	authority := pki.New(t)
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), logr.Discard()))
	s, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: authority.TLS(t, rpc.RoleGateway), DrainTimeout: 10 * time.Millisecond,
		Users: users.Open(&sandboxv1.SandboxService_ServiceDesc, &usagev1.UsageService_ServiceDesc),
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(s, f)
	usagev1.RegisterUsageServiceServer(s, m)
	s.SetReady(true)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	client := authority.User(t, "alice")
	return &harness{clock: stopped{}, authority: authority, addr: s.Addr().String(), env: map[string]string{
		"FSB_ADDR": s.Addr().String(), "FSB_CACERT": client.CAFile, "FSB_CERT": client.CertFile, "FSB_KEY": client.KeyFile,
	}}
}

// used is a reading of a sandbox: seconds of processor time and MiB of memory, the n-th, one every two seconds.
func used(name string, n int, cpu float64, memory int64) *usagev1.SandboxUsage {
	bytes, peak, processes := memory<<20, (memory+1)<<20, int64(3)
	return &usagev1.SandboxUsage{
		Namespace: "default", Name: name, Uid: "uid-" + name, Pool: "p", StartTime: ago(5 * time.Minute),
		ReadTime: timestamppb.New(now.Add(time.Duration(n) * 2 * time.Second)), Cpu: &usagev1.CPUUsage{Total: durationpb.New(time.Duration(cpu * float64(time.Second)))},
		Memory: &usagev1.MemoryUsage{WorkingSetBytes: &bytes, PeakBytes: &peak}, Processes: &usagev1.ProcessUsage{Current: &processes},
	}
}

func ofAgent(list ...*usagev1.SandboxUsage) *usagev1.ListSandboxUsageResponse {
	return &usagev1.ListSandboxUsageResponse{AgentPod: "agent-1", NodeName: "node-1", Sandboxes: list}
}

// burns are two sandboxes, of which one uses half a processor and the other one two, and one that has just begun.
func burns(n int) []*usagev1.ListSandboxUsageResponse {
	out := []*usagev1.ListSandboxUsageResponse{ofAgent(used("slow", n, 10+float64(n), 300)), ofAgent(used("fast", n, 4*float64(n), 20))}
	if n > 0 {
		out = append(out, ofAgent(used("new", n, 9, 40)))
	}
	return out
}

func TestTop(t *testing.T) {
	m := &meters{answer: burns}
	f := &fake{list: func(_ context.Context, in *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
		require.Equal(t, "k=v", in.GetLabelSelector())
		return &sandboxv1.ListSandboxesResponse{Sandboxes: []*sandboxv1.Sandbox{running("slow"), running("new")}}, nil
	}}
	b := startTop(t, m, f)
	top := func(args ...string) string {
		m.mu.Lock()
		m.lists = nil
		m.mu.Unlock()
		r := b.run(t, append([]string{"top", "--interval", "250ms"}, args...)...)
		require.Zero(t, r.code, r.err)
		require.Empty(t, r.err)
		return r.out
	}
	fast, slow, fresh := "fast   2.00     20.0Mi   21.0Mi   3           5m\n", "slow   0.50     300Mi    301Mi    3           5m\n", "new    <none>   40.0Mi   41.0Mi   3           5m\n"
	head := "NAME   CPU      MEMORY   PEAK     PROCESSES   AGE\n"
	require.Equal(t, head+fast+slow+fresh, top())
	require.Equal(t, head+slow+fresh+fast, top("--sort", "memory"))
	require.Equal(t, head+fast+fresh+slow, top("--sort", "name"))
	require.Equal(t, head+slow+fresh, top("-l", "k=v"))
	require.True(t, strings.HasPrefix(top("-A"), "NAMESPACE   NAME"))
	require.Empty(t, m.lists[0].GetNamespace())
	wide := top("-o", "wide", "--pool", "p", "-n", "other")
	require.Contains(t, wide, "THROTTLED")
	require.Contains(t, wide, " <none> ")
	require.Equal(t, []string{"other", "p"}, []string{m.lists[0].GetNamespace(), m.lists[0].GetPool()})
	require.Equal(t, "sandbox/slow\nsandbox/fast\n", top("-o", "name", "--sort", "memory"))
	var object struct {
		Sandboxes []struct{ Name, ReadTime string }
	}
	require.NoError(t, json.Unmarshal([]byte(top("-o", "json")), &object))
	require.Len(t, m.lists, 1, "counters need one reading")
	require.Equal(t, "fast", object.Sandboxes[0].Name)
	require.NotEmpty(t, object.Sandboxes[0].ReadTime)
}

// TestTopIsPartial: what is missing is reported, and is an error for scripts.
func TestTopIsPartial(t *testing.T) {
	m := &meters{answer: func(n int) []*usagev1.ListSandboxUsageResponse {
		return append(burns(n), &usagev1.ListSandboxUsageResponse{AgentPod: "agent-2", NodeName: "node-2", Error: "the agent cannot be reached"})
	}}
	b := startTop(t, m, &fake{})
	r := b.run(t, "top", "--interval", "250ms")
	require.Equal(t, 7, r.code)
	require.Contains(t, r.out, "fast ")
	require.Contains(t, r.err, "agent agent-2 on node node-2: the agent cannot be reached\n")
	m.answer = func(int) []*usagev1.ListSandboxUsageResponse { return nil }
	r = b.run(t, "top")
	require.Zero(t, r.code)
	require.Empty(t, r.out)
	require.Contains(t, r.err, "no running sandboxes found")
}

func TestTopOfOne(t *testing.T) {
	counters := []float64{10, 12, 11} // the last one goes backwards
	m := &meters{get: func(n int) (*usagev1.SandboxUsage, error) { return used("web", n, counters[n], 1), nil }}
	b := startTop(t, m, &fake{})
	r := b.run(t, "top", "web", "--interval", "250ms")
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.out, "web    1.00   1.0Mi")
	counters = []float64{12, 11}
	m.gets = 0
	r = b.run(t, "top", "web", "--interval", "250ms")
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.out, "web    <none>   1.0Mi")
	m.get = func(int) (*usagev1.SandboxUsage, error) {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
	}
	require.Equal(t, 3, b.run(t, "top", "none").code)
}

// TestTopWatchesOne: in a pipe the table is repeated, a broken stream is opened again, and the end of the sandbox ends it.
func TestTopWatchesOne(t *testing.T) {
	streams := 0
	m := &meters{watch: func(in *usagev1.WatchSandboxUsageRequest, s usagev1.UsageService_WatchSandboxUsageServer) error {
		streams++
		require.Equal(t, 500*time.Millisecond, in.GetInterval().AsDuration())
		for i := range 2 {
			n := (streams-1)*2 + i
			if err := s.Send(&usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Usage{Usage: used("web", n, float64(n), 1)}}); err != nil {
				return err
			}
		}
		if streams%2 == 1 {
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping; connect again")
		}
		code := int32(3)
		return s.Send(&usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Ended_{Ended: &usagev1.WatchSandboxUsageResponse_Ended{
			ExitCode: &code, Reason: "Error", Message: "the process ended with exit code 3",
		}}})
	}}
	b := startTop(t, m, &fake{})
	r := b.run(t, "top", "web", "-w", "--interval", "500ms")
	require.Zero(t, r.code, r.err)
	require.Equal(t, 4, strings.Count(r.out, "NAME "))
	require.Equal(t, 3, strings.Count(r.out, "\n\n"), "between tables")
	require.Equal(t, 3, strings.Count(r.out, "web    0.50"), "the first reading has no rate")
	require.NotContains(t, r.out, "\x1b")
	require.Contains(t, r.err, "sandbox web has ended: the process ended with exit code 3")

	streams = 0
	r = b.run(t, "top", "web", "-w", "--interval", "500ms", "-o", "json")
	require.Zero(t, r.code, r.err)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	require.Len(t, lines, 5)
	require.True(t, strings.HasPrefix(lines[0], `{"usage":{`), lines[0])
	require.Equal(t, `{"ended":{"exitCode":3,"reason":"Error","message":"the process ended with exit code 3"}}`, lines[4])
}

// TestTopWatchesAll repeats the list until Ctrl-C, which is no error.
func TestTopWatchesAll(t *testing.T) {
	m := &meters{answer: burns}
	b := startTop(t, m, &fake{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out buffer
	done := make(chan result, 1)
	go func() { done <- b.runTo(ctx, &out, "top", "-w", "--interval", "250ms") }()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "NAME ") >= 3 }, testkit.Timeout, testkit.Tick)
	cancel()
	r := <-done
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.out, "fast   2.00")
}

func TestTopRefuses(t *testing.T) {
	b := startTop(t, &meters{}, &fake{})
	for line, want := range map[string]string{
		"a b": `unexpected argument "b"`, "--sort size": `--sort is "size", want one of cpu, memory, name`, "--interval 100ms": "--interval is 100ms",
		"--interval 6m": "--interval is 6m0s", "web -l a=b": "NAME excludes", "web -A": "NAME excludes", "--frob": "unknown flag",
	} {
		r := b.run(t, append([]string{"top"}, strings.Fields(line)...)...)
		require.Equal(t, 2, r.code, line)
		require.Contains(t, r.err, want)
		require.Empty(t, r.out)
	}
}
