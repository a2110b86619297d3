package registry_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

const (
	benchImages   = 200 // in total
	benchCached   = 50  // on an agent
	benchPorts    = 16  // that requests ask for
	benchReported = 8   // sandboxes that an agent reports from the start
	benchWindow   = 2   // reservations for each agent that live at a time
	benchCapacity = 50
)

// bench is a registry with agents that are partly loaded, and a ring of requests that come and go.
type bench struct {
	r        *registry.Registry
	rnd      *rand.Rand
	now      time.Time
	requests []registry.Request // as many again as there are live ones
	agents   []string           // where a request was placed
	next     int
	change   func(*registry.Request) // of each request; nil for none
}

func image(i int) string { return fmt.Sprintf("docker.io/library/image-%03d:latest", i) }

func uid(i int) string { return fmt.Sprintf("%08x-0000-4000-8000-%012x", uint32(i)*2654435761, i) }

// newBench makes a registry of n agents, and gives change their first word to change.
func newBench(n int, change func(i int, s *registry.Snapshot)) *bench {
	b := &bench{r: registry.New(0, 0), rnd: rand.New(rand.NewPCG(uint64(n), 7)), now: epoch}
	for i := range n {
		s := registry.Snapshot{UID: uid(i), Pool: pool, Capacity: benchCapacity, FreeSlots: 4, Accepting: true, ReservedPorts: []int32{5758}}
		for _, j := range b.rnd.Perm(benchImages)[:benchCached] {
			s.Images = append(s.Images, image(j))
		}
		ports := b.rnd.Perm(benchPorts)
		for j := range benchReported - 1 + b.rnd.IntN(3) {
			sb := registry.Sandbox{Fence: identity.Fence{SandboxUID: uid(1<<30 + i*16 + j), Attempt: 1}}
			if j%2 == 0 {
				sb.Ports = []int32{int32(8000 + ports[j])}
			}
			s.Sandboxes = append(s.Sandboxes, sb)
		}
		if change != nil {
			change(i, &s)
		}
		b.r.ApplySnapshot(b.now, s)
	}
	return b
}

// fill draws requests, half of them with a port and most of them for a few images, and allocates the first half of them.
func (b *bench) fill(tb testing.TB, n int) *bench {
	zipf := rand.NewZipf(b.rnd, 1.2, 4, benchImages-1)
	for i := range 2 * n * benchWindow {
		req := registry.Request{Fence: identity.Fence{SandboxUID: uid(i), Attempt: 1}, Pool: pool, Image: image(int(zipf.Uint64()))}
		if i%2 == 0 {
			req.Ports = []int32{int32(8000 + b.rnd.IntN(benchPorts))}
		}
		if b.change != nil {
			b.change(&req)
		}
		b.requests = append(b.requests, req)
	}
	b.agents = make([]string, len(b.requests))
	for range n * benchWindow {
		b.allocate(tb)
	}
	runtime.GC() // of what was needed to get here
	return b
}

func (b *bench) allocate(tb testing.TB) {
	at, err := b.r.Allocate(b.now, b.requests[b.next])
	if err != nil {
		tb.Fatal(err)
	}
	b.agents[b.next] = at
	b.next = (b.next + 1) % len(b.requests)
}

// oldest is the number of the request that was placed the longest ago.
func (b *bench) oldest() int { return (b.next + len(b.requests)/2) % len(b.requests) }

func sizes(b *testing.B, sizes []int, f func(b *testing.B, n int)) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("agents=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			f(b, n)
		})
	}
}

var allSizes = []int{100, 1000, 10000, 100000}

func (b *bench) release(request int) {
	b.r.Release(b.now, on(b.requests[request], b.agents[request]))
}

// BenchmarkAllocate is the success path in a steady state: capacity is reserved, after as many of the oldest reservations
// were released, which does not count.
func BenchmarkAllocate(b *testing.B) {
	sizes(b, allSizes, func(b *testing.B, n int) {
		w := newBench(n, nil).fill(b, n)
		room := 0
		for b.Loop() {
			if room == 0 {
				b.StopTimer()
				for oldest := w.oldest(); room < min(n, 1000); room++ {
					w.release((oldest + room) % len(w.requests))
				}
				b.StartTimer()
			}
			w.allocate(b)
			w.now = w.now.Add(time.Microsecond)
			room--
		}
	})
}

// BenchmarkQuota is BenchmarkTurnover at 1,000 agents with creates that count, and with a quota that they do not reach.
func BenchmarkQuota(b *testing.B) {
	for name, limits := range map[string]registry.Limits{"none": {}, "three limits": limits(1<<40, 1<<40, 1<<40)} {
		b.Run(name, func(b *testing.B) {
			w := newBench(1000, nil)
			w.r.SetLimits(pool.Namespace, limits)
			w.change = func(req *registry.Request) { req.New, req.Demand = true, registry.Demand{CPU: 100, Memory: 1 << 20} }
			w.fill(b, 1000)
			b.ReportAllocs()
			for b.Loop() {
				oldest := w.oldest()
				w.release(oldest)
				w.r.EndCreate(w.requests[oldest].Fence.SandboxUID)
				w.allocate(b)
				w.now = w.now.Add(time.Microsecond)
			}
		})
	}
}

// BenchmarkTurnover is one reservation, and the release of the oldest one: of all memory, what
// was touched the longest ago.
func BenchmarkTurnover(b *testing.B) {
	sizes(b, allSizes, func(b *testing.B, n int) {
		w := newBench(n, nil).fill(b, n)
		for b.Loop() {
			w.release(w.oldest())
			w.allocate(b)
			w.now = w.now.Add(time.Microsecond)
		}
	})
}

// BenchmarkLife is a reservation that is reported, and whose end is reported, with a count of slots each time.
func BenchmarkLife(b *testing.B) {
	sizes(b, allSizes, func(b *testing.B, n int) {
		w := newBench(n, nil).fill(b, n)
		sandboxes, slots := make([]registry.Sandbox, 1), 4
		for b.Loop() {
			old := w.oldest()
			d := registry.Delta{UID: w.agents[old], Sandboxes: sandboxes, FreeSlots: &slots}
			sandboxes[0] = registry.Sandbox{Fence: w.requests[old].Fence, Ports: w.requests[old].Ports}
			w.r.ApplyDelta(w.now, d)
			sandboxes[0].Ended = true
			w.r.ApplyDelta(w.now, d)
			w.allocate(b)
			w.now = w.now.Add(time.Microsecond)
		}
	})
}

// BenchmarkHeartbeat is a message of an agent without a change.
func BenchmarkHeartbeat(b *testing.B) {
	sizes(b, allSizes, func(b *testing.B, n int) {
		w := newBench(n, nil)
		uids := make([]string, n)
		for i, j := range w.rnd.Perm(n) {
			uids[i] = uid(j)
		}
		i := 0
		for b.Loop() {
			w.r.Heartbeat(w.now, uids[i])
			if i++; i == n {
				i = 0
			}
			w.now = w.now.Add(time.Microsecond)
		}
	})
}
