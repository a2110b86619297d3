package registry_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
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
	return registry.Request{Key: registry.Key{SandboxUID: uid, Attempt: 1}, Pool: pool, Image: busybox, Ports: ports}
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
				Sandboxes: []registry.Sandbox{{Key: registry.Key{SandboxUID: "1", Attempt: 1}}}}},
			request: request("x"), want: "b",
		},
		"of equals the first uid":          {agents: []registry.Snapshot{snapshot("b", 5), snapshot("a", 5)}, request: request("x"), want: "a"},
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
			request: registry.Request{Key: registry.Key{SandboxUID: "x", Attempt: 1}, Pool: pool, Exclude: []string{"a"}}, reason: fault.NoCapacity,
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
	r.ApplyDelta(epoch, registry.Delta{UID: "a", Sandboxes: []registry.Sandbox{{Key: registry.Key{SandboxUID: "kept", Attempt: 1}}}})

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

// model is the naive registry: every question is answered by looking at everything.
type model struct {
	now      time.Time
	agents   map[string]*modelAgent
	reserved map[registry.Key]modelReservation
}

type modelAgent struct {
	capacity  int
	accepting bool
	image     bool
	heard     time.Time
	reported  map[registry.Key][]int32
}

type modelReservation struct {
	agent string
	ports []int32
	until time.Time
}

func (m *model) held(uid string) map[registry.Key][]int32 {
	out := map[registry.Key][]int32{}
	for k, r := range m.reserved {
		if r.agent == uid && m.now.Before(r.until) {
			out[k] = r.ports
		}
	}
	for k, ports := range m.agents[uid].reported {
		out[k] = ports
	}
	return out
}

// best is the uid and score of the best agent, "" if there is none.
func (m *model) best(ports []int32) (string, int) {
	uid, best := "", 1<<30
	for id, a := range m.agents {
		held := m.held(id)
		if !a.accepting || m.now.Sub(a.heard) > registry.DefaultHeartbeatTimeout || len(held) >= a.capacity {
			continue
		}
		conflict := false
		for _, taken := range held {
			for _, p := range taken {
				for _, q := range ports {
					conflict = conflict || p == q
				}
			}
		}
		score := len(held)
		if !a.image {
			score += 1000
		}
		if !conflict && (score < best || score == best && id < uid) {
			uid, best = id, score
		}
	}
	return uid, best
}

func TestRegistryEqualsTheNaiveModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := registry.New(0, 0)
		m := &model{now: epoch, agents: map[string]*modelAgent{}, reserved: map[registry.Key]modelReservation{}}
		uids := rapid.SampledFrom([]string{"a", "b", "c"})
		keys := rapid.Custom(func(t *rapid.T) registry.Key {
			return registry.Key{SandboxUID: rapid.SampledFrom([]string{"1", "2", "3", "4", "5"}).Draw(t, "uid"), Attempt: rapid.Int64Range(1, 2).Draw(t, "attempt")}
		})
		portsOf := rapid.SliceOfNDistinct(rapid.Int32Range(80, 82), 0, 2, rapid.ID[int32])
		t.Repeat(map[string]func(*rapid.T){
			"snapshot": func(t *rapid.T) {
				uid := uids.Draw(t, "agent")
				a := &modelAgent{capacity: rapid.IntRange(0, 3).Draw(t, "capacity"), accepting: rapid.Bool().Draw(t, "accepting"),
					image: rapid.Bool().Draw(t, "image"), heard: m.now, reported: map[registry.Key][]int32{}}
				s := snapshot(uid, a.capacity)
				s.Accepting = a.accepting
				if a.image {
					s.Images = []string{busybox}
				}
				// An agent tells of sandboxes that it has already, and of the reservations on it that it has taken in.
				if old := m.agents[uid]; old != nil {
					for k, ports := range m.held(uid) {
						if rapid.Bool().Draw(t, "listed") {
							a.reported[k] = ports
							s.Sandboxes = append(s.Sandboxes, registry.Sandbox{Key: k, Ports: ports})
							delete(m.reserved, k)
						}
					}
				}
				m.agents[uid] = a
				r.ApplySnapshot(m.now, s)
			},
			"gone": func(t *rapid.T) {
				uid := uids.Draw(t, "agent")
				if a := m.agents[uid]; a != nil {
					for k := range m.held(uid) {
						delete(a.reported, k)
						if m.reserved[k].agent == uid {
							delete(m.reserved, k)
						}
						r.ApplyDelta(m.now, registry.Delta{UID: uid, Sandboxes: []registry.Sandbox{{Key: k, Gone: true}}})
					}
					a.heard = m.now
					r.Heartbeat(m.now, uid)
				}
			},
			"leave": func(t *rapid.T) {
				uid := uids.Draw(t, "agent")
				delete(m.agents, uid)
				for k, res := range m.reserved {
					if res.agent == uid {
						delete(m.reserved, k)
					}
				}
				r.Leave(uid)
			},
			"release": func(t *rapid.T) {
				k := keys.Draw(t, "key")
				if res, ok := m.reserved[k]; ok {
					r.Release(m.now, k, res.agent)
					r.Release(m.now, k, res.agent)
					delete(m.reserved, k)
				}
			},
			"time": func(t *rapid.T) {
				m.now = m.now.Add(time.Duration(rapid.IntRange(0, 12).Draw(t, "seconds")) * time.Second)
			},
			"allocate": func(t *rapid.T) {
				k := keys.Draw(t, "key")
				for uid := range m.agents { // a key that is reported anywhere is used up
					if _, ok := m.agents[uid].reported[k]; ok {
						return
					}
				}
				req := registry.Request{Key: k, Pool: pool, Image: busybox, Ports: portsOf.Draw(t, "ports")}
				if res, ok := m.reserved[k]; ok && m.now.Before(res.until) {
					got, err := r.Allocate(m.now, req)
					require.NoError(t, err)
					require.Equal(t, res.agent, got, "the same key has the same agent")
					res.until = m.now.Add(registry.DefaultReservation)
					m.reserved[k] = res
					return
				}
				delete(m.reserved, k)
				want, _ := m.best(req.Ports)
				got, err := r.Allocate(m.now, req)
				require.Equal(t, want, got)
				require.Equal(t, want == "", err != nil)
				if want != "" {
					m.reserved[k] = modelReservation{agent: want, ports: req.Ports, until: m.now.Add(registry.DefaultReservation)}
				}
			},
			"": func(t *rapid.T) {
				views := r.Agents(m.now)
				require.Len(t, views, len(m.agents))
				for _, v := range views {
					a := m.agents[v.UID]
					require.Equal(t, len(m.held(v.UID)), v.Allocated, "places of %s", v.UID)
					require.Equal(t, a.accepting && m.now.Sub(a.heard) <= registry.DefaultHeartbeatTimeout, v.Ready)
				}
			},
		})
	})
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
				r.Release(epoch, registry.Key{SandboxUID: fmt.Sprint("nobody", i), Attempt: 1}, uid)
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

func BenchmarkAllocate(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := registry.New(0, 0)
			for i := range n {
				s := snapshot(fmt.Sprintf("agent-%05d", i), 50, busybox, "docker.io/library/python:3.13")
				for j := range 5 + i%3 {
					s.Sandboxes = append(s.Sandboxes, registry.Sandbox{Key: registry.Key{SandboxUID: fmt.Sprint(i, "-", j), Attempt: 1}, Ports: []int32{int32(8000 + j)}})
				}
				r.ApplySnapshot(epoch, s)
			}
			req := request("bench", 8080)
			b.ReportAllocs()
			for b.Loop() {
				uid, err := r.Allocate(epoch, req)
				if err != nil {
					b.Fatal(err)
				}
				r.Release(epoch, req.Key, uid)
			}
		})
	}
}
