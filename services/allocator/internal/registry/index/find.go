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

// query is what Find looks for: ports that somebody has taken, by their numbers and as sets.
type query struct {
	ports []int32
	taken []*set
}

// Find returns the offered agent with the lowest placement.Score among those on which the ports are free, of equals the one
// with the lowest number; false if there is none. It does not allocate.
func (x *Index) Find(image string, ports []int32) (ID, bool) {
	q := &x.query
	q.ports, q.taken = q.ports[:0], q.taken[:0]
	for _, p := range ports {
		if i, ok := x.ports.number[p]; ok {
			q.ports, q.taken = append(q.ports, i), append(q.taken, &x.ports.at[i])
		}
	}
	id := ID(-1)
	if i, ok := x.images.number[image]; ok {
		id = x.walk(i, q)
	}
	if id < 0 { // what is left has the image nowhere, so that it needs no looking at
		id = x.walk(noImage, q)
	}
	return id, id >= 0
}

// walk goes through the ranks, best first, to the first agent that has an image, if one is asked for, and the ports free;
// -1 if there is none. It starts where it is known that nothing comes before, and notes what it finds out: in the image's
// floor as long as it meets no agent with the image, whatever its ports, and in a hint if ports have made it dear.
func (x *Index) walk(image int32, q *query) ID {
	var start placement.Rank
	var h *hint
	rising := image != noImage
	if rising {
		start = x.floors[image]
	}
	if len(q.ports) > 0 && len(x.hints) > 0 {
		if h = x.hint(image, q.ports); h != nil && h.floor > start {
			start, rising = h.floor, false
		}
	}
	id, looked := ID(-1), 0
	r := x.next(start)
	for ; r != placement.Nowhere; r = x.next(r + 1) {
		level := &x.of(r).loads[r.Load()]
		holders := level
		if image != noImage {
			holders = &x.images.at[image]
		}
		var met bool
		var n int
		id, met, n = first(level, holders, q.taken)
		looked += n
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
	if h != nil || len(q.ports) > 0 && looked >= x.dear {
		x.learn(h, image, q.ports, r)
	}
	return id
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
