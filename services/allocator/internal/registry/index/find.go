package index

import (
	"math/bits"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

// ranks holds the agents of one half of the ranks, by load.
type ranks struct {
	loads    []set
	occupied []uint64 // one bit for each load that occurs
}

func (r *ranks) add(load int, id ID, m *arena) {
	for load >= len(r.loads) {
		r.loads = append(r.loads, set{})
	}
	for load>>wordShift >= len(r.occupied) {
		r.occupied = append(r.occupied, 0)
	}
	r.loads[load].add(id, m)
	r.occupied[load>>wordShift] |= 1 << (load & wordMask)
}

func (r *ranks) remove(load int, id ID, m *arena) {
	r.loads[load].remove(id, m)
	if r.loads[load].n == 0 {
		r.occupied[load>>wordShift] &^= 1 << (load & wordMask)
	}
}

// next returns the lowest load that occurs and is at least `load`, or -1.
func (r *ranks) next(load int) int {
	i := load >> wordShift
	if i >= len(r.occupied) {
		return -1
	}
	for word := r.occupied[i] &^ (1<<(load&wordMask) - 1); ; word = r.occupied[i] {
		if word != 0 {
			return i<<wordShift | bits.TrailingZeros64(word)
		}
		if i++; i == len(r.occupied) {
			return -1
		}
	}
}

func (x *Index) of(r placement.Rank) *ranks {
	if r.Slot() {
		return &x.ranks[0]
	}
	return &x.ranks[1]
}

// next returns the lowest rank that is at least r and at which an agent is offered, or Nowhere.
func (x *Index) next(r placement.Rank) placement.Rank {
	if r.Slot() {
		if load := x.ranks[0].next(r.Load()); load >= 0 {
			return placement.RankOf(load, true)
		}
		r = placement.RankOf(0, false)
	}
	if load := x.ranks[1].next(r.Load()); load >= 0 {
		return placement.RankOf(load, false)
	}
	return placement.Nowhere
}

// Find returns the offered agent with the lowest placement.Score among those with the ports free, the lowest number among equal
// ones, and whether there is one. It does not allocate memory.
func (x *Index) Find(image string, ports []int32) (ID, bool) {
	taken := x.taken[:0]
	for _, p := range ports {
		if i, ok := x.ports.number[p]; ok {
			taken = append(taken, &x.ports.at[i])
		}
	}
	x.taken = taken
	id := ID(-1)
	if i, ok := x.images.number[image]; ok {
		id = x.walk(i, taken)
	}
	if id < 0 { // no eligible agent has the image, so the rest need not be checked for it
		id = x.walk(noImage, taken)
	}
	return id, id >= 0
}

// walk visits the ranks, best first, to the first agent that has an image, if one is asked for, and the ports free; -1 if there
// is none. It starts at the image's floor, and raises it as long as it meets no agent with the image, whatever its ports.
func (x *Index) walk(image int32, taken []*set) ID {
	var start placement.Rank
	rising := image != noImage
	if rising {
		start = x.floors[image]
	}
	id := ID(-1)
	r := x.next(start)
	for ; r != placement.Nowhere; r = x.next(r + 1) {
		level := &x.of(r).loads[r.Load()]
		holders := level
		if image != noImage {
			holders = &x.images.at[image]
		}
		var met bool
		id, met = first(level, holders, taken)
		if rising {
			x.floors[image] = r
			rising = !met
		}
		if id >= 0 {
			break
		}
	}
	if rising {
		x.floors[image] = r
	}
	return id
}

// Crowded returns the port that is taken on most of the offered agents, the first of equal ones.
func (x *Index) Crowded(ports []int32) int32 {
	var port int32
	most := -1
	for _, p := range ports {
		n := 0
		if i, ok := x.ports.number[p]; ok {
			n = x.ports.at[i].common(&x.offered)
		}
		if n > most {
			port, most = p, n
		}
	}
	return port
}
