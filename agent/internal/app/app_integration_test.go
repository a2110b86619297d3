//go:build integration

package app_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

const podUID = "pod-uid-1"

// agent is a running agent with a client of it.
type agent struct {
	agentv1.AgentServiceClient

	stop func()
}

// startAgent boots the real agent on a containerd and waits until it serves.
func startAgent(t testing.TB, s *containerd.Server, change func(*app.Config)) *agent {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	cfg := &app.Config{
		Common:      daemon.Common{TLS: rpc.TLS{Insecure: true}, MetricsAddress: "0", HealthSocket: "0"},
		BindAddress: address, Capacity: 40, ContainerdSocket: s.Socket, ContainerdNamespace: "k8s.io", Snapshotter: "overlayfs",
		RuntimeHandler: "runc", LogRoot: s.LogRoot, LogMaxBytes: 1 << 20, Pool: "default", PodName: "agent-1", PodNamespace: "default",
		PodUID: podUID, PodIP: "127.0.0.1", NodeName: "node", NetNSPath: "/proc/self/ns/net", CgroupParent: s.CgroupParent,
		CreateTimeout: time.Minute, MaxImageBytes: 1 << 30, ImagePolicy: "Cached", StateDir: filepath.Join(s.Dir, "agent"),
		UserNamespace: "Auto", FirstUserID: idrange.DefaultFirst, UserIDRanges: 256,
	}
	if change != nil {
		change(cfg)
	}
	require.NoError(t, cfg.Validate())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- app.Run(ctx, cfg) }()
	conn, err := rpc.Dial("passthrough:///"+address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	stopped := false
	a := &agent{AgentServiceClient: agentv1.NewAgentServiceClient(conn), stop: func() {
		if !stopped {
			stopped = true
			require.NoError(t, conn.Close())
			cancel()
			require.NoError(t, <-done)
		}
	}}
	t.Cleanup(a.stop)
	require.Eventually(t, func() bool {
		return a.snapshot(t) != nil
	}, testkit.Timeout, testkit.Tick, "the agent does not serve")
	return a
}

// snapshot returns the agent's snapshot; nil while it has none.
func (a *agent) snapshot(t testing.TB) *agentv1.AgentSnapshot {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	stream, err := a.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	if err != nil {
		return nil
	}
	m, err := stream.Recv()
	if err != nil {
		return nil
	}
	return m.GetSnapshot()
}

func record(name string, change func(*sandboxv1.SandboxSpec)) *agentv1.SandboxRecord {
	spec := &sandboxv1.SandboxSpec{Image: "busybox:test", Pool: "default", Command: []string{"sleep", "1000"}}
	if change != nil {
		change(spec)
	}
	return &agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: uuid.NewString(), Attempt: 1, AgentUid: podUID},
		Namespace: "default", Name: name, Spec: spec, CreateTime: timestamppb.Now(),
		Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
	}
}

func sh(script string) func(*sandboxv1.SandboxSpec) {
	return func(s *sandboxv1.SandboxSpec) { s.Command = []string{"sh", "-c", script} }
}

func (a *agent) create(ctx context.Context, r *agentv1.SandboxRecord) ([]*agentv1.CreateSandboxResponse, error) {
	stream, err := a.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: r})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	var all []*agentv1.CreateSandboxResponse
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, rpc.FromStatus(err)
		}
		all = append(all, m)
	}
}

func (a *agent) mustCreate(t testing.TB, r *agentv1.SandboxRecord) *agentv1.SandboxReport {
	t.Helper()
	all, err := a.create(t.Context(), r)
	require.NoError(t, err)
	last := all[len(all)-1]
	require.Equal(t, agentv1.CreateStage_CREATE_STAGE_STARTED, last.GetStage())
	return last.GetReport()
}

func (a *agent) delete(t testing.TB, f *agentv1.Fence, grace time.Duration) []agentv1.DeleteStage {
	t.Helper()
	stages, err := a.tryDelete(t.Context(), f, grace)
	require.NoError(t, err, "deleting %s", f.GetSandboxUid())
	return stages
}

func (a *agent) tryDelete(ctx context.Context, f *agentv1.Fence, grace time.Duration) ([]agentv1.DeleteStage, error) {
	stream, err := a.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: f, GracePeriod: durationpb.New(grace)})
	if err != nil {
		return nil, err
	}
	var stages []agentv1.DeleteStage
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stages, nil
		}
		if err != nil {
			return nil, err
		}
		stages = append(stages, m.GetStage())
	}
}

func (a *agent) logs(t testing.TB, req *agentv1.StreamLogsRequest) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	stream, err := a.StreamLogs(ctx, req)
	require.NoError(t, err)
	var out []byte
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return string(out)
		}
		require.NoError(t, err, "after %q", out)
		out = append(out, m.GetData()...)
	}
}

func TestSandboxLife(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	snapshot := a.snapshot(t)
	require.Equal(t, []string{containerd.Busybox}, snapshot.GetImages())
	require.True(t, snapshot.GetAccepting())

	r := record("hello", sh("echo out; echo $TRACEPARENT; hostname; cat /etc/hostname; echo err >&2; exit 3"))
	r.Spec.Ports = []int32{18080}
	all, err := a.create(t.Context(), r)
	require.NoError(t, err)
	var stages []agentv1.CreateStage
	for _, m := range all {
		stages = append(stages, m.GetStage())
	}
	require.Equal(t, []agentv1.CreateStage{1, 2, 3, 4, 5, 6}, stages)
	require.Equal(t, []string{"127.0.0.1:18080"}, all[5].GetReport().GetEndpoints())
	out := a.logs(t, &agentv1.StreamLogsRequest{Fence: r.GetFence(), Follow: true})
	// The shim copies two pipes: on a busy machine their order is not preserved.
	require.Contains(t, out, "err\n")
	require.Equal(t, "out\n"+r.GetTraceparent()+"\nhello\nhello\n", strings.Replace(out, "err\n", "", 1))
	require.Eventually(t, func() bool {
		got := a.snapshot(t).GetSandboxes()[0]
		return got.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED && got.GetExitCode() == 3 && got.GetReason() == "Error"
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, []agentv1.DeleteStage{agentv1.DeleteStage_DELETE_STAGE_REMOVED}, a.delete(t, r.GetFence(), 0))
	_, err = a.create(t.Context(), r)
	require.True(t, errdefs.IsAborted(err), "%v", err)
	require.Equal(t, fault.SandboxTerminating, fault.ReasonOf(err))
	require.Empty(t, a.snapshot(t).GetSandboxes())
	s.CheckClean(t)
}

// BenchmarkCreate measures a create through the agent, by stages, and the same with containerd alone, in turns. The budget of
// the cold path is create/raw <= 1.20 on a quiet machine:
//
//	FSB_BIN=$PWD/bin go test -tags integration -run none -bench Create -benchtime 30x ./agent/internal/app
func BenchmarkCreate(b *testing.B) {
	s := containerd.Start(b)
	s.Import(b, containerd.Busybox, containerd.Image(b))
	a := startAgent(b, s, nil)
	var ours, raw []time.Duration
	stages := map[string][]time.Duration{}
	for i := 0; b.Loop(); i++ {
		r := record(fmt.Sprintf("cost-%d", i), nil)
		begun := time.Now()
		all, err := a.create(b.Context(), r)
		ours = append(ours, time.Since(begun))
		require.NoError(b, err)
		a.delete(b, r.GetFence(), 0)
		raw = append(raw, rawCreate(b, s, fmt.Sprintf("raw-%d", i)))
		for _, m := range all {
			stages[m.GetStage().String()] = append(stages[m.GetStage().String()], m.GetDuration().AsDuration())
		}
	}
	b.ReportMetric(0, "ns/op") // a round is a create, a delete and the raw create: not a useful number
	b.ReportMetric(milliseconds(p50(ours)), "create_p50_ms")
	b.ReportMetric(milliseconds(p50(raw)), "raw_p50_ms")
	b.ReportMetric(float64(p50(ours))/float64(p50(raw)), "create/raw")
	for name, d := range stages {
		b.ReportMetric(milliseconds(p50(d)), strings.ToLower(strings.TrimPrefix(name, "CREATE_STAGE_"))+"_ms")
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func p50(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}

func rawCreate(t testing.TB, s *containerd.Server, id string) time.Duration {
	t.Helper()
	ctx := t.Context()
	begun := time.Now()
	img, err := s.Client.GetImage(ctx, containerd.Busybox)
	require.NoError(t, err)
	c, err := s.Client.NewContainer(ctx, id, client.WithNewSnapshot(id, img),
		client.WithNewSpec(oci.WithImageConfig(img), oci.WithProcessArgs("sleep", "1000"), oci.WithCgroup(s.CgroupParent+"/"+id)))
	require.NoError(t, err)
	task, err := c.NewTask(ctx, cio.LogFile(filepath.Join(s.Dir, id)))
	require.NoError(t, err)
	exit, err := task.Wait(ctx)
	require.NoError(t, err)
	require.NoError(t, task.Start(ctx))
	took := time.Since(begun)
	require.NoError(t, task.Kill(ctx, 9))
	<-exit
	_, err = task.Delete(ctx)
	require.NoError(t, err)
	require.NoError(t, c.Delete(ctx, client.WithSnapshotCleanup))
	require.NoError(t, os.Remove(filepath.Join(s.Dir, id)))
	return took
}
