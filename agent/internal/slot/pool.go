// Package slot keeps an agent's slots: containers that are started ahead of time, one for each free place, so that a
// create has only to claim one (DESIGN section 8). It says how many there are, starts and stops them in the background, and
// hands them out; what a slot is, and how it is claimed, is runtime.Slots' business. All methods of Pool may be called
// concurrently.
//
// The life of a slot:
//
//	            started, warmed             Take              SlotClaimed
//	(nothing) ------------------> [free] ----------> [taken] -------------> a sandbox
//	                                 |                  |
//	                                 | ended, too many, | Drop
//	                                 | memory is short  v
//	                                 +-----------> [rubbish] ----------> (nothing)
//
// The lock guards the lists; it is never held over I/O. Whoever holds the sandboxes' lock may take this one, never the
// other way round: what Run tells, it tells without it.
package slot

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Runtime is a runtime that has slots.
type Runtime interface {
	runtime.Runtime
	runtime.Slots
}

// Config is what a Pool needs.
type Config struct {
	// Runtime runs the slots.
	Runtime Runtime
	// Logs keeps the output of what they become.
	Logs *logs.Store
	// AgentUID and AgentPool are who the slots belong to.
	AgentUID, AgentPool string
	// Max bounds the number of free slots; below zero it is the number of free places. Min of them are kept when memory is
	// short.
	Min, Max int
	// Memory looks at the machine's memory. Nil: /proc/meminfo.
	Memory func() (Memory, error)
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Pool keeps the slots of one agent. Make it with New; Run does its work.
type Pool struct {
	config Config
	clock  clock.WithTicker
	wake   chan struct{}
	wg     sync.WaitGroup // what Run has begun

	mu       sync.Mutex
	places   int
	free     []*free
	starting int
	warming  bool
	cleaning int
	rubbish  []string
	busy     int       // creates that run
	recent   []string  // images of the last claims, the last one first
	group    string    // where the next slot goes
	members  int       // slots that went there
	never    string    // why there can be no slots
	pressed  bool      // memory is short
	failures int       // in a row
	failure  string    // the last one
	notUntil time.Time // the next try after a failure
	waiting  time.Time // since when a slot is missing; zero if none is
}

// free is a slot that can be claimed.
type free struct {
	id string
	// image is what the slot is warm for, or is being warmed for; empty for none.
	image string
	// forget ends the watching of its process.
	forget context.CancelFunc
}

// New returns a Pool that has no slots yet.
func New(cfg Config) *Pool {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.Memory == nil {
		cfg.Memory = readMemory
	}
	return &Pool{config: cfg, clock: cfg.Clock, wake: make(chan struct{}, 1)}
}

// SetRoom says how many sandboxes the agent has room for: so many slots are of use.
func (p *Pool) SetRoom(n int) {
	p.change(func() { p.places = max(n, 0) })
}

// Begin says that a create runs, until done is called: slots are started when nobody has to wait for it, and the one that
// it may take is none too many although its place is taken.
func (p *Pool) Begin() (done func()) {
	p.change(func() { p.busy++ })
	return func() { p.change(func() { p.busy-- }) }
}

// recentImages is how many images are remembered for warming.
const recentImages = 4

// Take hands out a free slot, one that is warm for the image if there is one. The slot is the caller's from here on: it
// becomes a sandbox, or it goes back by Drop.
func (p *Pool) Take(image string) (id string, ok bool) {
	p.change(func() {
		p.recent = slices.Insert(slices.DeleteFunc(p.recent, func(i string) bool { return i == image }), 0, image)
		p.recent = p.recent[:min(len(p.recent), recentImages)]
		best := -1
		for i, f := range p.free {
			if best < 0 || f.fits(image) > p.free[best].fits(image) {
				best = i
			}
		}
		if best < 0 {
			return
		}
		f := p.free[best]
		f.forget()
		p.free = slices.Delete(p.free, best, best+1)
		id, ok = f.id, true
	})
	return id, ok
}

// fits is higher the less a claim with the image has to do: a slot that is warm for another one has to be cooled first.
func (f *free) fits(image string) int {
	switch f.image {
	case image:
		return 2
	case "":
		return 1
	}
	return 0
}

// Drop has containers removed that were slots: ones that were taken and not claimed, or that an earlier life of the agent
// left.
func (p *Pool) Drop(ids ...string) {
	p.change(func() { p.rubbish = append(p.rubbish, ids...) })
}

// change changes the state and has Run look at it.
func (p *Pool) change(f func()) {
	p.mu.Lock()
	f()
	p.mu.Unlock()
	p.poke()
}

func (p *Pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// status is what is told. mu is held.
func (p *Pool) status() *agentv1.SlotStatus {
	wanted := p.want()
	s := &agentv1.SlotStatus{Free: count(len(p.free)), Wanted: count(wanted)}
	switch {
	case p.config.Max == 0:
	case p.never != "":
		s.OffReason = p.never
	case p.failures >= tellAfter:
		s.OffReason = "starting slots fails: " + p.failure
	case wanted < p.bound():
		s.OffReason = "the node is short of memory"
	}
	return s
}

func count(n int) int32 { return int32(min(n, math.MaxInt32)) }

// want is how many free slots there should be. mu is held.
func (p *Pool) want() int {
	switch n := p.bound(); {
	case p.never != "":
		return 0
	case p.pressed:
		return min(n, p.config.Min)
	default:
		return n
	}
}

// bound is how many slots there is room for. mu is held.
func (p *Pool) bound() int {
	if p.config.Max >= 0 {
		return min(p.places, p.config.Max)
	}
	return p.places
}
