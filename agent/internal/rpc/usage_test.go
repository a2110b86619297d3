package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/disk"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/meter"
	agentrpc "github.com/fast-sandbox/fast-sandbox/agent/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/usage"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// figures are what containers use: as many seconds of processor time as they were read, and nothing that can be counted besides.
type figures struct {
	meter *meter.Meter
	clock *clocktesting.FakeClock

	mu       sync.Mutex
	reads    map[string]int
	networks map[string]bool
	errs     map[string]error
	disk     map[string]disk.Measurement
}

func newFigures(c *clocktesting.FakeClock) *figures {
	f := &figures{clock: c, reads: map[string]int{}, networks: map[string]bool{}, errs: map[string]error{}, disk: map[string]disk.Measurement{}}
	f.meter = meter.New(meter.Config{Runtime: f, Running: func() []meter.Container { return nil }, Clock: c})
	return f
}

func (f *figures) Usage(_ context.Context, id string, network bool) (usage.Usage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads[id]++
	f.networks[id] = network
	cpu := time.Duration(f.reads[id]) * time.Second
	u := usage.Usage{CPU: usage.CPU{Total: &cpu}}
	if network {
		u.Network = &usage.Network{SentBytes: 1}
	}
	return u, f.errs[id]
}

func (f *figures) Measured(id string) (disk.Measurement, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.disk[id]
	return m, ok
}

func (f *figures) count(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads[id]
}

func (f *figures) fail(id string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs[id] = err
}

// running starts a sandbox and returns the id of its container, and a context for calls about it.
func (e *testEnv) running(t *testing.T, uid string, change func(*agentv1.SandboxRecord)) (string, context.Context) {
	t.Helper()
	r := record(uid)
	r.Name = uid
	if change != nil {
		change(r)
	}
	stream, err := e.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: r})
	require.NoError(t, err)
	_, err = drain(t, stream)
	require.NoError(t, err)
	return uid + "-1", rpc.ForTarget(t.Context(), rpc.Target{SandboxUID: uid, Attempt: 1, AgentUID: "me"})
}

func named(uid string) *usagev1.GetSandboxUsageRequest {
	return &usagev1.GetSandboxUsageRequest{Namespace: "default", Name: uid}
}

func TestGetSandboxUsage(t *testing.T) {
	env := serve(t)
	client := usagev1.NewUsageServiceClient(env.conn)
	id, ctx := env.running(t, "a", nil)
	resp, err := client.GetSandboxUsage(ctx, named("a"))
	require.NoError(t, err)
	got := resp.GetUsage()
	require.NotNil(t, got.GetStartTime())
	want := &usagev1.SandboxUsage{
		Namespace: "default", Name: "a", Uid: "a", Pool: "p", StartTime: got.GetStartTime(), ReadTime: timestamppb.New(env.clock.Now()),
		Cpu: &usagev1.CPUUsage{Total: durationpb.New(time.Second)}, Memory: &usagev1.MemoryUsage{}, Processes: &usagev1.ProcessUsage{},
	}
	require.Empty(t, cmp.Diff(want, got, protocmp.Transform()), "what is not known is unset, the network of the agent too")

	_, err = client.GetSandboxUsage(ctx, named("a"))
	require.NoError(t, err)
	require.Equal(t, 1, env.usage.count(id), "the reading is young enough")
	env.clock.Step(time.Second)
	at := env.clock.Now()
	env.usage.mu.Lock()
	env.usage.disk[id] = disk.Measurement{DiskUsage: runtime.DiskUsage{Bytes: 5, Inodes: 2}, At: at}
	env.usage.mu.Unlock()
	resp, err = client.GetSandboxUsage(ctx, named("a"))
	require.NoError(t, err)
	require.Equal(t, 2*time.Second, resp.GetUsage().GetCpu().GetTotal().AsDuration())
	require.Empty(t, cmp.Diff(&usagev1.DiskUsage{Bytes: 5, Files: 2, MeasureTime: timestamppb.New(at)}, resp.GetUsage().GetDisk(), protocmp.Transform()))

	_, none := env.running(t, "b", func(r *agentv1.SandboxRecord) { r.Spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE })
	resp, err = client.GetSandboxUsage(none, named("b"))
	require.NoError(t, err)
	require.EqualValues(t, 1, resp.GetUsage().GetNetwork().GetSentBytes())
}

func TestUsageRefuses(t *testing.T) {
	env := serve(t)
	client := usagev1.NewUsageServiceClient(env.conn)
	id, ctx := env.running(t, "a", nil)
	for name, tc := range map[string]struct {
		target *rpc.Target
		want   fault.Reason
	}{
		"no target":       {nil, fault.InvalidField},
		"unknown sandbox": {&rpc.Target{SandboxUID: "x", Attempt: 1, AgentUID: "me"}, fault.SandboxNotFound},
		"other attempt":   {&rpc.Target{SandboxUID: "a", Attempt: 2, AgentUID: "me"}, fault.FenceMismatch},
		"other agent":     {&rpc.Target{SandboxUID: "a", Attempt: 1, AgentUID: "other"}, fault.FenceMismatch},
	} {
		ctx := t.Context()
		if tc.target != nil {
			ctx = rpc.ForTarget(ctx, *tc.target)
		}
		_, err := client.GetSandboxUsage(ctx, named("a"))
		require.Equal(t, tc.want, fault.ReasonOf(rpc.FromStatus(err)), name)
		stream, err := client.WatchSandboxUsage(ctx, &usagev1.WatchSandboxUsageRequest{Namespace: "default", Name: "a"})
		require.NoError(t, err)
		_, err = drain(t, stream)
		require.Equal(t, tc.want, fault.ReasonOf(err), name)
	}
	for _, interval := range []time.Duration{-time.Second, 0, 249 * time.Millisecond, 5*time.Minute + 1} {
		stream, err := client.WatchSandboxUsage(ctx, &usagev1.WatchSandboxUsageRequest{Namespace: "default", Name: "a", Interval: durationpb.New(interval)})
		require.NoError(t, err)
		_, err = drain(t, stream)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err), interval)
		require.ErrorContains(t, err, "interval", interval)
	}
	_, err := client.GetSandboxUsage(ctx, &usagev1.GetSandboxUsageRequest{Namespace: "default", Name: "Not A Name"})
	require.ErrorContains(t, err, "name")

	// A process that has just ended, and one whose end is known.
	env.usage.fail(id, errdefs.ErrNotFound)
	_, err = client.GetSandboxUsage(ctx, named("a"))
	require.Equal(t, fault.PhaseConflict, fault.ReasonOf(rpc.FromStatus(err)))
	env.runtime.Exit(id, runtime.Exit{Code: 3, At: time.Now()})
	require.Eventually(t, func() bool { return len(env.manager.Running()) == 0 }, testkit.Timeout, testkit.Tick)
	reads := env.usage.count(id)
	_, err = client.GetSandboxUsage(ctx, named("a"))
	require.Equal(t, fault.PhaseConflict, fault.ReasonOf(rpc.FromStatus(err)))
	require.Equal(t, reads, env.usage.count(id), "an ended sandbox is not read")
}

// next receives a reading.
func next(t *testing.T, stream grpc.ServerStreamingClient[usagev1.WatchSandboxUsageResponse]) *usagev1.SandboxUsage {
	t.Helper()
	m, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, m.GetUsage())
	return m.GetUsage()
}

// TestWatchesShareReadings: watches of one sandbox with one interval cost one reading for each interval, whenever they have begun, and all end with
// how the sandbox has ended.
func TestWatchesShareReadings(t *testing.T) {
	env := serve(t)
	client := usagev1.NewUsageServiceClient(env.conn)
	id, ctx := env.running(t, "a", nil)
	var streams []grpc.ServerStreamingClient[usagev1.WatchSandboxUsageResponse]
	for range 20 {
		env.clock.Step(7 * time.Millisecond)
		stream, err := client.WatchSandboxUsage(ctx, &usagev1.WatchSandboxUsageRequest{Namespace: "default", Name: "a", Interval: durationpb.New(time.Second)})
		require.NoError(t, err)
		streams = append(streams, stream)
		next(t, stream)
	}
	require.LessOrEqual(t, env.usage.count(id), 2)
	waiting := func() bool { return env.clock.Waiters() >= len(streams) }
	last := time.Time{}
	for range 5 {
		require.Eventually(t, waiting, testkit.Timeout, testkit.Tick)
		before := env.usage.count(id)
		env.clock.Step(1500 * time.Millisecond) // the most that a watch waits which has just begun
		for _, s := range streams {
			got := next(t, s)
			require.True(t, got.GetReadTime().AsTime().After(last))
			require.True(t, proto.Equal(got.GetCpu(), &usagev1.CPUUsage{Total: durationpb.New(time.Duration(before+1) * time.Second)}), got)
		}
		last = env.clock.Now().Add(-time.Nanosecond)
		require.Equal(t, before+1, env.usage.count(id))
	}
	at := time.Now().UTC()
	env.usage.fail(id, errdefs.ErrNotFound)
	env.runtime.Exit(id, runtime.Exit{Code: 3, At: at})
	for _, s := range streams {
		m, err := s.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 3, m.GetEnded().GetExitCode())
		require.Equal(t, "Error", m.GetEnded().GetReason())
		require.Equal(t, at, m.GetEnded().GetFinishTime().AsTime())
		rest, err := drain(t, s)
		require.NoError(t, err)
		require.Empty(t, rest)
	}
}

// TestWatchNeverRepeats: whenever a watch begins, it sends each reading once, half an interval apart or more.
func TestWatchNeverRepeats(t *testing.T) {
	for began := time.Duration(0); began < time.Second; began += 10 * time.Millisecond {
		at := time.Unix(1000, 0).Add(began)
		for range 3 {
			wait := agentrpc.UntilNext(at, time.Second, "a")
			require.GreaterOrEqual(t, wait, 500*time.Millisecond)
			require.Less(t, wait, 1500*time.Millisecond)
			at = at.Add(wait)
			require.Equal(t, agentrpc.UntilNext(at, time.Second, "a"), time.Second, "from the first one on they are at the times of all watches")
		}
		other := agentrpc.UntilNext(at, time.Second, "b")
		require.NotEqual(t, time.Second, other, "not at those of other containers")
	}
}

// TestWatchEnds: a watch ends with its sandbox when that is deleted, with its caller, and with the agent.
func TestWatchEnds(t *testing.T) {
	env := serve(t)
	client := usagev1.NewUsageServiceClient(env.conn)
	watch := func(ctx context.Context, uid string) grpc.ServerStreamingClient[usagev1.WatchSandboxUsageResponse] {
		stream, err := client.WatchSandboxUsage(ctx, &usagev1.WatchSandboxUsageRequest{Namespace: "default", Name: uid})
		require.NoError(t, err)
		next(t, stream)
		return stream
	}
	_, deleted := env.running(t, "deleted", nil)
	stream := watch(deleted, "deleted")
	call, err := env.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Fence: &agentv1.Fence{SandboxUid: "deleted", Attempt: 1, AgentUid: "me"}, GracePeriod: durationpb.New(0)})
	require.NoError(t, err)
	_, err = drain(t, call)
	require.NoError(t, err)
	all, err := drain(t, stream)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.NotNil(t, all[0].GetEnded())

	_, open := env.running(t, "open", nil)
	left, cancel := context.WithCancel(open)
	stream = watch(left, "open")
	cancel()
	_, err = drain(t, stream)
	require.Error(t, err)
	stream = watch(open, "open")
	close(env.closing)
	_, err = drain(t, stream)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
}

func TestListSandboxUsage(t *testing.T) {
	env := serve(t)
	client := usagev1.NewUsageServiceClient(env.conn)
	list := func(in *usagev1.ListSandboxUsageRequest) ([]*usagev1.ListSandboxUsageResponse, error) {
		stream, err := client.ListSandboxUsage(t.Context(), in)
		require.NoError(t, err)
		return drain(t, stream)
	}
	all, err := list(&usagev1.ListSandboxUsageRequest{})
	require.NoError(t, err)
	require.Empty(t, all)
	ids := map[string]string{}
	for _, uid := range []string{"c", "a", "b"} {
		ids[uid], _ = env.running(t, uid, nil)
	}
	found := func(m *usagev1.ListSandboxUsageResponse) (names []string) {
		for _, s := range m.GetSandboxes() {
			names = append(names, s.GetName())
		}
		return names
	}
	for _, in := range []*usagev1.ListSandboxUsageRequest{{}, {Namespace: "default"}, {Namespace: "default", Pool: "p"}} {
		all, err = list(in)
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, []string{"a", "b", "c"}, found(all[0]))
	}
	env.clock.Step(time.Second)
	env.usage.fail(ids["b"], fmt.Errorf("reading: %w", errors.New("input/output error")))
	env.usage.fail(ids["c"], errdefs.ErrNotFound)
	all, err = list(&usagev1.ListSandboxUsageRequest{})
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, []string{"a"}, found(all[0]))
	require.Equal(t, "sandbox b: reading: input/output error", all[1].GetError(), "one that has ended is left out")
	for field, in := range map[string]*usagev1.ListSandboxUsageRequest{"namespace": {Namespace: "other"}, "pool": {Pool: "other"}} {
		_, err = list(in)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
		require.ErrorContains(t, err, field)
	}
}
