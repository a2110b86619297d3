package registry_test

import (
	"testing"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

const rare = "docker.io/library/rare:latest"

// load has an agent report n sandboxes more, the first with a port if that is not 0.
func load(i, n int, port int32, s *registry.Snapshot) {
	for j := range n {
		sb := registry.Sandbox{Fence: identity.Fence{SandboxUID: uid(1<<29 + i*64 + j), Attempt: 1}}
		if j == 0 && port != 0 {
			sb.Ports = []int32{port}
		}
		s.Sandboxes = append(s.Sandboxes, sb)
	}
}

// worst are states of the pool, and requests, that make finding hard.
var worst = map[string]struct {
	change  func(i int, s *registry.Snapshot)
	request registry.Request
}{
	"an image on one of 500": {
		func(i int, s *registry.Snapshot) {
			if i%500 == 99 {
				s.Images = append(s.Images, rare)
			}
		}, registry.Request{Image: rare},
	},
	"an image nowhere": {nil, registry.Request{Image: rare}},
	"an image on the most loaded half": {
		func(i int, s *registry.Snapshot) {
			if s.Sandboxes = nil; i%2 == 0 {
				s.Images = append(s.Images, rare)
				load(i, 30, 0, s)
			} else {
				load(i, i/2%30, 0, s)
			}
		}, registry.Request{Image: rare},
	},
	"a port that all with the image have taken": {
		func(i int, s *registry.Snapshot) {
			if i%2 == 0 {
				s.Images = append(s.Images, rare)
				load(i, 1, 9999, s)
			}
		}, registry.Request{Image: rare, Ports: []int32{9999}},
	},
	"a port that all but the most loaded have taken": {
		func(i int, s *registry.Snapshot) {
			if s.Sandboxes = nil; i%64 == 0 {
				load(i, 30, 0, s)
			} else {
				load(i, 1+i%20, 9999, s)
			}
			s.Images = append(s.Images, rare)
		}, registry.Request{Image: rare, Ports: []int32{9999}},
	},
	"refused: full": {
		func(i int, s *registry.Snapshot) { s.Capacity = len(s.Sandboxes) }, registry.Request{Image: image(0)},
	},
	"refused: a port that all have taken": {
		func(i int, s *registry.Snapshot) { load(i, 1, 9999, s) }, registry.Request{Image: image(0), Ports: []int32{9999}},
	},
}

// BenchmarkWorst gives what is chosen back at once, so that the state stays what it is.
func BenchmarkWorst(b *testing.B) {
	for name, c := range worst {
		b.Run(name, func(b *testing.B) {
			sizes(b, []int{1000, 100000}, func(b *testing.B, n int) {
				w := newBench(n, c.change)
				c.request.Fence, c.request.Pool = identity.Fence{SandboxUID: uid(0), Attempt: 1}, pool
				for b.Loop() {
					if at, err := w.r.Allocate(w.now, c.request); err == nil {
						w.r.Release(w.now, on(c.request, at))
					}
				}
			})
		})
	}
}
