// Package breaker stops a collector that is about to delete too much: a mistake in what it believes, or a person's, must not
// empty a cluster. It is pure: the time and the numbers come in. Once it has tripped it stays so for the life of the
// process; a person looks, and restarts it with another limit if all was meant. All methods may be called concurrently.
package breaker

import (
	"fmt"
	"sync"
	"time"
)

// parts is into how many parts the window is divided: it slides in steps of that size.
const parts = 16

// Limit is how much may be deleted.
type Limit struct {
	// Share of all objects, 0 to 1, that may be deleted within Window; 1 or more is no limit.
	Share  float64
	Window time.Duration
	// Floor is the number of deletions within Window that are always permitted: of few objects any number is a large share.
	Floor int
}

// Intent is a deletion that somebody wants to make.
type Intent struct {
	// Objects is how many objects there are.
	Objects int
	// Waiting is how many decisions wait that may be deletions; Doomed, if not nil, counts those that are. It is called only if
	// all of Waiting would be too many.
	Waiting int
	Doomed  func() int
}

// Breaker counts deletions.
type Breaker struct {
	limit Limit

	mu      sync.Mutex
	counts  [parts]int
	current int64 // the part of time that the newest count is of
	open    error
}

// New returns a breaker that has not tripped.
func New(l Limit) *Breaker { return &Breaker{limit: l} }

// Tripped is why nothing may be deleted any more, or nil.
func (b *Breaker) Tripped() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open
}

// Allow counts a deletion and returns nil, or the reason why there is to be none. Those that wait count as made: if they are
// too many together, none of them is.
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
		b.open = fmt.Errorf("%d deletions within %s, with %d more to come, would be more than %d of %d objects: nothing is deleted any more",
			made, b.limit.Window, further, int(most), i.Objects+made)
		return b.open
	}
	b.counts[b.current%parts]++
	return nil
}

// slide forgets what has left the window.
func (b *Breaker) slide(now time.Time) {
	part := now.UnixNano() / max(int64(b.limit.Window/parts), 1)
	for n := max(b.current+1, part-parts+1); n <= part; n++ {
		b.counts[n%parts] = 0
	}
	b.current = max(b.current, part) // a clock that goes back stands still
}
