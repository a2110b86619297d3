package fleet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watched is what the events of a watch add up to.
type watched struct {
	watch   *fleet.Watch
	agents  map[string]*allocatorv1.Agent
	reports map[identity.Fence]*agentv1.SandboxReport
}

func newWatched(f *fleet.Fleet) *watched {
	initial, w := f.Watch("", "")
	s := &watched{watch: w, agents: map[string]*allocatorv1.Agent{}, reports: map[identity.Fence]*agentv1.SandboxReport{}}
	for _, e := range initial {
		s.apply(e)
	}
	return s
}

func (w *watched) apply(e *allocatorv1.WatchAgentsResponse) {
	uid := e.GetAgent().GetInfo().GetPodUid()
	if e.GetType() != allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES {
		for f := range w.reports {
			if f.AgentUID == uid {
				delete(w.reports, f)
			}
		}
	}
	if e.GetType() == allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE {
		delete(w.agents, uid)
		return
	}
	w.agents[uid] = e.GetAgent()
	for _, r := range e.GetSandboxes() {
		key := identity.FenceOf(r.GetRecord().GetFence())
		w.reports[key] = r
		if r.GetState() == terminated {
			delete(w.reports, key)
		}
	}
}

// check compares what was watched with what the fleet says now. A sweep has published what time and reservations changed.
func (w *watched) check(t *rapid.T, f *fleet.Fleet) {
	f.Sweep()
	for len(w.watch.Events()) > 0 {
		w.apply(<-w.watch.Events())
	}
	seen := 0
	for _, a := range f.Agents("", "") {
		uid := a.GetInfo().GetPodUid()
		if a.GetReason() == registry.ReasonConnecting {
			continue // it is published with its first snapshot
		}
		seen++
		got := proto.CloneOf(w.agents[uid])
		require.NotNil(t, got, uid)
		got.LastHeartbeatTime = a.GetLastHeartbeatTime() // a heartbeat alone is not worth a message
		got.Address = a.GetAddress()
		require.True(t, proto.Equal(a, got), "%v was watched as %v", a, got)
	}
	require.Len(t, w.agents, seen, "an agent that left is no longer watched")
	for i := range 3 {
		for _, uid := range []string{"a", "b"} {
			key := identity.Fence{SandboxUID: fmt.Sprint("u", i), Attempt: 1, AgentUID: uid}
			require.Equal(t, f.Reported(key), w.reports[key] != nil, "%s", key)
		}
	}
}

// TestWatchAddsUpToTheFleet: after every history of snapshots, deltas, reservations and silence.
func TestWatchAddsUpToTheFleet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, _, c := newFleet()
		w := newWatched(f)
		uid := func(t *rapid.T) string { return rapid.SampledFrom([]string{"a", "b"}).Draw(t, "agent") }
		of := func(uid string) *agentv1.AgentInfo {
			i := info(3)
			i.PodUid, i.PodName = uid, "pod-"+uid
			return i
		}
		reports := func(t *rapid.T, uid string) (all []*agentv1.SandboxReport) {
			for i := range 3 {
				if rapid.Bool().Draw(t, "listed") {
					state := rapid.SampledFrom([]agentv1.SandboxState{running, stopped, failed, terminated}).Draw(t, "state")
					r := report(fmt.Sprint("u", i), state, rapid.Bool().Draw(t, "persisted"))
					r.Record.Fence.AgentUid = uid
					all = append(all, r)
				}
			}
			return all
		}
		slots := func(t *rapid.T) *agentv1.SlotStatus {
			return &agentv1.SlotStatus{Free: rapid.Int32Range(0, 3).Draw(t, "free"), Wanted: 3}
		}
		requests := 0
		t.Repeat(map[string]func(*rapid.T){
			"joined": func(t *rapid.T) { f.Joined(of(uid(t)), "10.0.0.1:1") },
			"left":   func(t *rapid.T) { f.Left(uid(t)) },
			"snapshot": func(t *rapid.T) {
				uid := uid(t)
				f.Snapshot(uid, &agentv1.AgentSnapshot{
					Info: of(uid), Accepting: rapid.Bool().Draw(t, "accepting"), Sandboxes: reports(t, uid), Slots: slots(t), Images: []string{"x"},
				})
			},
			"sandboxes": func(t *rapid.T) { uid := uid(t); f.Delta(uid, &agentv1.AgentDelta{Sandboxes: reports(t, uid)}) },
			"slots":     func(t *rapid.T) { f.Delta(uid(t), &agentv1.AgentDelta{Slots: slots(t)}) },
			"drain": func(t *rapid.T) {
				f.Delta(uid(t), &agentv1.AgentDelta{Accepting: proto.Bool(false), NotAcceptingReason: "Draining"})
			},
			"image":     func(t *rapid.T) { f.Delta(uid(t), &agentv1.AgentDelta{ImagesAdded: []string{"y"}}) },
			"heartbeat": func(t *rapid.T) { f.Heartbeat(uid(t)) },
			"reserve": func(t *rapid.T) {
				requests++
				_, _ = f.Reserve(registry.Request{ // a refusal changes nothing
					Fence: identity.Fence{SandboxUID: fmt.Sprint("r", requests), Attempt: 1}, Pool: registry.Pool{Namespace: "ns", Name: "p"}, Image: "x",
				})
			},
			"time": func(t *rapid.T) {
				c.SetTime(c.Now().Add(time.Duration(rapid.IntRange(0, 12).Draw(t, "seconds")) * time.Second))
			},
			"": func(t *rapid.T) { w.check(t, f) },
		})
	})
}
