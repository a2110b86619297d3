// Package slot keeps an agent's slots: containers that are started ahead of time, one for each free capacity unit, so that
// a create only has to claim one. It decides how many there are, starts and removes them in the background, and hands them
// out. It never claims one: runtime.Slots defines what a slot is and how it is claimed. All methods of Pool may be called
// concurrently.
//
// The life of a slot:
//
//	            started, warmed             Take              SlotClaimed
//	(nothing) ------------------> [free] ----------> [taken] -------------> a sandbox
//	                                 |                  |
//	                                 | ended, too many, | Drop
//	                                 | memory is short  v
//	                                 +-----------> [garbage] ----------> (nothing)
//
// The lock guards the lists; it is never held over I/O. A caller may hold its own lock while it calls a Pool: Run calls
// changed without the lock.
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
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
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
	// AgentUID and AgentPool are the agent and the pool that the slots belong to.
	AgentUID, AgentPool string
	// AgentProcess identifies this process of the agent.
	AgentProcess string
	// Max bounds the number of free slots; below zero the bound is the agent's free capacity. Min of them are kept when memory
	// is short.
	Min, Max int
	// Starters is how many slots are started concurrently while no create runs. Zero: one.
	Starters int
	// Memory returns the machine's memory. Nil: /proc/meminfo.
	Memory func() (Memory, error)
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Pool keeps the slots of one agent. Make it with New; Run does its work.
type Pool struct {
	config Config
	clock  clock.WithTicker
	wake   chan struct{}
	wg     sync.WaitGroup // the work that Run has begun

	mu       sync.Mutex
	room     int // free capacity units of the agent
	free     []*free
	starting int
	warming  bool
	cleaning int
	garbage  []string  // ids to remove
	busy     int       // creates that run
	recent   []string  // images of the last claims, the latest first
	group    string    // the group of the next slot
	members  int       // slots in that group
	never    string    // why there can be no slots
	short    bool      // memory is short
	failures int       // starts that failed in a row
	failure  string    // the error of the last one
	notUntil time.Time // when the next start may be attempted
	missing  time.Time // since when a slot is missing; zero if none is
	retry    *backoff.Backoff
}

// free is a slot that can be claimed.
type free struct {
	id string
	// image is what the slot is warm for, or is being warmed for; empty for none.
	image string
	// unwatch ends the watching of its process.
	unwatch context.CancelFunc
}

// New returns a Pool that has no slots yet.
func New(cfg Config) *Pool {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.Memory == nil {
		cfg.Memory = readMemory
	}
	cfg.Starters = max(cfg.Starters, 1)
	return &Pool{config: cfg, clock: cfg.Clock, wake: make(chan struct{}, 1), retry: backoff.New(cfg.Clock, retries)}
}

// SetRoom sets for how many more sandboxes the agent has room: that many slots can be of use.
func (p *Pool) SetRoom(n int) {
	p.change(func() { p.room = max(n, 0) })
}

// Begin notes that a create runs, until done is called. Slots are started when no create has to wait for that, and the slot
// that the create may take is not removed although the room has shrunk.
func (p *Pool) Begin() (done func()) {
	p.change(func() { p.busy++ })
	return func() { p.change(func() { p.busy-- }) }
}

// recentImages is how many images are remembered for warming.
const recentImages = 4

// Take hands out a free slot, one that is warm for the image if there is one. From then on the slot is the caller's: it
// becomes a sandbox, or the caller passes it to Drop.
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
		f.unwatch()
		p.free = slices.Delete(p.free, best, best+1)
		id, ok = f.id, true
	})
	return id, ok
}

// fits returns a rank: the higher, the less work a claim with the image has. A slot that is warm for another image has the
// most, because its snapshot is replaced.
func (f *free) fits(image string) int {
	switch f.image {
	case image:
		return 2
	case "":
		return 1
	}
	return 0
}

// Drop has slots removed that were taken and not claimed, or that an earlier agent process left.
func (p *Pool) Drop(ids ...string) {
	p.change(func() { p.garbage = append(p.garbage, ids...) })
}

// change changes the state and wakes Run.
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

// status returns the status to report. mu is held.
func (p *Pool) status() *agentv1.SlotStatus {
	wanted := p.want()
	s := &agentv1.SlotStatus{Free: count(len(p.free)), Wanted: count(wanted)}
	switch {
	case p.config.Max == 0:
	case p.never != "":
		s.OffReason = p.never
	case p.failures >= reportAfter:
		s.OffReason = "starting slots fails: " + p.failure
	case wanted < p.bound():
		s.OffReason = "the node is short of memory"
	}
	return s
}

func count(n int) int32 { return int32(min(n, math.MaxInt32)) }

// want returns how many free slots there should be. mu is held.
func (p *Pool) want() int {
	switch n := p.bound(); {
	case p.never != "":
		return 0
	case p.short:
		return min(n, p.config.Min)
	default:
		return n
	}
}

// bound returns how many slots there is room for. mu is held.
func (p *Pool) bound() int {
	if p.config.Max >= 0 {
		return min(p.room, p.config.Max)
	}
	return p.room
}
