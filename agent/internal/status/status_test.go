package status_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T) *status.Hub {
	t.Helper()
	h := status.New(&agentv1.AgentInfo{PodUid: "me", Capacity: 5})
	h.Open()
	return h
}

func watch(t *testing.T, h *status.Hub) *status.Watcher {
	t.Helper()
	w, err := h.Watch()
	require.NoError(t, err)
	t.Cleanup(func() { h.Unwatch(w) })
	return w
}

func report(uid string, attempt int64, state agentv1.SandboxState) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{
		Record: &agentv1.SandboxRecord{Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: "me"}}, State: state,
		ContainerId: fmt.Sprintf("%s-%d", uid, attempt),
	}
}

func tombstone(uid string, attempt int64) *agentv1.Tombstone {
	return &agentv1.Tombstone{Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: "me"}}
}

const (
	running    = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	stopped    = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	terminated = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

// TestSnapshotFollowsDeltas publishes every kind of change and compares the snapshot after each.
func TestSnapshotFollowsDeltas(t *testing.T) {
	h := open(t)
	want := &agentv1.AgentSnapshot{Info: &agentv1.AgentInfo{PodUid: "me", Capacity: 5}}
	for _, step := range []struct {
		name   string
		change func()
		expect func()
	}{
		{"nothing", func() {}, func() {}},
		{"a sandbox", func() {
			h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("b", 1, running)}})
		}, func() { want.Sandboxes = []*agentv1.SandboxReport{report("b", 1, running)} }},
		{"another, sorted before it", func() {
			h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("a", 2, running)}})
		}, func() {
			want.Sandboxes = []*agentv1.SandboxReport{report("a", 2, running), report("b", 1, running)}
		}},
		{"a changed one", func() {
			h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("a", 2, stopped)}})
		}, func() { want.Sandboxes[0] = report("a", 2, stopped) }},
		{"an older attempt gone", func() {
			h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("a", 1, terminated)}})
		}, func() {}},
		{"one gone", func() {
			h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("a", 2, terminated)}})
		}, func() { want.Sandboxes = want.GetSandboxes()[1:] }},
		{"images", func() { h.SetImages([]string{"a", "c"}) }, func() { want.Images = []string{"a", "c"} }},
		{"other images", func() { h.SetImages([]string{"b", "c"}) }, func() { want.Images = []string{"b", "c"} }},
		{"accepting", func() { h.SetAccepting(true, "") }, func() { want.Accepting = true }},
		{"not accepting", func() { h.SetAccepting(false, "Draining") }, func() { want.Accepting, want.NotAcceptingReason = false, "Draining" }},
		{"slots", func() { h.SetSlots(&agentv1.SlotStatus{Free: 2}) }, func() { want.Slots = &agentv1.SlotStatus{Free: 2} }},
		{"pinned images", func() {
			h.SetPinnedImages([]*agentv1.PinnedImage{{Image: "x"}})
		}, func() { want.PinnedImages = []*agentv1.PinnedImage{{Image: "x"}} }},
		{"apparmor", func() {
			require.True(t, h.SetAppArmor(&agentv1.AppArmorStatus{OffReason: "x"}))
			require.False(t, h.SetAppArmor(&agentv1.AppArmorStatus{OffReason: "x"}))
		}, func() { want.Apparmor = &agentv1.AppArmorStatus{OffReason: "x"} }},
		{"user namespaces", func() {
			before := h.Snapshot().GetInfo()
			require.True(t, h.SetUserNamespaces(true, ""))
			require.False(t, h.SetUserNamespaces(true, ""))
			require.False(t, before.GetUserNamespaces(), "a snapshot was changed")
		}, func() { want.Info = &agentv1.AgentInfo{PodUid: "me", Capacity: 5, UserNamespaces: true} }},
		{"no pinned images", func() { h.SetPinnedImages(nil) }, func() { want.PinnedImages = nil }},
		{"a tombstone", func() {
			h.Publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{tombstone("b", 1)}})
		}, func() { want.Tombstones = []*agentv1.Tombstone{tombstone("b", 1)} }},
		{"replaced by a later attempt's", func() {
			h.Publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{tombstone("b", 2)}, TombstonesRemoved: []*agentv1.Fence{tombstone("b", 1).GetFence()}})
		}, func() { want.Tombstones = []*agentv1.Tombstone{tombstone("b", 2)} }},
		{"replaced for the same attempt", func() {
			next := tombstone("b", 2)
			next.RequestId = "r"
			h.Publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{next}})
		}, func() { want.Tombstones[0].RequestId = "r" }},
		{"forgotten", func() {
			h.Publish(&agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{tombstone("b", 2).GetFence()}})
		}, func() { want.Tombstones = nil }},
	} {
		step.change()
		step.expect()
		require.True(t, proto.Equal(want, h.Snapshot()), "%s: got %v, want %v", step.name, h.Snapshot(), want)
		require.True(t, proto.Equal(want, watch(t, h).Snapshot), step.name)
	}
}

func TestUnchangedValuesAreNotSent(t *testing.T) {
	h := open(t)
	w := watch(t, h)
	for range 2 {
		h.SetImages([]string{"a"})
		h.SetAccepting(true, "")
		h.SetSlots(&agentv1.SlotStatus{Free: 1})
		h.SetPinnedImages([]*agentv1.PinnedImage{{Image: "a"}})
	}
	require.Len(t, w.Deltas(), 4)
}

// TestSnapshotsAreNotModified holds a snapshot while everything changes.
func TestSnapshotsAreNotModified(t *testing.T) {
	h := open(t)
	h.SetImages([]string{"a", "b", "c"})
	h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("u", 1, running)}})
	w := watch(t, h)
	before := proto.Clone(w.Snapshot)
	h.SetImages([]string{"b", "d"})
	h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("u", 1, terminated)}})
	require.True(t, proto.Equal(before, w.Snapshot))
}

func TestWatchesAreRefusedWhileClosed(t *testing.T) {
	h := status.New(nil)
	_, err := h.Watch()
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
	h.Open()
	w := watch(t, h)
	closing := errors.New("stopping")
	h.Close(closing)
	_, more := <-w.Deltas()
	require.False(t, more)
	require.ErrorIs(t, w.Err(), closing)
	_, err = h.Watch()
	require.ErrorIs(t, err, closing)
	h.SetAccepting(true, "")
	require.True(t, h.Snapshot().GetAccepting(), "changes count while no watch can begin")
}

func TestSlowWatcherIsEnded(t *testing.T) {
	h := open(t)
	slow := watch(t, h)
	const changes = 5000
	for i := range changes {
		h.SetImages([]string{fmt.Sprintf("image-%05d", i)})
	}
	n := 0
	for range slow.Deltas() {
		n++
	}
	require.Positive(t, n)
	require.Less(t, n, changes)
	require.True(t, errdefs.IsResourceExhausted(slow.Err()))
	require.Equal(t, fault.Overloaded, fault.ReasonOf(slow.Err()))
	require.Equal(t, []string{fmt.Sprintf("image-%05d", changes-1)}, watch(t, h).Snapshot.GetImages())
}

// TestConcurrentWatchersMissNothing applies each watcher's deltas to its snapshot; all arrive at the final state.
func TestConcurrentWatchersMissNothing(t *testing.T) {
	h := open(t)
	const publishers, each = 4, 50
	var publishing, watching sync.WaitGroup
	results := make(chan int, publishers)
	for p := range publishers {
		w, err := h.Watch() // while the publishers before it run
		require.NoError(t, err)
		watching.Go(func() {
			known := map[string]bool{}
			for _, r := range w.Snapshot.GetSandboxes() {
				known[r.GetContainerId()] = true
			}
			for d := range w.Deltas() {
				for _, r := range d.GetSandboxes() {
					known[r.GetContainerId()] = true
				}
			}
			results <- len(known)
		})
		publishing.Go(func() {
			for i := range each {
				h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report(fmt.Sprintf("u%d-%d", p, i), 1, running)}})
			}
		})
	}
	publishing.Wait()
	h.Close(errors.New("done"))
	watching.Wait()
	close(results)
	for n := range results {
		require.Equal(t, publishers*each, n)
	}
}

func TestMetrics(t *testing.T) {
	h := open(t)
	h.SetImages([]string{"a", "b"})
	h.SetAccepting(true, "")
	h.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report("a", 1, running), report("b", 1, running), report("c", 1, stopped)}})
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(h))
	families, err := registry.Gather()
	require.NoError(t, err)
	got := map[string]float64{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			name := family.GetName()
			for _, l := range m.GetLabel() {
				name += "/" + l.GetValue()
			}
			got[name] = m.GetGauge().GetValue()
		}
	}
	require.Equal(t, map[string]float64{
		"fastsandbox_agent_accepting": 1, "fastsandbox_agent_capacity_sandboxes": 5, "fastsandbox_agent_images": 2,
		"fastsandbox_agent_sandboxes/creating": 0, "fastsandbox_agent_sandboxes/failed": 0, "fastsandbox_agent_sandboxes/running": 2,
		"fastsandbox_agent_sandboxes/stopped": 1, "fastsandbox_agent_sandboxes/terminating": 0,
	}, got)
}

func TestUnwatchEndsTheWatch(t *testing.T) {
	h := open(t)
	w, err := h.Watch()
	require.NoError(t, err)
	h.SetImages([]string{"a"})
	require.Len(t, w.Deltas(), 1)
	h.Unwatch(w)
	h.Unwatch(w) // safe to repeat
	h.SetImages([]string{"b"})
	require.Len(t, w.Deltas(), 1, "nothing is sent after Unwatch")
	h.Close(errors.New("stopping"))
	_, more := <-w.Deltas()
	require.True(t, more, "Close does not touch a watch that has ended")
}

// TestCloseReplacesTheRefusal closes a Hub that is closed already, as an agent does whose runtime fails in another way.
func TestCloseReplacesTheRefusal(t *testing.T) {
	h := status.New(nil)
	for _, reason := range []error{errors.New("first"), errors.New("second")} {
		h.Close(reason)
		_, err := h.Watch()
		require.ErrorIs(t, err, reason)
	}
	h.Open()
	watch(t, h)
}

// TestCombinedDelta applies a delta that carries several changes.
func TestCombinedDelta(t *testing.T) {
	h := open(t)
	h.SetImages([]string{"a", "b"})
	accepting := true
	h.Publish(&agentv1.AgentDelta{
		Sandboxes:   []*agentv1.SandboxReport{report("u", 1, running), report("v", 1, running), report("u", 1, terminated)},
		ImagesAdded: []string{"c", "b"}, ImagesRemoved: []string{"a"}, Accepting: &accepting,
		Slots: &agentv1.SlotStatus{Free: 1}, PinnedImages: &agentv1.PinnedImages{Images: []*agentv1.PinnedImage{{Image: "c"}}},
	})
	want := &agentv1.AgentSnapshot{
		Info: &agentv1.AgentInfo{PodUid: "me", Capacity: 5}, Sandboxes: []*agentv1.SandboxReport{report("v", 1, running)}, Images: []string{"b", "c"},
		Accepting: true, Slots: &agentv1.SlotStatus{Free: 1}, PinnedImages: []*agentv1.PinnedImage{{Image: "c"}},
	}
	require.True(t, proto.Equal(want, h.Snapshot()), "%v", h.Snapshot())
}
