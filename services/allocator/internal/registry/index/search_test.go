package index_test

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry/index"
)

// found returns the agent that a search finds, or -1.
func found(x *index.Index, image string, ports ...int32) index.ID {
	id, ok := x.Find(image, ports)
	if !ok {
		return -1
	}
	return id
}

// idle returns an index of n agents without load, with or without a free slot.
func idle(n int, slot bool) *index.Index {
	x := index.New()
	for range n {
		x.Offer(x.Join(), placement.RankOf(0, slot))
	}
	return x
}

// TestSearchAtBoundaries: the last agents of a word, a chunk, and a word of chunks are found like any other.
func TestSearchAtBoundaries(t *testing.T) {
	for _, n := range []int{1, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 8192, 8193, 64*4096 - 1, 64 * 4096, 64*4096 + 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			x := idle(n, true)
			last := index.ID(n - 1)
			require.Equal(t, n, x.Len())
			require.Equal(t, n, x.Offered())

			x.AddImage(last, "rare")
			require.Equal(t, last, found(x, "rare"), "the only agent with the image")
			require.Zero(t, found(x, "other"), "the first of equal ones")

			for id := range last {
				x.Take(id, 80)
			}
			require.Equal(t, last, found(x, "", 80), "the only agent with the port free")
			x.Take(last, 80)
			require.EqualValues(t, -1, found(x, "", 80), "the port is taken everywhere")
			require.EqualValues(t, -1, found(x, "rare", 80))
			require.EqualValues(t, 80, x.Crowded([]int32{81, 80}))

			middle := last / 2
			x.Free(middle, 80)
			require.Equal(t, middle, found(x, "", 80), "a hole among agents that all have the port")
			require.Equal(t, middle, found(x, "rare", 80), "an agent without the image, because no other fits")
			require.True(t, x.Withdraw(middle))
			require.EqualValues(t, -1, found(x, "", 80), "the only agent that fits is not offered")

			x.Offer(middle, placement.RankOf(1, true))
			require.Equal(t, middle, found(x, "", 80))
			require.Equal(t, n, x.Offered())
		})
	}
}

// TestLoadsAtBoundaries: of loads on both sides of a word, the lowest that occurs is found, and each of them in turn.
func TestLoadsAtBoundaries(t *testing.T) {
	loads := []int{0, 1, 62, 63, 64, 65, 127, 128, 191, 192, 4095, 4096}
	for _, slot := range []bool{true, false} {
		t.Run(fmt.Sprint("slot=", slot), func(t *testing.T) {
			x := index.New()
			for i := range loads { // the most loaded one first, so that the number of an agent does not decide
				x.Offer(x.Join(), placement.RankOf(loads[len(loads)-1-i], slot))
			}
			for i := range loads {
				want := index.ID(len(loads) - 1 - i)
				require.Equal(t, placement.RankOf(loads[i], slot), x.Lowest(), "no other load occurs below")
				require.Equal(t, want, found(x, ""), "load %d", loads[i])
				require.True(t, x.Withdraw(want))
			}
			require.EqualValues(t, -1, found(x, ""))
			require.Zero(t, x.Offered())
			require.Equal(t, placement.Nowhere, x.Lowest())
		})
	}
}

// TestChunksWithoutMembers: a search skips the parts of a set whose last agent was withdrawn, or lost its image, while others stay.
func TestChunksWithoutMembers(t *testing.T) {
	x := idle(4*4096, false)
	few := []index.ID{5, 4096, 2*4096 + 70, 4*4096 - 1}
	for _, id := range few {
		x.AddImage(id, "image")
		x.Offer(id, placement.RankOf(0, true))
	}
	for i, id := range few {
		require.Equal(t, id, found(x, "image"))
		require.Equal(t, id, found(x, ""))
		if i%2 == 0 {
			x.Withdraw(id)
		} else {
			x.RemoveImage(id, "image")
			x.Offer(id, placement.RankOf(1, false))
		}
	}
	require.Zero(t, found(x, "image"), "no agent has a slot or the image")
	few = slices.Insert(few, 0, 4095)
	for _, id := range few {
		x.AddImage(id, "image")
		x.Offer(id, placement.RankOf(0, false))
	}
	for _, id := range []index.ID{5, 4095, 4096, 2*4096 + 70, 4*4096 - 1} {
		require.Equal(t, id, found(x, "image"), "chunks that were removed are added again")
		x.RemoveImage(id, "image")
	}
}

// TestAgentsAreFoundInTheOrderOfTheirScores withdraws each agent that is found: the agents come in the order of score and number.
func TestAgentsAreFoundInTheOrderOfTheirScores(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type candidate struct {
			id    index.ID
			score uint64
		}
		x, want := index.New(), []candidate(nil)
		for range rapid.IntRange(0, 150).Draw(t, "agents") {
			id := x.Join()
			rank := placement.RankOf(rapid.SampledFrom([]int{0, 1, 63, 64}).Draw(t, "load"), rapid.Bool().Draw(t, "slot"))
			cached, taken := rapid.Bool().Draw(t, "cached"), rapid.IntRange(0, 4).Draw(t, "port") == 0
			if cached {
				x.AddImage(id, "image")
			}
			x.Offer(id, rank)
			if taken {
				x.Take(id, 80)
				continue
			}
			want = append(want, candidate{id, placement.Score(rank, cached)})
		}
		slices.SortFunc(want, func(a, b candidate) int { return cmp.Or(cmp.Compare(a.score, b.score), cmp.Compare(a.id, b.id)) })
		for _, c := range want {
			require.Equal(t, c.id, found(x, "image", 80))
			x.Withdraw(c.id)
		}
		require.EqualValues(t, -1, found(x, "image", 80))
	})
}

// TestFloorRisesAndFalls follows the floor of one image through the events that move it.
func TestFloorRisesAndFalls(t *testing.T) {
	rank := func(load int) placement.Rank { return placement.RankOf(load, false) }
	x := idle(3, false)
	floor := func() placement.Rank {
		r, ok := x.Floor("image")
		require.True(t, ok)
		return r
	}
	_, ok := x.Floor("image")
	require.False(t, ok, "no agent has the image")
	x.AddImage(1, "image")
	require.Equal(t, rank(0), floor(), "an agent that gets the image lowers the floor to its rank")
	x.Offer(1, rank(7))
	require.Equal(t, rank(0), floor(), "more load leaves the floor")
	require.EqualValues(t, 1, found(x, "image"))
	require.Equal(t, rank(7), floor(), "the search has met no agent with the image below")
	x.Take(1, 80)
	require.Zero(t, found(x, "image", 80), "another agent, because the port is taken")
	require.Equal(t, rank(7), floor(), "an agent with the image counts, whatever its ports")
	x.Offer(1, rank(3))
	require.Equal(t, rank(3), floor(), "less load lowers the floor")
	x.Withdraw(1)
	require.Zero(t, found(x, "image"))
	require.Equal(t, placement.Nowhere, floor(), "no offered agent has the image")
	x.Offer(1, rank(9))
	require.Equal(t, rank(9), floor(), "an agent that is offered again lowers the floor")
	x.AddImage(2, "image")
	require.Equal(t, rank(0), floor())
	require.EqualValues(t, 2, found(x, "image"))
	x.RemoveImage(2, "image")
	require.EqualValues(t, 1, found(x, "image"))
	require.Equal(t, rank(9), floor(), "the next search raises it again")
	x.RemoveImage(1, "image")
	_, ok = x.Floor("image")
	require.False(t, ok)
	x.Offer(1, rank(12))
	x.AddImage(1, "next")
	next, _ := x.Floor("next")
	require.Equal(t, rank(12), next, "an image that gets the number of another starts without its floor")
}

// TestFloorIsBelowEveryHolder: no history lifts the floor of an image above an offered agent that has it, or a search would miss
// that agent. After a search the floor is the rank of the best one.
func TestFloorIsBelowEveryHolder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := newNaive(2, 2, index.New())
		lowest := func(image string) placement.Rank {
			best := placement.Nowhere
			for _, f := range n.agents {
				if f.images[image] {
					best = min(best, f.rank)
				}
			}
			return best
		}
		one := func(f func(*rapid.T, index.ID)) func(*rapid.T) {
			return func(t *rapid.T) {
				if len(n.agents) > 0 {
					f(t, n.some(rapid.IntRange(0, 9).Draw(t, "agent")))
				}
			}
		}
		images, ports := rapid.SampledFrom(n.images), rapid.SampledFrom(n.ports)
		t.Repeat(map[string]func(*rapid.T){
			"join":  func(t *rapid.T) { n.join(t) },
			"leave": one(func(_ *rapid.T, id index.ID) { n.leave(id) }),
			"offer": one(func(t *rapid.T, id index.ID) {
				n.offer(id, placement.RankOf(rapid.IntRange(0, 3).Draw(t, "load"), rapid.Bool().Draw(t, "slot")))
			}),
			"withdraw": one(func(t *rapid.T, id index.ID) { n.withdraw(t, id) }),
			"image":    one(func(t *rapid.T, id index.ID) { n.image(id, images.Draw(t, "image"), rapid.Bool().Draw(t, "has")) }),
			"port":     one(func(t *rapid.T, id index.ID) { n.take(id, ports.Draw(t, "port")) }),
			"search": func(t *rapid.T) {
				image := images.Draw(t, "image")
				n.check(t, image, n.ports[:rapid.IntRange(0, 2).Draw(t, "ports")])
				if floor, ok := n.x.Floor(image); ok {
					require.Equal(t, lowest(image), floor, "the search has raised it as far as it can")
				}
			},
			"": func(t *rapid.T) {
				for _, image := range n.images {
					floor, ok := n.x.Floor(image)
					require.LessOrEqual(t, floor, lowest(image))
					require.Equal(t, slices.ContainsFunc(n.all(), func(f *fact) bool { return f.images[image] }), ok)
				}
			},
		})
	})
}

// TestNumberIsReused: an agent that gets the number of one that left has nothing of it.
func TestNumberIsReused(t *testing.T) {
	x := idle(3, false)
	x.AddImage(1, "image")
	x.Take(1, 80)
	x.Free(1, 80)
	x.Leave(1)
	require.Equal(t, 2, x.Len())
	require.Equal(t, 2, x.Offered())
	require.EqualValues(t, 1, x.Join())
	require.Equal(t, 3, x.Len())
	require.Equal(t, 2, x.Offered(), "a new agent is not offered")
	require.Zero(t, x.Images(1))
	require.Empty(t, x.ImagesOf(1))
	require.False(t, x.Withdraw(1))
	x.Offer(1, placement.RankOf(0, true))
	require.EqualValues(t, 1, found(x, "image", 80), "its slot makes it the best")
	require.EqualValues(t, 3, x.Join(), "no number is free")
}

// TestImagesOfAnAgent adds and removes more images than an agent stores beside its rank, in every order.
func TestImagesOfAnAgent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, has := index.New(), map[string]bool{}
		id, other := x.Join(), x.Join()
		for i := range 60 {
			image := fmt.Sprint(i)
			x.AddImage(id, image)
			x.AddImage(other, image)
			has[image] = true
		}
		for range rapid.IntRange(0, 100).Draw(t, "changes") {
			image := fmt.Sprint(rapid.IntRange(0, 69).Draw(t, "image"))
			if has[image] = rapid.Bool().Draw(t, "add"); has[image] {
				x.AddImage(id, image)
			} else {
				x.RemoveImage(id, image)
				delete(has, image)
			}
		}
		require.Equal(t, len(has), x.Images(id))
		for _, image := range x.ImagesOf(id) {
			require.True(t, has[image], image)
			delete(has, image)
		}
		require.Empty(t, has)
		require.Equal(t, 60, x.Images(other), "the images of another agent stay")
	})
}

// TestCrowded counts only offered agents, and takes the first of equal ports.
func TestCrowded(t *testing.T) {
	x := idle(70, false)
	for id := range index.ID(70) {
		x.Take(id, 1)
		if id >= 40 {
			x.Take(id, 2)
			x.Take(id, 3)
		}
	}
	for name, test := range map[string]struct {
		ports []int32
		want  int32
	}{
		"none":               {nil, 0},
		"one":                {[]int32{2}, 2},
		"most agents":        {[]int32{2, 1, 3}, 1},
		"equal":              {[]int32{3, 2}, 3},
		"taken on no agent":  {[]int32{9, 2}, 2},
		"only unknown ports": {[]int32{9, 8}, 9},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, test.want, x.Crowded(test.ports)) })
	}
	for id := range index.ID(40) {
		x.Withdraw(id)
	}
	require.EqualValues(t, 2, x.Crowded([]int32{2, 1}), "the others with port 1 are not offered")
}

// TestSteadyStateDoesNotAllocate: a search, a reservation and its release use the memory that is there.
func TestSteadyStateDoesNotAllocate(t *testing.T) {
	x := idle(5000, true)
	for id := range index.ID(5000) {
		x.AddImage(id, "image")
		x.Take(id, 80)
	}
	ports := []int32{80, 81}
	x.Free(4999, 80)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		id, _ := x.Find("image", ports)
		x.Offer(id, placement.RankOf(1, true))
		x.Take(id, 81)
		_, ok := x.Find("image", ports)
		if ok {
			panic("found an agent whose port is taken")
		}
		x.Free(id, 81)
		x.Offer(id, placement.RankOf(0, true))
	}))
}
