package registry

import (
	"hash/maphash"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// attempt names what has allocations: a fence without its agent.
type attempt struct {
	sandboxUID string
	number     int64
}

func attemptOf(f identity.Fence) attempt { return attempt{f.SandboxUID, f.Attempt} }

// attempts maps each attempt to the allocation that answers for it. It is a hash table with open addressing and linear
// probing. A removal closes its gap, so there are no tombstones. An allocation looks its attempt up at random among up to a
// million, so the cost is that of cache misses: a cell is one cache line away, where Go's map needs several (decision 011).
// The table is split into parts that grow on their own, so no call waits while a million cells are copied.
type attempts struct {
	seed  maphash.Seed
	parts [1 << partBits]part
}

// part holds the attempts whose hashes start with the same partBits bits. The number of its cells is a power of two; at most
// three quarters of them are occupied.
type part struct {
	cells []cell
	n     int
}

// cell is empty if first is nil.
type cell struct {
	hash  uint64
	first *allocation
}

const (
	partBits = 8
	minCells = 8
)

func newAttempts() *attempts {
	t := &attempts{seed: maphash.MakeSeed()}
	for i := range t.parts {
		t.parts[i].cells = make([]cell, minCells)
	}
	return t
}

// part returns the part that an attempt belongs to, and the attempt's hash.
func (t *attempts) part(key attempt) (*part, uint64) {
	const golden = 0x9e3779b97f4a7c15 // spreads small numbers over all bits
	hash := maphash.String(t.seed, key.sandboxUID) ^ uint64(key.number)*golden
	return &t.parts[hash>>(64-partBits)], hash
}

// first returns the allocation that answers for an attempt, or nil.
func (t *attempts) first(key attempt) *allocation {
	p, hash := t.part(key)
	return p.cells[p.find(hash, key)].first
}

// put makes an allocation answer for its attempt.
func (t *attempts) put(l *allocation) {
	p, hash := t.part(l.key)
	i := p.find(hash, l.key)
	if p.cells[i].first == nil {
		if p.n++; 4*p.n > 3*len(p.cells) {
			p.resize(2 * len(p.cells))
			i = p.find(hash, l.key)
		}
	}
	p.cells[i] = cell{hash, l}
}

// remove removes an attempt. It is idempotent.
func (t *attempts) remove(key attempt) {
	p, hash := t.part(key)
	gap := p.find(hash, key)
	if p.cells[gap].first == nil {
		return
	}
	mask := len(p.cells) - 1
	for i := (gap + 1) & mask; p.cells[i].first != nil; i = (i + 1) & mask {
		// A cell may move to the gap if the gap lies between its home and its position; both distances wrap around.
		if home := int(p.cells[i].hash) & mask; (i-home)&mask >= (i-gap)&mask {
			p.cells[gap] = p.cells[i]
			gap = i
		}
	}
	p.cells[gap] = cell{}
	if p.n--; 8*p.n < len(p.cells) && len(p.cells) > minCells {
		p.resize(len(p.cells) / 2)
	}
}

// find returns the index of an attempt's cell, or that of the empty cell where it belongs.
func (p *part) find(hash uint64, key attempt) int {
	mask := len(p.cells) - 1
	i := int(hash) & mask
	for c := &p.cells[i]; c.first != nil && (c.hash != hash || c.first.key != key); c = &p.cells[i] {
		i = (i + 1) & mask
	}
	return i
}

func (p *part) resize(n int) {
	old := p.cells
	p.cells = make([]cell, n)
	for _, c := range old {
		if c.first == nil {
			continue
		}
		i := int(c.hash) & (n - 1)
		for p.cells[i].first != nil {
			i = (i + 1) & (n - 1)
		}
		p.cells[i] = c
	}
}
