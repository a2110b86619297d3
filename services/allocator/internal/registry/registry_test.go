package registry_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const busybox = "docker.io/library/busybox:latest"

var (
	epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	pool  = registry.Pool{Namespace: "default", Name: "default"}
)

func snapshot(uid string, capacity int, images ...string) registry.Snapshot {
	return registry.Snapshot{UID: uid, Pool: pool, Capacity: capacity, Images: images, Accepting: true}
}

func request(uid string, ports ...int32) registry.Request {
	return registry.Request{Fence: identity.Fence{SandboxUID: uid, Attempt: 1}, Pool: pool, Image: busybox, Ports: ports}
}

func TestAllocate(t *testing.T) {
	tests := map[string]struct {
		agents  []registry.Snapshot
		held    []registry.Request
		request registry.Request
		want    string
		reason  fault.Reason
	}{
		"no agents": {request: request("x"), reason: fault.NoCapacity},
		"another pool's agent is none": {
			agents:  []registry.Snapshot{{UID: "a", Pool: registry.Pool{Namespace: "other", Name: "default"}, Capacity: 5, Accepting: true}},
			request: request("x"), reason: fault.NoCapacity,
		},
		"the image wins over load": {
			agents: []registry.Snapshot{snapshot("a", 5), {UID: "b", Pool: pool, Capacity: 5, Images: []string{busybox}, Accepting: true,
				Sandboxes: []registry.Sandbox{{Fence: identity.Fence{SandboxUID: "1", Attempt: 1}}}}},
			request: request("x"), want: "b",
		},
		"of equals the first that joined":  {agents: []registry.Snapshot{snapshot("b", 5), snapshot("a", 5)}, request: request("x"), want: "b"},
		"the least loaded":                 {agents: []registry.Snapshot{snapshot("a", 5), snapshot("b", 5)}, held: []registry.Request{request("1")}, request: request("x"), want: "b"},
		"full":                             {agents: []registry.Snapshot{snapshot("a", 1)}, held: []registry.Request{request("1")}, request: request("x"), reason: fault.NoCapacity},
		"port taken everywhere":            {agents: []registry.Snapshot{snapshot("a", 5)}, held: []registry.Request{request("1", 80)}, request: request("x", 80), reason: fault.PortConflict},
		"port taken, another agent has it": {agents: []registry.Snapshot{snapshot("a", 5), snapshot("b", 5)}, held: []registry.Request{request("1", 80)}, request: request("x", 80), want: "b"},
		"the agent's own port": {
			agents:  []registry.Snapshot{{UID: "a", Pool: pool, Capacity: 5, Accepting: true, ReservedPorts: []int32{5758}}},
			request: request("x", 5758), reason: fault.PortConflict,
		},
		"not accepting": {agents: []registry.Snapshot{{UID: "a", Pool: pool, Capacity: 5, Reason: "Draining"}}, request: request("x"), reason: fault.NoCapacity},
		"excluded": {
			agents:  []registry.Snapshot{snapshot("a", 5)},
			request: registry.Request{Fence: identity.Fence{SandboxUID: "x", Attempt: 1}, Pool: pool, Exclude: []string{"a"}}, reason: fault.NoCapacity,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := registry.New(0, 0)
			for _, s := range test.agents {
				r.ApplySnapshot(epoch, s)
			}
			for _, h := range test.held {
				_, err := r.Allocate(epoch, h)
				require.NoError(t, err)
			}
			got, err := r.Allocate(epoch, test.request)
			require.Equal(t, test.want, got)
			if test.reason == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
			require.Equal(t, test.reason, fault.ReasonOf(err))
			_, retry := fault.RetryAfter(err)
			require.True(t, retry)
			if test.reason == fault.PortConflict {
				require.ErrorContains(t, err, fmt.Sprint(test.request.Ports[0]))
			}
		})
	}
}

func TestReservationExpiresUnlessReported(t *testing.T) {
	r := registry.New(0, 0)
	r.ApplySnapshot(epoch, snapshot("a", 2))
	_, err := r.Allocate(epoch, request("lost", 80))
	require.NoError(t, err)
	_, err = r.Allocate(epoch, request("kept"))
	require.NoError(t, err)
	r.ApplyDelta(epoch, registry.Delta{UID: "a", Sandboxes: []registry.Sandbox{{Fence: identity.Fence{SandboxUID: "kept", Attempt: 1}}}})

	before, after := epoch.Add(29*time.Second), epoch.Add(30*time.Second)
	r.Heartbeat(before, "a")
	_, err = r.Allocate(before, request("x", 80))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
	got, err := r.Allocate(after, request("x", 80))
	require.NoError(t, err)
	require.Equal(t, "a", got)
}

func TestSilentAgentIsNotReady(t *testing.T) {
	r := registry.New(0, 0)
	r.Join("b", pool)
	r.ApplySnapshot(epoch, snapshot("a", 5))
	ready := func(now time.Time) bool {
		v, ok := r.Agent(now, "a")
		require.True(t, ok)
		return v.Ready
	}
	require.True(t, ready(epoch))
	require.True(t, ready(epoch.Add(10*time.Second)))
	late := epoch.Add(10*time.Second + 1)
	_, err := r.Allocate(late, request("x"))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
	require.False(t, ready(late))
	v, ok := r.Agent(late, "a")
	require.True(t, ok)
	require.Equal(t, registry.ReasonHeartbeat, v.Reason)
	v, _ = r.Agent(late, "b")
	require.Equal(t, registry.ReasonConnecting, v.Reason)
	r.Heartbeat(late, "a")
	require.True(t, ready(late))
}

func TestExcludingTheReservedAgentMovesTheReservation(t *testing.T) {
	r := registry.New(0, 0)
	r.ApplySnapshot(epoch, snapshot("a", 1))
	r.ApplySnapshot(epoch, snapshot("b", 1))
	first, err := r.Allocate(epoch, request("x"))
	require.NoError(t, err)
	again, err := r.Allocate(epoch, request("x"))
	require.NoError(t, err)
	require.Equal(t, first, again)
	req := request("x")
	req.Exclude = []string{first}
	second, err := r.Allocate(epoch, req)
	require.NoError(t, err)
	require.NotEqual(t, first, second)
	got, err := r.Allocate(epoch, request("y"))
	require.NoError(t, err)
	require.Equal(t, first, got, "the first reservation was given up")
}

func TestConcurrentAllocatesNeverOverfill(t *testing.T) {
	r := registry.New(0, 0)
	for i := range 4 {
		r.ApplySnapshot(epoch, snapshot(fmt.Sprint("agent-", i), 10, busybox))
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	taken := map[string]int{}
	for i := range 100 {
		wg.Go(func() {
			uid, err := r.Allocate(epoch, request(fmt.Sprint(i)))
			if i%10 == 0 {
				r.Release(epoch, identity.Fence{SandboxUID: fmt.Sprint("unknown", i), Attempt: 1, AgentUID: uid})
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				taken[uid]++
			}
		})
	}
	wg.Wait()
	for i := range 4 {
		require.Equal(t, 10, taken[fmt.Sprint("agent-", i)])
	}
}

// TestSandboxReportedBySeveralAgents: a repeated Allocate returns the agent that was chosen last, then the others that report the sandbox.
func TestSandboxReportedBySeveralAgents(t *testing.T) {
	r := registry.New(0, 0)
	req := request("x")
	report := func(uid string, gone bool) {
		r.ApplyDelta(epoch, registry.Delta{UID: uid, Sandboxes: []registry.Sandbox{{Fence: req.Fence, Ended: gone}}})
	}
	where := func(exclude ...string) string {
		excluding := req
		excluding.Exclude = exclude
		uid, err := r.Allocate(epoch, excluding)
		require.NoError(t, err)
		return uid
	}
	r.ApplySnapshot(epoch, snapshot("a", 1))
	for _, uid := range []string{"b", "c"} {
		r.ApplySnapshot(epoch, snapshot(uid, 5))
	}
	for _, uid := range []string{"a", "b", "c"} {
		report(uid, false)
	}
	require.Equal(t, "a", where())
	require.Equal(t, "b", where("a"), "as good as c, and joined earlier")
	require.Equal(t, "b", where(), "the last choice stands")

	s := snapshot("b", 5)
	s.FreeSlots = 3
	r.ApplySnapshot(epoch, s)
	v, ok := r.Agent(epoch, "b")
	require.True(t, ok)
	require.Equal(t, 1, v.Allocated, "reserved still")
	require.Equal(t, 2, v.FreeSlots, "a create may be on its way")
	report("b", true)
	require.Equal(t, "a", where(), "full, but it is there")

	report("b", false)
	report("b", true)
	report("c", true)
	require.Equal(t, "a", where())
	report("a", true)
	require.Equal(t, "b", where(), "chosen again, for its slots")
}

// TestReservationsReduceFreeSlots follows the count of slots through reports that cross reservations.
func TestReservationsReduceFreeSlots(t *testing.T) {
	r := registry.New(0, 0)
	s := snapshot("a", 9)
	s.FreeSlots = 3
	r.ApplySnapshot(epoch, s)
	free := func() int {
		v, ok := r.Agent(epoch, "a")
		require.True(t, ok)
		return v.FreeSlots
	}
	allocate := func(uid string) {
		_, err := r.Allocate(epoch, request(uid))
		require.NoError(t, err)
	}
	report := func(slots *int, uids ...string) {
		d := registry.Delta{UID: "a", FreeSlots: slots}
		for _, uid := range uids {
			d.Sandboxes = append(d.Sandboxes, registry.Sandbox{Fence: request(uid).Fence})
		}
		r.ApplyDelta(epoch, d)
	}
	require.Equal(t, 3, free())
	allocate("1")
	allocate("1")
	require.Equal(t, 2, free(), "once for one allocation")
	allocate("2")
	allocate("3")
	allocate("4")
	require.Zero(t, free(), "the fourth finds none")
	r.Release(epoch, on(request("4"), "a"))
	r.Release(epoch, on(request("3"), "a"))
	require.Equal(t, 1, free(), "what failed has claimed none")
	report(new(3))
	require.Equal(t, 1, free(), "counted before the agent knew of the two")
	report(nil, "1")
	require.Equal(t, 1, free(), "reported before its slot is counted")
	report(new(2))
	require.Equal(t, 1, free(), "counted: one claimed, one on its way")
	report(new(1), "2")
	require.Equal(t, 1, free())
	report(new(3))
	require.Equal(t, 3, free(), "refilled")
	report(new(-1))
	require.Zero(t, free())
}

// Thousands of allocations are added and removed.
func TestManyAllocations(t *testing.T) {
	r := registry.New(0, 0)
	for i := range 10 {
		r.ApplySnapshot(epoch, snapshot(fmt.Sprint("agent-", i), 2000))
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	at := map[string]string{}
	for step := range 20000 {
		uid := fmt.Sprint(rnd.IntN(6000))
		grows := step/4000%2 == 0
		switch where, ok := at[uid]; {
		case ok && (!grows || rnd.IntN(4) == 0):
			r.Release(epoch, on(request(uid), where))
			delete(at, uid)
		case ok || grows:
			got, err := r.Allocate(epoch, request(uid))
			require.NoError(t, err)
			if ok {
				require.Equal(t, where, got)
			}
			at[uid] = got
		}
	}
	total := 0
	for _, v := range r.Agents(epoch) {
		total += v.Allocated
	}
	require.Len(t, at, total)
	for uid, where := range at {
		got, err := r.Allocate(epoch, request(uid))
		require.NoError(t, err)
		require.Equal(t, where, got, "the same key has the same agent")
		r.Release(epoch, request(uid).Fence)
	}
	for _, v := range r.Agents(epoch) {
		require.Zero(t, v.Allocated)
	}
}

// on returns the fence of a request's container on an agent.
func on(req registry.Request, agent string) identity.Fence {
	req.Fence.AgentUID = agent
	return req.Fence
}

func TestHeartbeatTimeout(t *testing.T) {
	r := registry.New(time.Minute, 0)
	r.ApplySnapshot(epoch, registry.Snapshot{UID: "a", Pool: pool, Capacity: 1, Accepting: true})
	v, _ := r.Agent(epoch.Add(time.Minute), "a")
	require.True(t, v.Ready)
	v, _ = r.Agent(epoch.Add(time.Minute+time.Second), "a")
	require.False(t, v.Ready)
	require.Equal(t, registry.ReasonHeartbeat, v.Reason)
	r.Heartbeat(epoch.Add(2*time.Minute), "a")
	v, _ = r.Agent(epoch.Add(2*time.Minute), "a")
	require.True(t, v.Ready, "it has sent a heartbeat")
}
