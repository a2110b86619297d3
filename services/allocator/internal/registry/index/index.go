// Package index finds the best agent of one pool without looking at all of them. It owns bitmaps of agents: one for each
// rank (free slot or not, number of places taken) of those that may be chosen, one for each image, one for each port that
// is taken anywhere. Finding walks the ranks that occur, best first, and intersects bitmaps, skipping by their summaries.
// It knows nothing of sandboxes, reservations and time; the registry, the only caller, tells it what follows from those,
// and holds its lock meanwhile: nothing here may be called concurrently. Pure.
//
// What nobody has any more (an image, a port) takes no memory. In a steady state nothing allocates.
package index

import "github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"

// ID is an agent's number in an index: small, and used again when the agent has left.
type ID int32

// Index is the index of one pool.
type Index struct {
	arena   arena
	members []*member // by ID
	free    []ID

	offered set
	ranks   [2]ranks // of agents with a free slot, of those without

	images sets[string]
	// floors has, for each image, a rank below which no offered agent has it. Agents that sink in rank lower the floors of
	// their images at once; a search that finds nothing raises it. So a search does not walk again and again over the less
	// loaded agents that lack the image, which the rule itself makes plenty.
	floors []placement.Rank

	ports sets[int32]
	// extra counts holders of a port on one agent beyond the first; there are none unless agents report nonsense.
	extra map[holding]int

	hints  []hint
	dear   int   // see there
	oldest int   // of the hints, once they are many
	query  query // of Find, kept for its memory
}

type member struct {
	rank   placement.Rank // Nowhere while it is not offered
	images []int32        // numbers of images
	few    [56]int32      // room for the first of them, where the rank is
}

type holding struct {
	id   ID
	port int32
}

// New returns an empty index.
func New() *Index {
	return &Index{images: newSets[string](), ports: newSets[int32](), extra: map[holding]int{}, dear: dear}
}

// Join adds an agent that is not offered, and has no images and no ports.
func (x *Index) Join() ID {
	if n := len(x.free); n > 0 {
		id := x.free[n-1]
		x.free = x.free[:n-1]
		return id
	}
	m := &member{rank: placement.Nowhere}
	m.images = m.few[:0]
	x.members = append(x.members, m)
	return ID(len(x.members) - 1)
}

// Leave removes an agent and its images. Its ports must have been freed.
func (x *Index) Leave(id ID) {
	x.Withdraw(id)
	x.ClearImages(id)
	x.free = append(x.free, id)
}

// Len is the number of agents.
func (x *Index) Len() int { return len(x.members) - len(x.free) }

// Offered is the number of agents that may be chosen.
func (x *Index) Offered() int { return x.offered.n }

// Offer lets an agent be chosen, at a rank; it may be offered already.
func (x *Index) Offer(id ID, rank placement.Rank) {
	m := x.members[id]
	old := m.rank
	if old == rank {
		return
	}
	if old == placement.Nowhere {
		x.offered.add(id, &x.arena)
	} else {
		x.of(old).remove(old.Load(), id, &x.arena)
	}
	m.rank = rank
	x.of(rank).add(rank.Load(), id, &x.arena)
	if rank < old {
		for _, i := range m.images {
			x.floors[i] = min(x.floors[i], rank)
		}
		x.unlearn(id)
	}
}

// Withdraw makes an agent not be chosen; false if it is not offered anyway.
func (x *Index) Withdraw(id ID) bool {
	m := x.members[id]
	if m.rank == placement.Nowhere {
		return false
	}
	x.of(m.rank).remove(m.rank.Load(), id, &x.arena)
	x.offered.remove(id, &x.arena)
	m.rank = placement.Nowhere
	return true
}

// AddImage notes that an agent has an image; it may have it already.
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
	x.floors[i] = min(x.floors[i], m.rank)
	x.unlearn(id)
}

// RemoveImage notes that an agent lacks an image; it may have lacked it before.
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

// ClearImages notes that an agent has no images.
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
		x.forget(i, noImage)
		x.floors[i] = placement.Nowhere
	}
}

// Images is the number of images that an agent has.
func (x *Index) Images(id ID) int { return len(x.members[id].images) }

// ImagesOf returns the images that an agent has, in no particular order.
func (x *Index) ImagesOf(id ID) []string {
	images := make([]string, 0, len(x.members[id].images))
	for _, i := range x.members[id].images {
		images = append(images, x.images.name[i])
	}
	return images
}

// Take notes one more holder of a port on an agent.
func (x *Index) Take(id ID, port int32) {
	if !x.ports.at[x.ports.enter(port)].add(id, &x.arena) {
		x.extra[holding{id, port}]++
	}
}

// Free undoes one Take.
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
		x.forget(noImage, i)
		return
	}
	x.unlearn(id)
}
