// Package index finds the best agent of one pool without examining all of them. It owns bitmaps of agents: one for each rank
// (free slot or not, allocated capacity) of the agents that may be chosen, one for each image, and one for each port that is
// taken on any agent. Find visits the ranks that occur, best first, and intersects bitmaps, skipping parts by their summaries.
// It never deals with sandboxes, reservations or time: the registry, its only caller, translates those. The registry holds
// its lock during every call; nothing here may be called concurrently. Pure.
//
// An image or port that no agent has takes no memory. In a steady state nothing allocates memory.
package index

import "github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"

// ID is an agent's number in an index: small, and reused when the agent has left.
type ID int32

// Index is the index of one pool.
type Index struct {
	arena   arena
	members []*member // by ID
	// rank holds the rank of each agent, by ID; Nowhere while it is not offered. It is not part of member, because a list of
	// ranks fits into the processor's caches, and most offers read nothing else of an agent.
	rank []placement.Rank
	free []ID

	offered set
	ranks   [2]ranks // of agents with a free slot, of those without

	images sets[string]
	// floors holds, for each image, a rank below which no offered agent has it. An agent whose rank decreases lowers the floors
	// of its images at once; a search that finds nothing raises the floor. So a search does not visit again and again the less
	// loaded agents without the image, of which the rule itself produces many.
	floors []placement.Rank

	ports sets[int32]
	// extra counts holders of a port on one agent beyond the first; there are none unless an agent reports a port twice.
	extra map[holding]int

	taken []*set // scratch memory of Find
}

type member struct {
	images []int32   // numbers of images
	few    [56]int32 // storage of the first images
}

// noImage stands for any image.
const noImage = -1

type holding struct {
	id   ID
	port int32
}

// New returns an empty index.
func New() *Index {
	return &Index{images: newSets[string](), ports: newSets[int32](), extra: map[holding]int{}}
}

// Join adds an agent that is not offered and has no images and no ports.
func (x *Index) Join() ID {
	if n := len(x.free); n > 0 {
		id := x.free[n-1]
		x.free = x.free[:n-1]
		return id
	}
	m := &member{}
	m.images = m.few[:0]
	x.members = append(x.members, m)
	x.rank = append(x.rank, placement.Nowhere)
	return ID(len(x.members) - 1)
}

// Leave removes an agent and its images. The caller has freed its ports.
func (x *Index) Leave(id ID) {
	x.Withdraw(id)
	x.ClearImages(id)
	x.free = append(x.free, id)
}

// Len returns the number of agents.
func (x *Index) Len() int { return len(x.members) - len(x.free) }

// Offered returns the number of agents that may be chosen.
func (x *Index) Offered() int { return x.offered.n }

// Offer makes an agent eligible at a rank, or changes its rank.
func (x *Index) Offer(id ID, rank placement.Rank) {
	old := x.rank[id]
	if old == rank {
		return
	}
	if old == placement.Nowhere {
		x.offered.add(id, &x.arena)
	} else {
		x.of(old).remove(old.Load(), id, &x.arena)
	}
	x.rank[id] = rank
	x.of(rank).add(rank.Load(), id, &x.arena)
	if rank < old {
		for _, i := range x.members[id].images {
			x.floors[i] = min(x.floors[i], rank)
		}
	}
}

// Withdraw makes an agent not eligible, and reports whether it was.
func (x *Index) Withdraw(id ID) bool {
	rank := x.rank[id]
	if rank == placement.Nowhere {
		return false
	}
	x.of(rank).remove(rank.Load(), id, &x.arena)
	x.offered.remove(id, &x.arena)
	x.rank[id] = placement.Nowhere
	return true
}

// AddImage adds an image to an agent. It is idempotent.
func (x *Index) AddImage(id ID, image string) {
	i := x.images.enter(image)
	if i == len(x.floors) {
		x.floors = append(x.floors, placement.Nowhere)
	}
	if !x.images.at[i].add(id, &x.arena) {
		return
	}
	m := x.members[id]
	m.images = append(m.images, int32(i))
	x.floors[i] = min(x.floors[i], x.rank[id])
}

// RemoveImage removes an image from an agent. It is idempotent.
func (x *Index) RemoveImage(id ID, image string) {
	i, ok := x.images.number[image]
	if !ok || !x.images.at[i].has(id) {
		return
	}
	m := x.members[id]
	for k, j := range m.images {
		if j == i {
			last := len(m.images) - 1
			m.images[k] = m.images[last]
			m.images = m.images[:last]
			break
		}
	}
	x.dropImage(id, i)
}

// ClearImages removes all images from an agent.
func (x *Index) ClearImages(id ID) {
	m := x.members[id]
	for _, i := range m.images {
		x.dropImage(id, i)
	}
	m.images = m.images[:0]
}

func (x *Index) dropImage(id ID, i int32) {
	s := &x.images.at[i]
	s.remove(id, &x.arena)
	if s.n == 0 {
		x.images.leave(int(i))
		x.floors[i] = placement.Nowhere
	}
}

// Images returns the number of images of an agent.
func (x *Index) Images(id ID) int { return len(x.members[id].images) }

// ImagesOf returns the images of an agent, in no order.
func (x *Index) ImagesOf(id ID) []string {
	images := make([]string, 0, len(x.members[id].images))
	for _, i := range x.members[id].images {
		images = append(images, x.images.name[i])
	}
	return images
}

// Take adds a holder of a port on an agent.
func (x *Index) Take(id ID, port int32) {
	if !x.ports.at[x.ports.enter(port)].add(id, &x.arena) {
		x.extra[holding{id, port}]++
	}
}

// Free removes a holder of a port on an agent.
func (x *Index) Free(id ID, port int32) {
	if len(x.extra) > 0 {
		h := holding{id, port}
		if n := x.extra[h]; n > 1 {
			x.extra[h] = n - 1
			return
		} else if n == 1 {
			delete(x.extra, h)
			return
		}
	}
	i, ok := x.ports.number[port]
	if !ok {
		return
	}
	s := &x.ports.at[i]
	s.remove(id, &x.arena)
	if s.n == 0 {
		x.ports.leave(int(i))
	}
}
