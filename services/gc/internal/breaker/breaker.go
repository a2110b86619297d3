// Package breaker stops a collector that is about to delete too much, so that a wrong belief or a human error cannot empty a
// cluster. It is pure: time and counts are arguments. Once it has tripped, it stays open for the life of the process; a
// person decides, and restarts the process with another limit if the deletions were intended. All methods may be called
// concurrently.
package breaker

import (
	"fmt"
	"sync"
	"time"
)

// parts is the number of steps in which the window slides.
const parts = 16

// Limit bounds deletions.
type Limit struct {
	// Share of all objects, 0 to 1, that may be deleted within Window; 1 or more means no limit.
	Share  float64
	Window time.Duration
	// Floor is the number of deletions within Window that are always permitted: of a few objects any number is a large share.
	Floor int
}

// Intent is an intended deletion.
type Intent struct {
	// Objects is the number of objects in the cluster.
	Objects int
	// Waiting is the number of queued decisions that may be deletions. Doomed, if not nil, counts those that are; it is called
	// only if all of Waiting would be too many.
	Waiting int
	Doomed  func() int
}

// Breaker counts deletions.
type Breaker struct {
	limit Limit

	mu      sync.Mutex
	counts  [parts]int
	current int64 // the step of the newest count
	open    error
}

// New returns a breaker that has not tripped.
func New(l Limit) *Breaker { return &Breaker{limit: l} }

// Tripped returns why deletions have stopped, or nil.
func (b *Breaker) Tripped() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open
}

// Allow counts a deletion and returns nil, or returns why it is refused. Queued deletions count as made: if they are too many
// together, none of them is allowed.
func (b *Breaker) Allow(now time.Time, i Intent) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open != nil || b.limit.Share >= 1 {
		return b.open
	}
	b.slide(now)
	made := 0
	for _, n := range b.counts {
		made += n
	}
	most := max(float64(b.limit.Floor), b.limit.Share*float64(i.Objects+made))
	further := 1
	if i.Doomed != nil && float64(made+i.Waiting) > most {
		further = max(i.Doomed(), 1)
	}
	if float64(made+further) > most {
		b.open = fmt.Errorf("%d deletions within %s, with %d more queued, would exceed %d of %d objects: all deletions are stopped",
			made, b.limit.Window, further, int(most), i.Objects+made)
		return b.open
	}
	b.counts[b.current%parts]++
	return nil
}

// slide drops the counts that have left the window.
func (b *Breaker) slide(now time.Time) {
	part := now.UnixNano() / max(int64(b.limit.Window/parts), 1)
	for n := max(b.current+1, part-parts+1); n <= part; n++ {
		b.counts[n%parts] = 0
	}
	b.current = max(b.current, part) // never move back with the clock
}
