package registry_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// history drives two registries and the model through the same random events.
type history struct {
	m         *model
	twins     [2]*registry.Registry
	uids      *rapid.Generator[string]
	keys      *rapid.Generator[identity.Fence]
	sandboxes *rapid.Generator[registry.Sandbox]
}

// newHistory returns an empty history of so many agents and sandboxes at the most. The fewer there are, the more often a
// sandbox has allocations on several agents.
func newHistory(agents, sandboxes int) *history {
	h := &history{m: newModel(), twins: [2]*registry.Registry{registry.New(0, 0), registry.New(0, 0)}}
	h.uids = rapid.SampledFrom([]string{"a", "b", "c", "d", "e"}[:agents])
	h.keys = rapid.Custom(func(t *rapid.T) identity.Fence {
		n := rapid.IntRange(0, sandboxes-1).Draw(t, "sandbox")
		return identity.Fence{SandboxUID: fmt.Sprint(n / 2), Attempt: int64(1 + n%2)}
	})
	h.sandboxes = rapid.Custom(func(t *rapid.T) registry.Sandbox {
		return registry.Sandbox{Fence: h.keys.Draw(t, "key"), Ports: somePorts.Draw(t, "ports"), Demand: someDemand.Draw(t, "demand"), Ended: rapid.IntRange(0, 2).Draw(t, "gone") == 0}
	})
	return h
}

var (
	somePools  = rapid.SampledFrom([]registry.Pool{pool, pool, pool, pool, {Namespace: "other", Name: "default"}})
	someImages = rapid.SliceOfN(rapid.SampledFrom([]string{"i", "j", "k"}), 0, 3)
	someSpaces = rapid.SampledFrom([]string{pool.Namespace, "other"})
	someDemand = rapid.Custom(func(t *rapid.T) registry.Demand {
		return registry.Demand{CPU: rapid.Int64Range(0, 3).Draw(t, "cpu"), Memory: rapid.Int64Range(0, 3).Draw(t, "memory")}
	})
	somePorts = rapid.SliceOfNDistinct(rapid.Int32Range(80, 83), 0, 2, rapid.ID[int32])
)

func (h *history) both(f func(*registry.Registry)) {
	for _, r := range h.twins {
		f(r)
	}
}

func (h *history) snapshot(t *rapid.T) {
	s := registry.Snapshot{
		UID: h.uids.Draw(t, "agent"), Pool: somePools.Draw(t, "pool"), Capacity: rapid.IntRange(0, 5).Draw(t, "capacity"),
		FreeSlots: rapid.IntRange(0, 3).Draw(t, "slots"), ReservedPorts: somePorts.Draw(t, "reserved"),
		Sandboxes: rapid.SliceOfN(h.sandboxes, 0, 3).Draw(t, "sandboxes"), Images: someImages.Draw(t, "images"),
		Accepting: rapid.IntRange(0, 4).Draw(t, "accepting") > 0,
	}
	if !s.Accepting {
		s.Reason = "Draining"
	}
	h.m.snapshot(s)
	h.both(func(r *registry.Registry) { r.ApplySnapshot(h.m.now, s) })
}

func (h *history) delta(t *rapid.T) {
	d := registry.Delta{
		UID: h.uids.Draw(t, "agent"), Sandboxes: rapid.SliceOfN(h.sandboxes, 0, 3).Draw(t, "sandboxes"),
		ImagesAdded: someImages.Draw(t, "added"), ImagesRemoved: someImages.Draw(t, "removed"),
	}
	if rapid.Bool().Draw(t, "slots reported") {
		d.FreeSlots = new(rapid.IntRange(0, 3).Draw(t, "slots"))
	}
	if rapid.IntRange(0, 3).Draw(t, "acceptance reported") == 0 {
		d.Accepting = new(rapid.Bool().Draw(t, "accepting"))
		if !*d.Accepting {
			d.Reason = "Draining"
		}
	}
	known := h.m.delta(d)
	h.both(func(r *registry.Registry) { require.Equal(t, known, r.ApplyDelta(h.m.now, d)) })
}

// confirm has an agent report what is reserved on it, as agents do.
func (h *history) confirm(t *rapid.T) {
	d := registry.Delta{UID: h.uids.Draw(t, "agent")}
	if a := h.m.agents[d.UID]; a != nil {
		for _, k := range slices.SortedFunc(maps.Keys(a.allocations), func(a, b identity.Fence) int {
			return 2*strings.Compare(a.SandboxUID, b.SandboxUID) + int(a.Attempt-b.Attempt)
		}) {
			if a.allocations[k].reserved && rapid.Bool().Draw(t, "confirmed") {
				d.Sandboxes = append(d.Sandboxes, registry.Sandbox{Fence: k, Ports: a.allocations[k].ports})
			}
		}
	}
	h.m.delta(d)
	h.both(func(r *registry.Registry) { r.ApplyDelta(h.m.now, d) })
}

func (h *history) release(t *rapid.T) {
	k, uid := h.keys.Draw(t, "key"), rapid.SampledFrom([]string{"", "a", "b", "c", "d", "e"}).Draw(t, "agent")
	h.m.release(k, uid)
	h.both(func(r *registry.Registry) {
		r.Release(h.m.now, identity.Fence{SandboxUID: k.SandboxUID, Attempt: k.Attempt, AgentUID: uid})
	})
}

func (h *history) allocate(t *rapid.T) {
	req := registry.Request{
		Fence: h.keys.Draw(t, "key"), Pool: somePools.Draw(t, "pool"), Image: rapid.SampledFrom([]string{"i", "j", "k", "none"}).Draw(t, "image"),
		Ports: somePorts.Draw(t, "ports"), Exclude: rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "unknown"}), 0, 2).Draw(t, "exclude"),
		Demand: someDemand.Draw(t, "demand"), New: rapid.Bool().Draw(t, "new"),
	}
	first, err := h.twins[0].Allocate(h.m.now, req)
	second, err2 := h.twins[1].Allocate(h.m.now, req)
	require.Equal(t, first, second, "the same history makes the same choice")
	require.Equal(t, err == nil, err2 == nil)
	h.m.allocate(t, req, first, err)
}

// quotas changes the limits of a namespace; most of the time there are none.
func (h *history) quotas(t *rapid.T) {
	var limits registry.Limits
	for i := range limits {
		if rapid.IntRange(0, 3).Draw(t, "limited") == 0 {
			limits[i] = &registry.Limit{Quota: "q", Hard: rapid.Int64Range(0, 8).Draw(t, "hard")}
		}
	}
	namespace := someSpaces.Draw(t, "namespace")
	h.m.limits[namespace] = limits
	h.both(func(r *registry.Registry) { r.SetLimits(namespace, limits) })
}

// show makes a sandbox visible; hide ends that.
func (h *history) show(t *rapid.T) {
	namespace, uid := someSpaces.Draw(t, "namespace"), h.keys.Draw(t, "key").SandboxUID
	h.m.shown[namespace]++
	delete(h.m.creating, uid)
	h.both(func(r *registry.Registry) { r.Shown(namespace, uid) })
}

func (h *history) hide(t *rapid.T) {
	namespace := someSpaces.Draw(t, "namespace")
	if h.m.shown[namespace] > 0 {
		h.m.shown[namespace]--
		h.both(func(r *registry.Registry) { r.Hidden(namespace) })
	}
}

func (h *history) endCreate(t *rapid.T) {
	uid := h.keys.Draw(t, "key").SandboxUID
	delete(h.m.creating, uid)
	h.both(func(r *registry.Registry) { r.EndCreate(uid) })
}

func TestRegistryEqualsTheNaiveModel(t *testing.T) {
	for name, size := range map[string][2]int{"many": {5, 16}, "few": {2, 2}} {
		t.Run(name, func(t *testing.T) { equalsTheModel(t, size[0], size[1]) })
	}
}

func equalsTheModel(t *testing.T, agents, sandboxes int) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHistory(agents, sandboxes)
		on := func(what string, f func(uid string)) func(*rapid.T) {
			return func(t *rapid.T) {
				f(h.uids.Draw(t, what))
			}
		}
		for range 4 {
			h.snapshot(t)
		}
		t.Repeat(map[string]func(*rapid.T){
			"quotas": h.quotas, "show": h.show, "hide": h.hide, "end create": h.endCreate, "end creates": h.endCreate,
			"snapshot": h.snapshot, "delta": h.delta, "confirm": h.confirm, "release": h.release,
			"allocate": h.allocate, "allocate more": h.allocate, "allocate most": h.allocate,
			"join": func(t *rapid.T) {
				uid, in := h.uids.Draw(t, "agent"), somePools.Draw(t, "pool")
				h.m.join(uid, in)
				h.both(func(r *registry.Registry) { r.Join(uid, in) })
			},
			"leave": on("leaving", func(uid string) {
				h.m.leave(uid)
				h.both(func(r *registry.Registry) { r.Leave(uid) })
			}),
			"heartbeat": on("heartbeat from", func(uid string) {
				h.m.heartbeat(uid)
				h.both(func(r *registry.Registry) { r.Heartbeat(h.m.now, uid) })
			}),
			"heartbeats": func(*rapid.T) {
				for uid := range h.m.agents {
					h.m.heartbeat(uid)
					h.both(func(r *registry.Registry) { r.Heartbeat(h.m.now, uid) })
				}
			},
			"time": func(t *rapid.T) {
				h.m.pass(time.Duration(rapid.SampledFrom([]int{0, 1, 2, 5, 10, 12}).Draw(t, "seconds")) * time.Second)
			},
			"": func(t *rapid.T) {
				h.both(func(r *registry.Registry) {
					h.m.compare(t, r.Agents(h.m.now))
					for _, namespace := range []string{pool.Namespace, "other"} {
						require.Equal(t, h.m.used(namespace), r.Used(h.m.now, namespace), namespace)
					}
				})
			},
		})
	})
}
