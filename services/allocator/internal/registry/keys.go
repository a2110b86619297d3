package registry

import "hash/maphash"

// keys is a hash table of places by key: open addressing, linear probing, and no tombstones, for what comes after a removed
// cell moves up. A change of a place touches it twice, at random among up to a million places, so that what counts is
// the number of cache lines: one here, several in Go's own map, which made up half of an allocation.
type keys struct {
	seed  maphash.Seed
	cells []cell // a power of two, at most three quarters of which are taken
	n     int
}

// cell holds the place that answers for a key, nil if it is empty.
type cell struct {
	hash  uint64
	first *place
}

const minCells = 64

func newKeys() keys { return keys{seed: maphash.MakeSeed(), cells: make([]cell, minCells)} }

func (t *keys) hash(key Key) uint64 {
	return maphash.String(t.seed, key.SandboxUID) ^ uint64(key.Attempt)*0x9e3779b97f4a7c15
}

// at is the cell of a key, or the empty one where it belongs.
func (t *keys) at(hash uint64, key Key) int {
	mask := len(t.cells) - 1
	i := int(hash) & mask
	for c := &t.cells[i]; c.first != nil && (c.hash != hash || c.first.key != key); c = &t.cells[i] {
		i = (i + 1) & mask
	}
	return i
}

// first returns the place that answers for a key, nil if there is none.
func (t *keys) first(key Key) *place { return t.cells[t.at(t.hash(key), key)].first }

// put makes a place answer for its key, instead of any other.
func (t *keys) put(p *place) {
	hash := t.hash(p.key)
	i := t.at(hash, p.key)
	if t.cells[i].first == nil {
		if t.n++; 4*t.n > 3*len(t.cells) {
			t.resize(2 * len(t.cells))
			i = t.at(hash, p.key)
		}
	}
	t.cells[i] = cell{hash, p}
}

// remove forgets a key.
func (t *keys) remove(key Key) {
	hole := t.at(t.hash(key), key)
	if t.cells[hole].first == nil {
		return
	}
	mask := len(t.cells) - 1
	for i := (hole + 1) & mask; t.cells[i].first != nil; i = (i + 1) & mask {
		// What is found from the hole's place on may move there; distances are counted around the end.
		if home := int(t.cells[i].hash) & mask; (i-home)&mask >= (i-hole)&mask {
			t.cells[hole] = t.cells[i]
			hole = i
		}
	}
	t.cells[hole] = cell{}
	if t.n--; 8*t.n < len(t.cells) && len(t.cells) > minCells {
		t.resize(len(t.cells) / 2)
	}
}

func (t *keys) resize(n int) {
	old := t.cells
	t.cells = make([]cell, n)
	for _, c := range old {
		if c.first == nil {
			continue
		}
		i := int(c.hash) & (n - 1)
		for t.cells[i].first != nil {
			i = (i + 1) & (n - 1)
		}
		t.cells[i] = c
	}
}
