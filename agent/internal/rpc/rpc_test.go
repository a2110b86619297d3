package rpc_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/pin"
	agentrpc "github.com/fast-sandbox/fast-sandbox/agent/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type testEnv struct {
	agentv1.AgentServiceClient

	runtime *fake.Runtime
	conn    *grpc.ClientConn
	usage   *figures
	manager *sandbox.Manager
	status  *status.Hub
	closing chan struct{}
	clock   *clocktesting.FakeClock // of the service
}

// serve boots the real server on an in-memory network, above a fake runtime.
func serve(t *testing.T) *testEnv {
	t.Helper()
	return serveCapacity(t, 3)
}

func serveCapacity(t *testing.T, capacity int32) *testEnv {
	t.Helper()
	rt := fake.New(map[string]fake.Image{"docker.io/library/busybox:1": {Local: true}, "docker.io/library/remote:1": {}})
	store := logs.New(logs.Config{Root: t.TempDir(), Owner: "me"})
	dir, err := state.Open(t.TempDir())
	require.NoError(t, err)
	tombstones, err := dir.Sub("tombstones")
	require.NoError(t, err)
	info := &agentv1.AgentInfo{PodUid: "me", Namespace: "default", Pool: "p", Capacity: capacity, PodIp: "10.0.0.1"}
	hub := status.New(info)
	manager, err := sandbox.New(sandbox.Config{
		Runtime: rt, Logs: store, Info: info, Status: hub, State: dir, Tombstones: tombstones,
	})
	require.NoError(t, err)
	pinned, err := pin.Open(pin.Config{Runtime: rt, Files: dir, Publish: hub.SetPinnedImages})
	require.NoError(t, err)
	fence, err := terms.Open(dir, manager.Supersede)
	require.NoError(t, err)
	require.NoError(t, manager.Adopt(t.Context()))
	manager.SetAccepting(true, "")
	listener := bufconn.Listen(1 << 20)
	insecure := rpc.TLS{Insecure: true}
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{Listener: listener, TLS: insecure, Guard: fence.Guard, DrainTimeout: time.Second})
	require.NoError(t, err)
	closing, fakeClock := make(chan struct{}), clocktesting.NewFakeClock(time.Now())
	service := agentrpc.New(agentrpc.Config{Sandboxes: manager, Status: hub, Pinned: pinned, Logs: store, Runtime: rt, Clock: fakeClock}, closing)
	agentv1.RegisterAgentServiceServer(server, service)
	used := newFigures(fakeClock)
	usagev1.RegisterUsageServiceServer(server, agentrpc.NewUsages(service, agentrpc.UsagesConfig{Sandboxes: sandbox.NewView(manager), Meter: used.meter, Disk: used, Info: info}))
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 2)
	go func() { served <- server.Run(ctx) }()
	go func() { served <- pinned.Run(ctx) }()
	conn, err := rpc.Dial("passthrough:///agent", rpc.ClientConfig{TLS: insecure, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
	}})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		stop()
		require.NoError(t, <-served)
		require.NoError(t, <-served)
		require.NoError(t, manager.Close(context.Background()))
	})
	return &testEnv{AgentServiceClient: agentv1.NewAgentServiceClient(conn), runtime: rt, manager: manager, status: hub, closing: closing, clock: fakeClock, conn: conn, usage: used}
}

func record(uid string) *agentv1.SandboxRecord {
	return &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: uid, Attempt: 1, AgentUid: "me"}, Namespace: "default", Name: "sb",
		Spec: &sandboxv1.SandboxSpec{Image: "busybox:1", Pool: "p", Command: []string{"sleep"}},
	}
}

func drain[T any](t *testing.T, stream grpc.ServerStreamingClient[T]) ([]*T, error) {
	t.Helper()
	var all []*T
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

func TestWatchStatusSequenceAndHeartbeats(t *testing.T) {
	env := serve(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := env.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	var epoch string
	beats := 0
	for want := int64(1); beats < 2; want++ {
		if want > 2 { // there are no more changes: a heartbeat is due a second later
			require.Eventually(t, env.clock.HasWaiters, testkit.Timeout, testkit.Tick)
			env.clock.Step(time.Second)
		}
		m, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, want, m.GetSequence())
		if want == 1 {
			epoch = m.GetEpoch()
			require.NotEmpty(t, epoch)
			require.NotNil(t, m.GetSnapshot())
			env.status.SetImages([]string{"a"})
			continue
		}
		require.Equal(t, epoch, m.GetEpoch())
		require.Nil(t, m.GetSnapshot())
		if want == 2 {
			require.Equal(t, []string{"a"}, m.GetDelta().GetImagesAdded())
			continue
		}
		require.Nil(t, m.GetContent())
		beats++
	}
	close(env.closing)
	for err == nil {
		_, err = stream.Recv()
	}
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(rpc.FromStatus(err)))
}

// TestFastCreateDeltasAreDeferred: watchers receive the deltas of a fast create after its answer, and before any later delta.
func TestFastCreateDeltasAreDeferred(t *testing.T) {
	env := serve(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watch, err := env.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	type sent struct {
		*agentv1.SandboxReport
		at time.Time
	}
	reports := make(chan sent, 10)
	go func() {
		defer close(reports)
		for {
			m, err := watch.Recv()
			if err != nil {
				return
			}
			for _, r := range m.GetDelta().GetSandboxes() {
				reports <- sent{r, m.GetTime().AsTime()}
			}
		}
	}()
	create := func(uid string, mode sandboxv1.ConsistencyMode) {
		r := record(uid)
		r.ConsistencyMode = mode
		stream, err := env.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: r})
		require.NoError(t, err)
		_, err = drain(t, stream)
		require.NoError(t, err)
	}
	require.Eventually(t, env.clock.HasWaiters, testkit.Timeout, testkit.Tick, "the watch is on")
	begun := env.clock.Now()
	create("deferred", sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
	require.Eventually(t, func() bool { env.clock.Step(time.Millisecond); return len(reports) == 2 }, testkit.Timeout, testkit.Tick)
	for range 2 {
		require.GreaterOrEqual(t, (<-reports).at.Sub(begun), agentrpc.DeltaDelay, "it waits for later deltas")
	}
	create("fast", sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST)
	create("strong", sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG)
	for _, want := range []struct {
		uid   string
		state agentv1.SandboxState
	}{
		{"fast", agentv1.SandboxState_SANDBOX_STATE_CREATING},
		{"fast", agentv1.SandboxState_SANDBOX_STATE_RUNNING},
		{"strong", agentv1.SandboxState_SANDBOX_STATE_CREATING},
		{"strong", agentv1.SandboxState_SANDBOX_STATE_RUNNING},
	} {
		got := <-reports
		require.Equal(t, want.uid, got.GetRecord().GetFence().GetSandboxUid())
		require.Equal(t, want.state, got.GetState())
	}
	del, err := env.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Fence: record("fast").GetFence(), GracePeriod: durationpb.New(0)})
	require.NoError(t, err)
	_, err = drain(t, del)
	require.NoError(t, err)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATING, (<-reports).GetState())
	cancel()
	for range reports { // until the watch has ended
	}
}

func TestCreateAndDeleteStreams(t *testing.T) {
	env := serve(t)
	for range 2 { // the second call finds the sandbox
		stream, err := env.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: record("u"), Persisted: true})
		require.NoError(t, err)
		all, err := drain(t, stream)
		require.NoError(t, err)
		last := all[len(all)-1]
		require.Equal(t, agentv1.CreateStage_CREATE_STAGE_STARTED, last.GetStage())
		require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, last.GetReport().GetState())
		require.True(t, last.GetReport().GetPersisted())
		for _, m := range all[:len(all)-1] {
			require.Nil(t, m.GetReport())
		}
	}
	del, err := env.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Fence: record("u").GetFence(), GracePeriod: durationpb.New(0)})
	require.NoError(t, err)
	stages, err := drain(t, del)
	require.NoError(t, err)
	last := stages[len(stages)-1]
	require.Equal(t, agentv1.DeleteStage_DELETE_STAGE_REMOVED, last.GetStage())
	require.Equal(t, int32(137), last.GetExitCode())
	require.Empty(t, env.runtime.IDs())
}

func TestErrorsCarryTheirReason(t *testing.T) {
	env := serve(t)
	bad := record("u")
	bad.Spec.Ports = []int32{0}
	for name, c := range map[string]struct {
		record *agentv1.SandboxRecord
		class  error
		reason fault.Reason
	}{
		"validation": {bad, errdefs.ErrInvalidArgument, fault.InvalidField},
		"fence":      {func() *agentv1.SandboxRecord { r := record("u"); r.Fence.AgentUid = "other"; return r }(), errdefs.ErrFailedPrecondition, fault.FenceMismatch},
		"image":      {func() *agentv1.SandboxRecord { r := record("u"); r.Spec.Image = "nope:1"; return r }(), errdefs.ErrNotFound, fault.ImageNotFound},
	} {
		stream, err := env.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: c.record})
		require.NoError(t, err)
		_, err = drain(t, stream)
		require.ErrorIs(t, err, c.class, name)
		require.Equal(t, c.reason, fault.ReasonOf(err), name)
	}
	_, err := env.MarkPersisted(t.Context(), &agentv1.MarkPersistedRequest{Fence: record("u").GetFence()})
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(rpc.FromStatus(err)))
}

func TestFollowedLogsEndWithTheAgent(t *testing.T) {
	env := serve(t)
	create, err := env.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: record("u")})
	require.NoError(t, err)
	_, err = drain(t, create)
	require.NoError(t, err)
	stream, err := env.StreamLogs(t.Context(), &agentv1.StreamLogsRequest{Fence: record("u").GetFence(), Follow: true})
	require.NoError(t, err)
	close(env.closing)
	_, err = drain(t, stream)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err), "%v", err)
}

func TestPullImage(t *testing.T) {
	env := serve(t)
	stream, err := env.PullImage(t.Context(), &agentv1.PullImageRequest{Image: "remote:1"})
	require.NoError(t, err)
	all, err := drain(t, stream)
	require.NoError(t, err)
	last := all[len(all)-1]
	require.Equal(t, "docker.io/library/remote:1", last.GetImage())
	require.Equal(t, "done", last.GetProgress().GetPhase())
	stream, err = env.PullImage(t.Context(), &agentv1.PullImageRequest{Image: "nope:1"})
	require.NoError(t, err)
	_, err = drain(t, stream)
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
}

func TestSetPinnedImages(t *testing.T) {
	env := serve(t)
	watch, err := env.WatchStatus(t.Context(), &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	_, err = env.SetPinnedImages(t.Context(), &agentv1.SetPinnedImagesRequest{AgentUid: "other", Images: []string{"remote:1"}})
	require.Equal(t, fault.FenceMismatch, fault.ReasonOf(rpc.FromStatus(err)))
	_, err = env.SetPinnedImages(t.Context(), &agentv1.SetPinnedImagesRequest{AgentUid: "me", Images: []string{""}})
	require.Equal(t, fault.InvalidField, fault.ReasonOf(rpc.FromStatus(err)))
	_, err = env.SetPinnedImages(t.Context(), &agentv1.SetPinnedImagesRequest{AgentUid: "me", Images: []string{"remote:1"}})
	require.NoError(t, err)
	for {
		m, err := watch.Recv()
		require.NoError(t, err)
		images := m.GetDelta().GetPinnedImages().GetImages()
		if len(images) == 1 && images[0].GetState() == agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY {
			require.Equal(t, "remote:1", images[0].GetImage())
			break
		}
	}
}
