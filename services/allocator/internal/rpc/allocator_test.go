package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	allocatorrpc "github.com/fast-sandbox/fast-sandbox/services/allocator/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fixture struct {
	registry *registry.Registry
	fleet    *fleet.Fleet
	pools    *pools.Pools
	client   allocatorv1.AllocatorServiceClient
	agents   connections
}

// connections are the connections to agents, by uid.
type connections map[string]agentv1.AgentServiceClient

// Client implements rpc.Agents.
func (c connections) Client(uid string) (agentv1.AgentServiceClient, bool) {
	client, ok := c[uid]
	return client, ok
}

func start(t *testing.T) *fixture {
	t.Helper()
	c := clock.RealClock{}
	f := &fixture{registry: registry.New(0, 0), pools: pools.New(), agents: connections{}}
	f.fleet = fleet.New(f.registry, c, store.New(c), nil)
	ctx, cancel := context.WithCancel(context.Background())
	pipe := bufconn.Listen(1 << 16)
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{Listener: pipe, TLS: rpc.TLS{Insecure: true}, DrainTimeout: 10 * time.Millisecond})
	require.NoError(t, err)
	allocatorv1.RegisterAllocatorServiceServer(server, allocatorrpc.New(allocatorrpc.Config{
		Fleet: f.fleet, Pools: f.pools, Agents: f.agents, Clock: c, HeartbeatTimeout: testkit.Timeout,
	}))
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Run(ctx) })
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(); cancel(); wg.Wait() })
	f.client = allocatorv1.NewAllocatorServiceClient(conn)
	return f
}

func info(uid string) *agentv1.AgentInfo {
	return &agentv1.AgentInfo{PodUid: uid, PodName: "pod-" + uid, Namespace: "ns", Pool: "p", NodeName: "n", Capacity: 2}
}

func sandbox(uid string, state agentv1.SandboxState) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: state, Record: &agentv1.SandboxRecord{
		Namespace: "ns", Name: uid, Fence: &agentv1.Fence{SandboxUid: uid, Attempt: 1, AgentUid: "a"}, Spec: &sandboxv1.SandboxSpec{Image: "x", Pool: "p"},
	}}
}

func TestWatchAgents(t *testing.T) {
	f := start(t)
	f.pools.SetSynced()
	f.fleet.Joined(info("a"), "a:1")
	f.fleet.Joined(info("b"), "b:1")
	f.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info("a"), Accepting: true, Sandboxes: []*agentv1.SandboxReport{sandbox("s", agentv1.SandboxState_SANDBOX_STATE_RUNNING)}})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := f.client.WatchAgents(ctx, &allocatorv1.WatchAgentsRequest{Namespace: "ns"})
	require.NoError(t, err)
	next := func() *allocatorv1.WatchAgentsResponse {
		m, err := stream.Recv()
		require.NoError(t, err)
		return m
	}
	first := next()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_AGENT, first.GetType())
	require.Equal(t, "pod-a", first.GetAgent().GetInfo().GetPodName())
	require.Len(t, first.GetSandboxes(), 1)
	require.True(t, first.GetAgent().GetReady())

	// SYNCED waits for the first report of b: without it, its sandboxes would count as removed.
	f.fleet.Snapshot("b", &agentv1.AgentSnapshot{Info: info("b"), Accepting: true})
	require.Equal(t, "pod-b", next().GetAgent().GetInfo().GetPodName())
	synced := next()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_SYNCED, synced.GetType())
	require.Equal(t, testkit.Timeout, synced.GetHeartbeatTimeout().AsDuration())

	f.fleet.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{sandbox("s", agentv1.SandboxState_SANDBOX_STATE_TERMINATED)}})
	gone := next()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, gone.GetType())
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATED, gone.GetSandboxes()[0].GetState())
	require.Zero(t, gone.GetAgent().GetAllocated())
	f.fleet.Left("a")
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE, next().GetType())
	f.fleet.Left("unknown")
	f.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info("a")})
	list, err := f.client.ListAgents(ctx, &allocatorv1.ListAgentsRequest{})
	require.NoError(t, err)
	require.Len(t, list.GetAgents(), 1, "messages of an agent that has left are ignored")
}

func TestAllocateReleaseAndPools(t *testing.T) {
	f := start(t)
	ctx := context.Background()
	request := func(uid string) *allocatorv1.AllocateRequest {
		return &allocatorv1.AllocateRequest{Namespace: "ns", Name: uid, SandboxUid: uid, Attempt: 1, Pool: "p", Image: "busybox"}
	}
	_, err := f.client.Allocate(ctx, request("1"))
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(rpc.FromStatus(err)), "the pools are not known yet")
	f.pools.SetSynced()
	_, err = f.client.Allocate(ctx, request("1"))
	require.Equal(t, fault.PoolNotFound, fault.ReasonOf(rpc.FromStatus(err)))
	f.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}})
	bad := request("1")
	bad.Image = "UP PER"
	_, err = f.client.Allocate(ctx, bad)
	require.Equal(t, fault.InvalidField, fault.ReasonOf(rpc.FromStatus(err)))
	_, err = f.client.Allocate(ctx, request("1"))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(rpc.FromStatus(err)))
	f.fleet.Joined(info("a"), "a:1")
	f.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info("a"), Accepting: true, Images: []string{"docker.io/library/busybox:latest"}})
	one, err := f.client.Allocate(ctx, request("1"))
	require.NoError(t, err)
	require.Equal(t, "a:1", one.GetAssignment().GetAgentAddress())
	again, err := f.client.Allocate(ctx, request("1"))
	require.NoError(t, err)
	require.Equal(t, one.GetAssignment().GetFence().GetAgentUid(), again.GetAssignment().GetFence().GetAgentUid())
	pool, err := f.client.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: "ns", Name: "p"})
	require.NoError(t, err)
	require.EqualValues(t, 1, pool.GetPool().GetAllocated())
	require.EqualValues(t, 2, pool.GetPool().GetCapacity())
	require.Nil(t, pool.GetPool().SlotsMax)
	f.fleet.Joined(info("b"), "b:1")
	f.fleet.Snapshot("b", &agentv1.AgentSnapshot{Info: info("b"), NotAcceptingReason: "Draining", Slots: &agentv1.SlotStatus{Free: 1, Wanted: 1}})
	f.fleet.Delta("a", &agentv1.AgentDelta{Slots: &agentv1.SlotStatus{Free: 1, Wanted: 2}})
	f.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}, Spec: v1alpha1.SandboxPoolSpec{
		Slots: &v1alpha1.PoolSlots{Max: ptr.To(int32(0))}}})
	pool, err = f.client.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: "ns", Name: "p"})
	require.NoError(t, err)
	require.EqualValues(t, 1, pool.GetPool().GetFreeSlots(), "those of the ready agents")
	require.EqualValues(t, 2, pool.GetPool().GetWantedSlots())
	require.Equal(t, ptr.To(int32(0)), pool.GetPool().SlotsMax)
	require.Nil(t, pool.GetPool().SlotsMin)
	for range 2 {
		_, err = f.client.Release(ctx, &allocatorv1.ReleaseRequest{Fence: one.GetAssignment().GetFence()})
		require.NoError(t, err)
	}
	list, err := f.client.ListPools(ctx, &allocatorv1.ListPoolsRequest{})
	require.NoError(t, err)
	require.Len(t, list.GetPools(), 1)
	require.Zero(t, list.GetPools()[0].GetAllocated())
}

// TestAllocateChecksQuotas by the limits of the sandbox, or else of its pool.
func TestAllocateChecksQuotas(t *testing.T) {
	f := start(t)
	f.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}, Spec: v1alpha1.SandboxPoolSpec{
		SandboxResources: &v1alpha1.SandboxResources{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("300m")}},
	}})
	f.fleet.Joined(info("a"), "a:1")
	f.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info("a"), Accepting: true})
	f.registry.SetLimits("ns", registry.Limits{
		registry.Sandboxes: {Quota: "q", Key: "count", Hard: 0}, registry.CPU: {Quota: "q", Key: "requests.cpu", Hard: 500},
	})
	allocate := func(uid string, cpu int64) error {
		req := &allocatorv1.AllocateRequest{Namespace: "ns", Name: uid, SandboxUid: uid, Attempt: 1, Pool: "p", Image: "busybox"}
		if cpu > 0 {
			req.Resources = &sandboxv1.ResourceLimits{CpuMillis: cpu}
		}
		_, err := f.client.Allocate(t.Context(), req)
		return rpc.FromStatus(err)
	}
	require.NoError(t, allocate("1", 0), "its resource exists, and the API server has counted it")
	var e *fault.Error
	require.ErrorAs(t, allocate("2", 201), &e)
	require.Equal(t, fault.QuotaExceeded, e.Reason())
	require.Equal(t, map[string]string{"quota": "q", "resource": "requests.cpu", "requested": "201m", "used": "300m", "allowed": "500m"}, e.Metadata())
	_, retry := fault.RetryAfter(e)
	require.True(t, retry)
	require.NoError(t, allocate("2", 200))
}

// serveAgent joins a fake agent that the allocator can call.
func (f *fixture) serveAgent(t *testing.T, uid, node string, images ...string) *fakeagent.Agent {
	t.Helper()
	who := info(uid)
	who.NodeName = node
	agent := fakeagent.New(who, images...)
	pipe := bufconn.Listen(1 << 16)
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() { _ = agent.Serve(ctx, pipe, rpc.TLS{Insecure: true}) })
	conn, err := rpc.Dial("passthrough:///agent", rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }),
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()); cancel(); serving.Wait() })
	f.agents[uid] = agentv1.NewAgentServiceClient(conn)
	f.fleet.Joined(who, uid+":1")
	f.fleet.Snapshot(uid, &agentv1.AgentSnapshot{Info: who, Accepting: true, Images: images})
	return agent
}

func (f *fixture) setPool(name string, images ...string) {
	f.pools.Set(&v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: v1alpha1.SandboxPoolSpec{Images: images},
	})
}

func TestListImages(t *testing.T) {
	f := start(t)
	ctx := t.Context()
	_, err := f.client.ListImages(ctx, &allocatorv1.ListImagesRequest{Namespace: "ns"})
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(rpc.FromStatus(err)), "the default pool is not known yet")
	f.pools.SetSynced()
	_, err = f.client.ListImages(ctx, &allocatorv1.ListImagesRequest{Namespace: "ns"})
	require.Equal(t, fault.PoolNotFound, fault.ReasonOf(rpc.FromStatus(err)))
	f.setPool("p", "busybox", "python:3")
	f.pools.SetNamespace(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns", Annotations: map[string]string{v1alpha1.AnnotationDefaultPool: "p"}}})
	f.serveAgent(t, "b", "node-1", "docker.io/library/busybox:latest", "docker.io/library/extra:1")
	f.serveAgent(t, "a", "node-2")
	f.fleet.Delta("a", &agentv1.AgentDelta{PinnedImages: &agentv1.PinnedImages{Images: []*agentv1.PinnedImage{
		{Image: "python:3", State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED, Message: "no such image"},
	}}})
	resp, err := f.client.ListImages(ctx, &allocatorv1.ListImagesRequest{Namespace: "ns"})
	require.NoError(t, err)
	var lines []string
	for _, image := range resp.GetImages() {
		for _, n := range image.GetNodes() {
			lines = append(lines, fmt.Sprint(image.GetImage(), " ", image.GetPinned(), " ", n.GetNodeName(), " ", n.GetAgentPod(), " ", n.GetPresent(), " ", n.GetState(), " ", n.GetMessage()))
		}
	}
	require.Equal(t, []string{
		"docker.io/library/busybox:latest true node-1 pod-b true PINNED_IMAGE_STATE_UNSPECIFIED ",
		"docker.io/library/busybox:latest true node-2 pod-a false PINNED_IMAGE_STATE_UNSPECIFIED ",
		"docker.io/library/extra:1 false node-1 pod-b true PINNED_IMAGE_STATE_UNSPECIFIED ",
		"docker.io/library/extra:1 false node-2 pod-a false PINNED_IMAGE_STATE_UNSPECIFIED ",
		"docker.io/library/python:3 true node-1 pod-b false PINNED_IMAGE_STATE_UNSPECIFIED ",
		"docker.io/library/python:3 true node-2 pod-a false PINNED_IMAGE_STATE_FAILED no such image",
	}, lines)
}

func TestPullImage(t *testing.T) {
	f := start(t)
	f.pools.SetSynced()
	f.setPool("default")
	f.setPool("p")
	pull := func(ctx context.Context, req *allocatorv1.PullImageRequest) (map[string][]*allocatorv1.PullImageResponse, error) {
		stream, err := f.client.PullImage(ctx, req)
		require.NoError(t, err)
		byPod := map[string][]*allocatorv1.PullImageResponse{}
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return byPod, nil
			}
			if err != nil {
				return byPod, rpc.FromStatus(err)
			}
			byPod[m.GetAgentPod()] = append(byPod[m.GetAgentPod()], m)
		}
	}
	_, err := pull(t.Context(), &allocatorv1.PullImageRequest{Namespace: "ns", Pool: "p", Image: "No Reference"})
	require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
	_, err = pull(t.Context(), &allocatorv1.PullImageRequest{Namespace: "ns", Image: "python:3"})
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err), "the default pool has no agents")

	good, bad := f.serveAgent(t, "a", "node-1"), f.serveAgent(t, "b", "node-2")
	bad.OnPull = func(context.Context, string) error {
		return fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no such image")
	}
	f.fleet.Joined(info("c"), "c:1")
	f.fleet.Snapshot("c", &agentv1.AgentSnapshot{Info: info("c"), Accepting: true}) // no connection
	f.fleet.Joined(info("d"), "d:1")                                                // not ready
	progress, err := pull(t.Context(), &allocatorv1.PullImageRequest{Namespace: "ns", Pool: "p", Image: "python:3"})
	require.NoError(t, err, "an agent that fails does not fail the call")
	require.Len(t, progress, 3)
	last := func(pod string) *allocatorv1.PullImageResponse { return progress[pod][len(progress[pod])-1] }
	require.Greater(t, len(progress["pod-a"]), 1, "progress comes before the end")
	require.Equal(t, "done", last("pod-a").GetProgress().GetPhase())
	require.Equal(t, "node-1", last("pod-a").GetNodeName())
	require.Empty(t, last("pod-a").GetError())
	require.Equal(t, "failed", last("pod-b").GetProgress().GetPhase())
	require.Contains(t, last("pod-b").GetError(), "no such image")
	require.NotZero(t, last("pod-b").GetProgress().GetDownloadedBytes())
	require.Equal(t, "failed", last("pod-c").GetProgress().GetPhase())

	// The caller leaves: the pulls end with it.
	started := make(chan struct{})
	good.OnPull = func(ctx context.Context, _ string) error { close(started); <-ctx.Done(); return ctx.Err() }
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-started; cancel() }()
	_, err = pull(ctx, &allocatorv1.PullImageRequest{Namespace: "ns", Pool: "p", Image: "python:3"})
	require.ErrorIs(t, err, context.Canceled)
}

// An agent reports the image of a reference with a tag and a digest by its digest alone.
func TestAllocateFindsImagesByDigest(t *testing.T) {
	f := start(t)
	f.pools.SetSynced()
	f.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}})
	digest := "@sha256:" + strings.Repeat("ab", 32)
	for _, uid := range []string{"a", "b", "c"} {
		f.fleet.Joined(info(uid), uid+":1")
		f.fleet.Snapshot(uid, &agentv1.AgentSnapshot{Info: info(uid), Accepting: true})
	}
	f.fleet.Delta("b", &agentv1.AgentDelta{ImagesAdded: []string{"docker.io/library/busybox" + digest}})
	resp, err := f.client.Allocate(t.Context(), &allocatorv1.AllocateRequest{
		Namespace: "ns", Name: "s", SandboxUid: "s", Attempt: 1, Pool: "p", Image: "busybox:1.36" + digest,
	})
	require.NoError(t, err)
	require.Equal(t, "b", resp.GetAssignment().GetFence().GetAgentUid(), "the agent that has the image")
}
