package index_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry/index"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// naive does what an index does by examining every agent.
type naive struct {
	x      *index.Index
	agents map[index.ID]*fact
	images []string
	ports  []int32
}

type fact struct {
	rank   placement.Rank
	images map[string]bool
	ports  map[int32]int
}

func newNaive(images, ports int, x *index.Index) *naive {
	n := &naive{x: x, agents: map[index.ID]*fact{}}
	for i := range images {
		n.images = append(n.images, fmt.Sprint("image-", i))
	}
	for i := range ports {
		n.ports = append(n.ports, int32(8000+i))
	}
	return n
}

func (n *naive) join(t require.TestingT) index.ID {
	id := n.x.Join()
	require.Nil(t, n.agents[id])
	n.agents[id] = &fact{rank: placement.Nowhere, images: map[string]bool{}, ports: map[int32]int{}}
	return id
}

func (n *naive) leave(id index.ID) {
	for port, holders := range n.agents[id].ports {
		for range holders {
			n.x.Free(id, port)
		}
	}
	n.x.Leave(id)
	delete(n.agents, id)
}

func (n *naive) offer(id index.ID, rank placement.Rank) {
	n.x.Offer(id, rank)
	n.agents[id].rank = rank
}

func (n *naive) withdraw(t require.TestingT, id index.ID) {
	require.Equal(t, n.agents[id].rank != placement.Nowhere, n.x.Withdraw(id))
	n.agents[id].rank = placement.Nowhere
}

func (n *naive) image(id index.ID, image string, has bool) {
	if has {
		n.x.AddImage(id, image)
		n.agents[id].images[image] = true
		return
	}
	n.x.RemoveImage(id, image)
	delete(n.agents[id].images, image)
}

func (n *naive) take(id index.ID, port int32) {
	n.x.Take(id, port)
	n.agents[id].ports[port]++
}

func (n *naive) release(id index.ID, port int32) {
	if n.agents[id].ports[port]--; n.agents[id].ports[port] <= 0 {
		delete(n.agents[id].ports, port)
	}
	n.x.Free(id, port)
}

// check compares the index with a search of all agents.
func (n *naive) check(t require.TestingT, image string, ports []int32) {
	best := uint64(1 << 63)
	offered := 0
	fits := func(f *fact) bool {
		return f.rank != placement.Nowhere && !slices.ContainsFunc(ports, func(p int32) bool { return f.ports[p] > 0 })
	}
	taken := map[int32]int{}
	for _, f := range n.agents {
		if fits(f) {
			best = min(best, placement.Score(f.rank, f.images[image]))
		}
		if f.rank != placement.Nowhere {
			offered++
			for p := range f.ports {
				taken[p]++
			}
		}
	}
	require.Equal(t, len(n.agents), n.x.Len())
	require.Equal(t, offered, n.x.Offered())
	got, ok := n.x.Find(image, ports)
	require.Equal(t, best != 1<<63, ok)
	if ok {
		require.True(t, fits(n.agents[got]))
		require.Equal(t, best, placement.Score(n.agents[got].rank, n.agents[got].images[image]))
	}
	if len(ports) > 0 {
		most := slices.MaxFunc(ports, func(a, b int32) int { return taken[a] - taken[b] })
		require.Equal(t, taken[most], taken[n.x.Crowded(ports)])
	}
}

// some returns an agent; there must be one.
func (n *naive) some(at int) index.ID {
	ids := make([]index.ID, 0, len(n.agents))
	for id := range n.agents {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids[at%len(ids)]
}

// all returns what is known about the agents, in no order.
func (n *naive) all() []*fact { return slices.Collect(maps.Values(n.agents)) }

// Find and Crowded equal a naive search after every history.
func TestFindEqualsNaiveSearch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := newNaive(3, 3, index.New())
		images, ports := rapid.SampledFrom(append(n.images, "unknown")), rapid.SampledFrom(n.ports)
		ranks := rapid.Custom(func(t *rapid.T) placement.Rank {
			return placement.RankOf(rapid.SampledFrom([]int{0, 1, 2, 3, 63, 64, 200}).Draw(t, "load"), rapid.Bool().Draw(t, "slot"))
		})
		with := func(f func(*rapid.T, index.ID)) func(*rapid.T) {
			return func(t *rapid.T) {
				if len(n.agents) > 0 {
					f(t, n.some(rapid.IntRange(0, 99).Draw(t, "agent")))
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				id := n.join(t)
				n.offer(id, ranks.Draw(t, "rank"))
				n.image(id, images.Draw(t, "image"), true)
			},
			"leave":    with(func(_ *rapid.T, id index.ID) { n.leave(id) }),
			"offer":    with(func(t *rapid.T, id index.ID) { n.offer(id, ranks.Draw(t, "rank")) }),
			"withdraw": with(func(t *rapid.T, id index.ID) { n.withdraw(t, id) }),
			"image":    with(func(t *rapid.T, id index.ID) { n.image(id, images.Draw(t, "image"), rapid.Bool().Draw(t, "has")) }),
			"take":     with(func(t *rapid.T, id index.ID) { n.take(id, ports.Draw(t, "port")) }),
			"free":     with(func(t *rapid.T, id index.ID) { n.release(id, ports.Draw(t, "port")) }),
			"": func(t *rapid.T) {
				for _, image := range append(n.images, "unknown") {
					n.check(t, image, nil)
					n.check(t, image, n.ports[:1])
					n.check(t, image, n.ports[:2])
				}
			},
		})
	})
}

// With many agents, sets have several words and chunks, full words, and chunks that are removed.
func TestFindEqualsNaiveSearchWithManyAgents(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			n := newNaive(12, 6, index.New())
			const agents = 4500
			ids := make([]index.ID, agents)
			for i := range ids {
				id := n.join(t)
				ids[i] = id
				n.offer(id, placement.RankOf(rnd.IntN(6), rnd.IntN(2) == 0))
				for j, image := range n.images {
					if rnd.IntN(1<<j) == 0 { // from all agents to very few
						n.image(id, image, true)
					}
				}
				for j, port := range n.ports {
					if j == 0 || rnd.IntN(j) > 0 {
						n.take(id, port)
					}
				}
			}
			for step := range 2000 {
				id := ids[rnd.IntN(agents)]
				switch rnd.IntN(8) {
				case 0:
					n.withdraw(t, id)
				case 1:
					n.image(id, n.images[rnd.IntN(len(n.images))], rnd.IntN(2) == 0)
				case 2:
					n.take(id, n.ports[rnd.IntN(len(n.ports))])
				case 3, 4:
					n.release(id, n.ports[rnd.IntN(len(n.ports))])
				default:
					n.offer(id, placement.RankOf(rnd.IntN(6)+step/400, rnd.IntN(2) == 0))
				}
				if step%25 == 0 {
					n.check(t, n.images[rnd.IntN(len(n.images))], n.ports[:rnd.IntN(len(n.ports)+1)])
				}
			}
			for _, id := range ids {
				n.leave(id)
			}
			images, ports, chunks, spare := n.x.Kept()
			require.Zero(t, images, "no agent has an image")
			require.Zero(t, ports, "no agent has a port")
			require.Zero(t, chunks, "no set has a member")
			require.Positive(t, spare)
			require.Zero(t, n.x.Len())
		})
	}
}

// A port with several holders on one agent is free when all have freed it.
func TestPortWithSeveralHolders(t *testing.T) {
	n := newNaive(0, 1, index.New())
	id := n.join(t)
	n.offer(id, 0)
	port := n.ports[0]
	n.x.Free(id, port) // a port without a holder
	for range 3 {
		n.take(id, port)
	}
	for range 3 {
		n.check(t, "", n.ports)
		_, ok := n.x.Find("", n.ports)
		require.False(t, ok)
		n.release(id, port)
	}
	_, ok := n.x.Find("", n.ports)
	require.True(t, ok)
	_, ports, _, _ := n.x.Kept()
	require.Zero(t, ports)
}

// A burst of rare images and ports leaves only a bounded spare.
func TestMemoryIsReleased(t *testing.T) {
	x := index.New()
	id := x.Join()
	for i := range 5000 {
		x.AddImage(id, fmt.Sprint(i))
		x.Take(id, int32(i))
	}
	require.Equal(t, 5000, x.Images(id))
	require.Len(t, x.ImagesOf(id), 5000)
	x.ClearImages(id)
	for i := range 5000 {
		x.Free(id, int32(i))
	}
	images, ports, chunks, spare := x.Kept()
	require.Equal(t, []int{0, 0, 0}, []int{images, ports, chunks})
	require.LessOrEqual(t, spare, 1000)
}
