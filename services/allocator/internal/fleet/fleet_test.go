package fleet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// log is a listener, and receives refusals, and records its calls.
type log struct{ lines []string }

func (l *log) take() []string {
	out := l.lines
	l.lines = nil
	return out
}

func (l *log) AgentJoined(string, string) {}

func (l *log) Refused(agent *agentv1.AgentInfo, kind string, n int) {
	l.lines = append(l.lines, fmt.Sprint("refused ", agent.GetNamespace(), "/", agent.GetPodName(), " ", kind, " ", n))
}

func (l *log) AgentSandboxes(uid string, r []*agentv1.SandboxReport) {
	l.lines = append(l.lines, fmt.Sprint("all ", uid, " ", len(r)))
}

func (l *log) AgentChanges(uid string, r []*agentv1.SandboxReport) {
	l.lines = append(l.lines, fmt.Sprint("some ", uid, " ", len(r)))
}

func (l *log) AgentTombstones(added, removed []*agentv1.Tombstone) {
	l.lines = append(l.lines, fmt.Sprint("tombstones +", len(added), " -", len(removed)))
}

func (l *log) AgentGone(uid string) { l.lines = append(l.lines, "gone "+uid) }

func fence(uid string, attempt int64) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: "a"}
}

func report(uid string, state agentv1.SandboxState, persisted bool) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: state, Persisted: persisted, Record: &agentv1.SandboxRecord{
		Namespace: "ns", Name: uid, Fence: fence(uid, 1), Spec: &sandboxv1.SandboxSpec{Pool: "p", Ports: []int32{80}},
	}}
}

func tombstone(uid string) *agentv1.Tombstone {
	return &agentv1.Tombstone{Fence: fence(uid, 1), Namespace: "ns", Name: uid}
}

func info(capacity int32) *agentv1.AgentInfo {
	return &agentv1.AgentInfo{PodUid: "a", PodName: "pod-a", Namespace: "ns", Pool: "p", NodeName: "n", Capacity: capacity}
}

func newFleet() (*fleet.Fleet, *log, *clocktesting.FakePassiveClock) {
	l, c := &log{}, clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	return fleet.New(registry.New(0, 0), c, l, l), l, c
}

const (
	running    = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	stopped    = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	failed     = agentv1.SandboxState_SANDBOX_STATE_FAILED
	terminated = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

func TestReports(t *testing.T) {
	f, l, _ := newFleet()
	f.Delta("a", &agentv1.AgentDelta{})
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5)})
	require.Empty(t, l.take(), "the agent has not joined")
	f.Joined(info(0), "10.0.0.1:1")
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("x", running, false)}})
	require.Empty(t, l.take(), "a delta without a snapshot")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Sandboxes: []*agentv1.SandboxReport{
		report("u1", running, true), report("u2", stopped, false), report("u3", failed, false),
	}, Tombstones: []*agentv1.Tombstone{tombstone("t1")}})
	require.Equal(t, []string{"tombstones +1 -0", "all a 3"}, l.take(), "tombstones come before reports")
	agent, ok := f.Agent("a")
	require.True(t, ok)
	require.EqualValues(t, 1, agent.GetAllocated(), "a sandbox that failed or ended holds no capacity")
	require.True(t, f.Reported(identity.FenceOf(fence("u1", 1))))
	require.False(t, f.Reported(identity.FenceOf(fence("u1", 2))))
	require.Len(t, f.Unpersisted(), 2)
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("u2", terminated, false)}})
	require.Equal(t, []string{"some a 1"}, l.take())
	require.False(t, f.Reported(identity.FenceOf(fence("u2", 1))))
	unpersisted := f.Unpersisted()
	require.Len(t, unpersisted, 1)
	f.Heartbeat("a")
	require.Equal(t, unpersisted[0].Messages+1, f.Unpersisted()[0].Messages, "a heartbeat counts")
	f.Left("a")
	require.Equal(t, []string{"tombstones +0 -1", "gone a"}, l.take())
	require.Empty(t, f.Unpersisted())
	require.Empty(t, f.Tombstones())
}

// There are as many reports as sandboxes: what a custom resource repeats is not kept twice.
func TestReportsOfPersistedSandboxesAreCompact(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	full := report("u1", running, false)
	full.Endpoints, full.StartPath, full.ExitCode = []string{"10.0.0.1:80"}, sandboxv1.StartPath_START_PATH_SLOT, proto.Int32(3)
	full.Reason, full.Message, full.ContainerId = "Error", "it ended", "c"
	full.StartTime = timestamppb.New(time.Unix(1, 0))
	full.Record.CreateTime = timestamppb.New(time.Unix(0, 0))
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Sandboxes: []*agentv1.SandboxReport{full}})
	require.True(t, proto.Equal(full, f.Unpersisted()[0].Report), "its custom resource may have to be written from this")
	written := proto.CloneOf(full)
	written.Persisted = true
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{written}})
	require.Empty(t, f.Unpersisted())
	initial, w := f.Watch("", "")
	defer w.Close()
	want := proto.CloneOf(written)
	want.Record.Spec = nil
	require.True(t, proto.Equal(want, initial[0].GetSandboxes()[0]))
	agent, _ := f.Agent("a")
	require.EqualValues(t, 1, agent.GetAllocated())
	_, err := f.Reserve(registry.Request{
		Fence: identity.Fence{SandboxUID: "u2", Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}, Ports: []int32{80},
	})
	require.Equal(t, fault.PortConflict, fault.ReasonOf(err), "its port is taken")
	f.Left("a")
}

// TestReportedLimitsCount against the quotas of the namespace: after a restart of the allocator, agents' reports are all it knows.
func TestReportedLimitsCount(t *testing.T) {
	reg := registry.New(0, 0)
	l := &log{}
	f := fleet.New(reg, clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), l, l)
	f.Joined(info(5), "10.0.0.1:1")
	limited := report("u1", running, true)
	limited.Record.Limits = &sandboxv1.ResourceLimits{CpuMillis: 700, MemoryBytes: 1 << 20}
	ended := report("u2", stopped, true)
	ended.Record.Limits = limited.Record.Limits
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Sandboxes: []*agentv1.SandboxReport{limited, ended}})
	require.Equal(t, registry.Amounts{0, 700, 1 << 20}, reg.Used(time.Unix(1000, 0), "ns"))
	reg.SetLimits("ns", registry.Limits{registry.CPU: {Quota: "q", Hard: 1000}})
	require.NoError(t, f.Admit("ns", &sandboxv1.ResourceLimits{CpuMillis: 300}))
	require.Equal(t, fault.QuotaExceeded, fault.ReasonOf(f.Admit("ns", &sandboxv1.ResourceLimits{CpuMillis: 301})))
}

func TestTombstones(t *testing.T) {
	f, l, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Tombstones: []*agentv1.Tombstone{tombstone("t1")}})
	f.Delta("a", &agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{tombstone("t1"), tombstone("t2")}})
	require.Len(t, f.Tombstones(), 2)
	require.True(t, f.HasTombstone(identity.FenceOf(fence("t2", 1))))
	l.take()
	f.Delta("a", &agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{fence("t1", 1), fence("t3", 1)}})
	require.Equal(t, []string{"tombstones +0 -1"}, l.take())
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Tombstones: []*agentv1.Tombstone{tombstone("t4")}})
	require.Equal(t, []string{"tombstones +1 -1", "all a 0"}, l.take(), "a snapshot replaces all tombstones")
	require.False(t, f.HasTombstone(identity.FenceOf(fence("t2", 1))))
}

func TestAllReported(t *testing.T) {
	f, _, c := newFleet()
	require.True(t, f.AllReported(time.Minute))
	f.Joined(info(0), "10.0.0.1:1")
	require.False(t, f.AllReported(time.Minute))
	c.SetTime(c.Now().Add(time.Minute))
	require.True(t, f.AllReported(time.Minute), "a silent agent is waited for until the timeout")
	require.False(t, f.AllReported(time.Hour))
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5)})
	require.True(t, f.AllReported(time.Hour))
}

func TestReserveAndSweep(t *testing.T) {
	f, _, c := newFleet()
	request := func(uid string) registry.Request {
		return registry.Request{Fence: identity.Fence{SandboxUID: uid, Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}}
	}
	_, err := f.Reserve(request("u1"))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(1), Accepting: true})
	a, err := f.Reserve(request("u1"))
	require.NoError(t, err)
	require.Equal(t, "10.0.0.1:1", a.GetAgentAddress())
	require.Equal(t, "pod-a", a.GetAgentPod())
	_, err = f.Reserve(request("u2"))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
	for range 2 {
		f.Release(a.GetFence())
	}
	_, err = f.Reserve(request("u2"))
	require.NoError(t, err)
	_, w := f.Watch("ns", "p")
	defer w.Close()
	f.Sweep()
	<-w.Events()
	c.SetTime(c.Now().Add(time.Minute))
	f.Sweep()
	event := <-w.Events()
	require.False(t, event.GetAgent().GetReady())
	require.Equal(t, registry.ReasonHeartbeat, event.GetAgent().GetReason())
}

// Sweep publishes every change of reservations since the last sweep.
func TestSweepPublishesReservations(t *testing.T) {
	f, _, c := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Sandboxes: []*agentv1.SandboxReport{report("r", running, true)}})
	_, w := f.Watch("ns", "p")
	defer w.Close()
	// published sweeps and returns the allocated capacity that watchers receive; -1 if they receive nothing.
	published := func() int {
		t.Helper()
		f.Sweep()
		select {
		case e := <-w.Events():
			require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_AGENT, e.GetType())
			require.Len(t, e.GetSandboxes(), 1, "the event lists all sandboxes of the agent")
			return int(e.GetAgent().GetAllocated())
		default:
			return -1
		}
	}
	reserve := func(uid string) *agentv1.Fence {
		t.Helper()
		a, err := f.Reserve(registry.Request{Fence: identity.Fence{SandboxUID: uid, Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}})
		require.NoError(t, err)
		return a.GetFence()
	}
	require.Equal(t, -1, published(), "nothing has changed")
	released := reserve("u1")
	require.Equal(t, 2, published())
	require.Equal(t, -1, published(), "published already")
	f.Release(released)
	require.Equal(t, 1, published(), "released")

	// A reservation that was published with a report is published again when it has expired.
	reserve("u2")
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("r", running, true)}})
	require.EqualValues(t, 2, (<-w.Events()).GetAgent().GetAllocated())
	require.Equal(t, -1, published())
	for range int(registry.DefaultReservation / (5 * time.Second)) {
		c.SetTime(c.Now().Add(5 * time.Second))
		f.Heartbeat("a")
	}
	require.Equal(t, 1, published(), "expired")
	require.Equal(t, -1, published())
}

// Slots are kept as agents report them. The next sweep publishes a change at the latest, without the agent's sandboxes.
func TestSweepPublishesSlots(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Slots: &agentv1.SlotStatus{Free: 3, Wanted: 5},
		Sandboxes: []*agentv1.SandboxReport{report("r", running, true)}})
	initial, w := f.Watch("ns", "p")
	defer w.Close()
	require.EqualValues(t, 3, initial[0].GetAgent().GetFreeSlots())
	require.EqualValues(t, 5, initial[0].GetAgent().GetWantedSlots())
	f.Sweep()
	f.Delta("a", &agentv1.AgentDelta{Slots: &agentv1.SlotStatus{Free: 2, Wanted: 4}})
	f.Delta("a", &agentv1.AgentDelta{Slots: &agentv1.SlotStatus{Free: 4, Wanted: 4}})
	require.Empty(t, w.Events(), "slots alone wait for the sweep")
	f.Sweep()
	e := <-w.Events()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, e.GetType())
	require.Empty(t, e.GetSandboxes())
	require.EqualValues(t, 4, e.GetAgent().GetFreeSlots())
	f.Sweep()
	require.Empty(t, w.Events(), "published already")

	// A change together with a sandbox is published with it; a change of a sandbox leaves slots as they are.
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("s", running, true)}, Slots: &agentv1.SlotStatus{Free: 3, Wanted: 3}})
	require.EqualValues(t, 3, (<-w.Events()).GetAgent().GetFreeSlots())
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("s", running, true)}})
	require.EqualValues(t, 3, (<-w.Events()).GetAgent().GetFreeSlots())
	f.Sweep()
	require.Empty(t, w.Events())

	// A change of readiness at the same time is published once, with all sandboxes of the agent.
	accepting := false
	f.Delta("a", &agentv1.AgentDelta{Accepting: &accepting, NotAcceptingReason: "Draining", Slots: &agentv1.SlotStatus{OffReason: "no fsopen"}})
	e = <-w.Events()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_AGENT, e.GetType())
	require.Len(t, e.GetSandboxes(), 2)
	require.Equal(t, "no fsopen", e.GetAgent().GetSlotsOffReason())
	f.Delta("a", &agentv1.AgentDelta{Apparmor: &agentv1.AppArmorStatus{OffReason: "no parser"}})
	e = <-w.Events()
	require.Equal(t, "no parser", e.GetAgent().GetApparmor().GetOffReason())
	changed := info(5)
	changed.UserNamespaces, changed.Pool = true, "another"
	f.Delta("a", &agentv1.AgentDelta{Info: changed})
	e = <-w.Events()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_AGENT, e.GetType())
	require.True(t, e.GetAgent().GetInfo().GetUserNamespaces())
	require.Equal(t, "p", e.GetAgent().GetInfo().GetPool(), "what the Pod says stays")
	f.Sweep()
	require.Empty(t, w.Events())

	// An agent of a version without slots reports none.
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true})
	agent, _ := f.Agent("a")
	require.Zero(t, agent.GetFreeSlots())
	require.Empty(t, agent.GetSlotsOffReason())
}

func TestPinnedImages(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	pulling := &agentv1.PinnedImage{Image: "x", State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING}
	ready := &agentv1.PinnedImage{Image: "x", State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY}
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Images: []string{"b", "a"},
		Sandboxes: []*agentv1.SandboxReport{report("r", running, true)}, PinnedImages: []*agentv1.PinnedImage{pulling}})
	require.Equal(t, []string{"a", "b"}, f.Images("a"))
	require.Empty(t, f.Images("unknown"))
	initial, w := f.Watch("ns", "p")
	defer w.Close()
	require.True(t, proto.Equal(pulling, initial[0].GetAgent().GetPinnedImages()[0]))
	f.Delta("a", &agentv1.AgentDelta{PinnedImages: &agentv1.PinnedImages{Images: []*agentv1.PinnedImage{ready}}})
	e := <-w.Events()
	require.Equal(t, allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, e.GetType())
	require.Empty(t, e.GetSandboxes(), "only the agent has changed")
	require.True(t, proto.Equal(ready, e.GetAgent().GetPinnedImages()[0]))
	f.Delta("a", &agentv1.AgentDelta{ImagesAdded: []string{"c"}})
	require.Len(t, (<-w.Events()).GetAgent().GetPinnedImages(), 1, "a delta without pinned images does not change them")
	f.Delta("a", &agentv1.AgentDelta{PinnedImages: &agentv1.PinnedImages{}})
	require.Empty(t, (<-w.Events()).GetAgent().GetPinnedImages())
}

// The registry receives slots from snapshots and deltas.
func TestPlacementFollowsSlots(t *testing.T) {
	f, _, _ := newFleet()
	for uid, free := range map[string]int32{"a": 0, "b": 1} {
		who := &agentv1.AgentInfo{PodUid: uid, PodName: "pod-" + uid, Namespace: "ns", Pool: "p", Capacity: 9}
		f.Joined(who, uid+":1")
		f.Snapshot(uid, &agentv1.AgentSnapshot{Info: who, Accepting: true, Slots: &agentv1.SlotStatus{Free: free, Wanted: 9}})
	}
	reserve := func(uid string) string {
		t.Helper()
		a, err := f.Reserve(registry.Request{Fence: identity.Fence{SandboxUID: uid, Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}})
		require.NoError(t, err)
		return a.GetFence().GetAgentUid()
	}
	require.Equal(t, "b", reserve("u1"), "it has the slot")
	require.Equal(t, "a", reserve("u2"), "the slot of b is reserved, and a is less loaded")
	f.Delta("b", &agentv1.AgentDelta{Slots: &agentv1.SlotStatus{Free: 5, Wanted: 5}})
	for i := range 3 {
		require.Equal(t, "b", reserve(fmt.Sprint("v", i)))
	}
	f.Delta("b", &agentv1.AgentDelta{Slots: &agentv1.SlotStatus{OffReason: "memory is short"}})
	require.Equal(t, "a", reserve("w"))
}

// Five sandboxes whose processes have ended filled an agent of five.
func TestEndedSandboxesHoldNoCapacity(t *testing.T) {
	f, _, _ := newFleet()
	f.Joined(info(0), "10.0.0.1:1")
	f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true})
	for i := range 5 {
		uid := fmt.Sprint("u", i)
		started, ended := report(uid, running, true), report(uid, stopped, true)
		started.Record.Spec.Ports, ended.Record.Spec.Ports = []int32{int32(80 + i)}, []int32{int32(80 + i)}
		f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{started}})
		f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{ended}})
	}
	agent, _ := f.Agent("a")
	require.Zero(t, agent.GetAllocated())
	for i := range 5 {
		_, err := f.Reserve(registry.Request{
			Fence: identity.Fence{SandboxUID: fmt.Sprint("v", i), Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}, Ports: []int32{int32(80 + i)},
		})
		require.NoError(t, err, "sandbox %d", i)
	}

	// Removing an ended sandbox must not take capacity for the time of the removal.
	removing := report("u0", agentv1.SandboxState_SANDBOX_STATE_TERMINATING, true)
	removing.FinishTime = timestamppb.New(time.Unix(2, 0))
	f.Delta("a", &agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{removing}})
	agent, _ = f.Agent("a")
	require.EqualValues(t, 5, agent.GetAllocated(), "the reservations alone")
	require.True(t, f.Reported(identity.FenceOf(fence("u1", 1))), "its record and logs are kept")
}
