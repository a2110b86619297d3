package index

import (
	"math/bits"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

// ranks are the agents of one half of the ranks by load.
type ranks struct {
	loads    []set
	occupied []uint64 // a bit for each load that occurs
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

// next is the lowest load from `load` on that occurs, -1 if there is none.
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

// next is the lowest rank from r on at which an agent is offered, Nowhere if there is none.
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

// Find returns the offered agent with the lowest placement.Score among those on which the ports are free, of equals the one
// with the lowest number; false if there is none. It does not allocate.
func (x *Index) Find(image string, ports []int32) (ID, bool) {
	without := x.without[:0]
	for _, p := range ports {
		if i, ok := x.ports.number[p]; ok {
			without = append(without, &x.ports.at[i])
		}
	}
	x.without = without
	if i, ok := x.images.number[image]; ok {
		if id := x.cached(i, without); id >= 0 {
			return id, true
		}
	}
	// What is left has the image nowhere, so that it needs no looking at.
	for r := x.next(0); r != placement.Nowhere; r = x.next(r + 1) {
		level := &x.of(r).loads[r.Load()]
		if id, _ := first(level, level, without); id >= 0 {
			return id, true
		}
	}
	return -1, false
}

// cached is Find among the agents that have an image; -1 if there is none. It raises the image's floor as far as it finds
// ranks at which no agent has the image, whatever its ports.
func (x *Index) cached(image int32, without []*set) ID {
	holders, floor := &x.images.at[image], &x.floors[image]
	rising := true
	for r := x.next(*floor); r != placement.Nowhere; r = x.next(r + 1) {
		id, met := first(&x.of(r).loads[r.Load()], holders, without)
		if rising {
			*floor = r
			rising = !met
		}
		if id >= 0 {
			return id
		}
	}
	if rising {
		*floor = placement.Nowhere
	}
	return -1
}

// Crowded is the one of the ports that is taken on most of the offered agents, of equals the first.
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
