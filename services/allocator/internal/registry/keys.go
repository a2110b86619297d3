package registry

import (
	"hash/maphash"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// keys is a hash table of places by key: open addressing, linear probing, and no tombstones, for what comes after a removed
// cell moves up. A change of a place touches it twice, at random among up to a million places, so that what counts is
// the number of cache lines: one here, several in Go's own map, which made up half of an allocation. It is made of many
// tables, each of which grows on its own, so that no call waits for a million places to move.
type keys struct {
	seed   maphash.Seed
	tables [1 << tableBits]table
}

// table is a part of keys: a power of two of cells, at most three quarters of which are taken.
type table struct {
	cells []cell
	n     int
}

// cell holds the place that answers for a key, nil if it is empty.
type cell struct {
	hash  uint64
	first *place
}

const (
	tableBits = 8
	minCells  = 8
)

func newKeys() *keys {
	k := &keys{seed: maphash.MakeSeed()}
	for i := range k.tables {
		k.tables[i].cells = make([]cell, minCells)
	}
	return k
}

// of returns the table of a key, and the key's hash: its upper bits say which table, the lower ones where.
func (k *keys) of(key identity.Fence) (*table, uint64) {
	hash := maphash.String(k.seed, key.SandboxUID) ^ uint64(key.Attempt)*0x9e3779b97f4a7c15
	return &k.tables[hash>>(64-tableBits)], hash
}

// first returns the place that answers for a key, nil if there is none.
func (k *keys) first(key identity.Fence) *place {
	t, hash := k.of(key)
	return t.cells[t.at(hash, key)].first
}

// put makes a place answer for its key, instead of any other.
func (k *keys) put(p *place) {
	t, hash := k.of(p.key)
	t.put(hash, p)
}

// remove forgets a key.
func (k *keys) remove(key identity.Fence) {
	t, hash := k.of(key)
	t.remove(hash, key)
}

// at is the cell of a key, or the empty one where it belongs.
func (t *table) at(hash uint64, key identity.Fence) int {
	mask := len(t.cells) - 1
	i := int(hash) & mask
	for c := &t.cells[i]; c.first != nil && (c.hash != hash || c.first.key != key); c = &t.cells[i] {
		i = (i + 1) & mask
	}
	return i
}

func (t *table) put(hash uint64, p *place) {
	i := t.at(hash, p.key)
	if t.cells[i].first == nil {
		if t.n++; 4*t.n > 3*len(t.cells) {
			t.resize(2 * len(t.cells))
			i = t.at(hash, p.key)
		}
	}
	t.cells[i] = cell{hash, p}
}

func (t *table) remove(hash uint64, key identity.Fence) {
	hole := t.at(hash, key)
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

func (t *table) resize(n int) {
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
