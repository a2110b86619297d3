//go:build integration

// Package single runs one real agent on a containerd of its own, without the rest of the mesh, so that integration tests try parts of the
// suite without a cluster. The agent stands for that of the hostile tenant, whose clients call it directly.
package single

import (
	"context"
	"errors"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

const (
	namespace = "escape-hostile"
	pool      = "hostile"
	podUID    = "11111111-1111-4111-8111-111111111111"
)

// Start runs the agent until the test ends, and returns the scene of its tenant.
func Start(t testing.TB, s *containerd.Server, args ...string) *mesh.Scene {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	bin := config.Env("FSB_BIN")
	cmd := exec.Command(filepath.Join(bin, "agent"), append([]string{
		"--insecure", "--metrics-bind-address=0", "--health-socket=0", "--bind-address=" + address, "--capacity=20", "--containerd-socket=" + s.Socket, "--log-root=" + s.LogRoot,
		"--state-dir=" + filepath.Join(s.Dir, "agent"), "--pool=" + pool, "--pod-name=agent", "--pod-namespace=" + namespace, "--pod-uid=" + podUID, "--pod-ip=127.0.0.1",
		"--node-name=node", "--netns-path=/proc/self/ns/net", "--cgroup-parent=" + s.CgroupParent,
		"--slot-root=" + filepath.Join(s.Dir, "slots"), "--sandbox-init=" + filepath.Join(bin, "sandbox-init"), "--slots-max=2",
		"--shim=" + filepath.Join(bin, "containerd-shim-fsb-v1"),
	}, args...)...)
	output := &lastBytes{}
	cmd.Stderr = output
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the agent's log:\n%s", output)
		}
	})
	conn, err := rpc.Dial("passthrough:///"+address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	node, err := client.New(s.Socket, client.WithDefaultNamespace(ctrd.DefaultNamespace))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, node.Close()) })
	boxes := &sandboxes{agent: agentv1.NewAgentServiceClient(conn), fences: map[string]*agentv1.Fence{}}
	ready := func() bool { r, err := boxes.snapshot(t.Context()); return err == nil && r.GetAccepting() }
	require.Eventually(t, ready, testkit.Timeout, testkit.Tick, "the agent does not accept sandboxes")
	t.Cleanup(func() { boxes.deleteAll(context.WithoutCancel(t.Context())) })
	return &mesh.Scene{
		Mesh: &mesh.Mesh{Node: node}, Hostile: &mesh.Tenant{Namespace: namespace, Pool: pool, Sandboxes: boxes}, Log: &suite.Log{},
		Say: func(format string, args ...any) { t.Logf(format, args...) },
	}
}

// lastBytes keeps the end of what is written.
type lastBytes struct {
	mu  sync.Mutex
	raw []byte
}

func (b *lastBytes) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.raw = append(b.raw, p...)
	b.raw = b.raw[max(0, len(b.raw)-1<<20):]
	return len(p), nil
}

func (b *lastBytes) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.raw)
}

// sandboxes is the part of the API that the suite uses for sandboxes of its own, on one agent.
type sandboxes struct {
	sandboxv1.SandboxServiceClient
	agent agentv1.AgentServiceClient

	mu     sync.Mutex
	fences map[string]*agentv1.Fence
}

func (s *sandboxes) fence(name string) (*agentv1.Fence, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.fences[name]; f != nil {
		return f, nil
	}
	return nil, status.Error(codes.NotFound, "there is no such sandbox")
}

func (s *sandboxes) snapshot(ctx context.Context) (*agentv1.AgentSnapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	stream, err := s.agent.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	if err != nil {
		return nil, err
	}
	m, err := stream.Recv()
	return m.GetSnapshot(), err
}

// CreateSandbox implements sandboxv1.SandboxServiceClient.
func (s *sandboxes) CreateSandbox(ctx context.Context, req *sandboxv1.CreateSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.CreateSandboxResponse, error) {
	record := &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: uuid.NewString(), Attempt: 1, AgentUid: podUID}, Namespace: req.GetNamespace(), Name: req.GetName(),
		Spec: req.GetSpec(), CreateTime: timestamppb.Now(), RequestId: req.GetRequestId(),
	}
	stream, err := s.agent.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: record})
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if m.GetStage() != agentv1.CreateStage_CREATE_STAGE_STARTED {
			continue
		}
		s.mu.Lock()
		s.fences[req.GetName()] = record.GetFence()
		s.mu.Unlock()
		return &sandboxv1.CreateSandboxResponse{StartPath: m.GetReport().GetStartPath()}, nil
	}
}

// GetSandbox implements sandboxv1.SandboxServiceClient.
func (s *sandboxes) GetSandbox(ctx context.Context, req *sandboxv1.GetSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.GetSandboxResponse, error) {
	snapshot, err := s.snapshot(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range snapshot.GetSandboxes() {
		if r.GetRecord().GetName() != req.GetName() {
			continue
		}
		box := &sandboxv1.Sandbox{Name: req.GetName(), Status: &sandboxv1.SandboxStatus{Phase: sandboxv1.Phase_PHASE_RUNNING, Reason: r.GetReason()}}
		if r.ExitCode != nil && r.GetExitCode() != 0 {
			box.Status.Phase = sandboxv1.Phase_PHASE_FAILED
		}
		return &sandboxv1.GetSandboxResponse{Sandbox: box}, nil
	}
	return nil, status.Error(codes.NotFound, "there is no such sandbox")
}

// DeleteSandbox implements sandboxv1.SandboxServiceClient.
func (s *sandboxes) DeleteSandbox(ctx context.Context, req *sandboxv1.DeleteSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.DeleteSandboxResponse, error) {
	fence, err := s.fence(req.GetName())
	if err != nil {
		return nil, err
	}
	stream, err := s.agent.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: fence, GracePeriod: req.GetGracePeriod()})
	if err != nil {
		return nil, err
	}
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.fences, req.GetName())
	return &sandboxv1.DeleteSandboxResponse{}, nil
}

func (s *sandboxes) deleteAll(ctx context.Context) {
	s.mu.Lock()
	var names []string
	for name := range s.fences {
		names = append(names, name)
	}
	s.mu.Unlock()
	for _, name := range names {
		_, _ = s.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Name: name})
	}
}

// StreamLogs implements sandboxv1.SandboxServiceClient.
func (s *sandboxes) StreamLogs(ctx context.Context, req *sandboxv1.StreamLogsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[sandboxv1.StreamLogsResponse], error) {
	fence, err := s.fence(req.GetName())
	if err != nil {
		return nil, err
	}
	stream, err := s.agent.StreamLogs(ctx, &agentv1.StreamLogsRequest{Fence: fence, Follow: req.GetFollow()})
	return logStream{ClientStream: stream, inner: stream}, err
}

type logStream struct {
	grpc.ClientStream
	inner grpc.ServerStreamingClient[agentv1.StreamLogsResponse]
}

// Recv implements grpc.ServerStreamingClient.
func (s logStream) Recv() (*sandboxv1.StreamLogsResponse, error) {
	m, err := s.inner.Recv()
	return &sandboxv1.StreamLogsResponse{Data: m.GetData()}, err
}
