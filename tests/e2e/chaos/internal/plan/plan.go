// Package plan computes what a run of the fault harness does, and when, from a seed alone: the same seed, duration and
// rates give the same sandboxes, operations and faults in the same order, whatever the cluster answers.
// Pure; everything may be called concurrently.
package plan

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Options set the amount of load and faults.
type Options struct {
	Seed     uint64
	Duration time.Duration
	// Creates is the average number of creates per second.
	Creates float64
	// FaultEvery is the time between two faults, on average; it varies by half of it. Zero: no faults.
	FaultEvery time.Duration
	// MinLife and MaxLife are how long a sandbox is kept.
	MinLife, MaxLife time.Duration
}

// Kind is a kind of fault.
type Kind string

// The kinds of faults.
const (
	KillAllocator  Kind = "allocator-leader"
	KillController Kind = "controller-leader"
	KillAgent      Kind = "agent-process"
	KillAgentPod   Kind = "agent-pod"
	KillContainerd Kind = "containerd"
	// KillShim kills the process that a group of sandboxes is started by and reported by.
	KillShim      Kind = "shim"
	KillAPIServer Kind = "apiserver"
	KillJanitor   Kind = "janitor"
	KillGC        Kind = "gc-leader"
	KillGateway   Kind = "gateway"
	CutNetwork    Kind = "network-cut"
	// StallAllocator stops the leader's process for longer than its lease, and then resumes it.
	StallAllocator Kind = "allocator-stall"
)

// Kinds lists all kinds of faults.
func Kinds() []Kind {
	return []Kind{KillAllocator, KillController, KillAgent, KillAgentPod, KillContainerd, KillShim, KillAPIServer, KillJanitor, KillGC, KillGateway,
		CutNetwork, StallAllocator}
}

// Fault is one fault to inject. Pick chooses among the targets that exist; For is the duration of a fault that lasts.
type Fault struct {
	At   time.Duration
	Kind Kind
	Pick uint64
	For  time.Duration
}

// The kinds of steps.
const (
	SetLabel     = "label"
	MoveExpiry   = "move-expiry"
	RemoveExpiry = "remove-expiry"
	FlipPolicy   = "flip-policy"
	Reset        = "reset"
)

// Step is one update, some time after the create was acknowledged.
type Step struct {
	After time.Duration
	What  string
}

// Life is one sandbox: the create, and the operations on it.
type Life struct {
	Index int
	Name  string
	// At is when it is created. The second life of a name begins when the first is deleted.
	At time.Duration
	// Strong requests the strong mode; AutoRecreate is the failure policy, otherwise Manual.
	Strong, AutoRecreate bool
	// TTL is the time to its expiry; zero for none.
	TTL time.Duration
	// Exit is the code that its process ends with after a second; nil if it keeps running.
	Exit *int32
	// Twice sends the create twice at the same time.
	Twice bool
	// Overtake, if not zero, sends a delete this long after the create, without waiting for the create's answer.
	Overtake time.Duration
	// Steps are its updates, in the order of their times.
	Steps []Step
	// DeleteAfter is how long after its create was acknowledged it is deleted. Zero: it is kept until the end.
	DeleteAfter time.Duration
	// Again is created under the same name as soon as the delete is answered; Follows marks such a second life.
	Again   *Life
	Follows bool
}

// Plan is a whole run.
type Plan struct {
	Lives  []Life
	Faults []Fault
}

// New computes a plan.
func New(o Options) Plan {
	p := Plan{}
	index := 0
	// Separate random streams: the rate of one does not change the other.
	r := rand.New(rand.NewPCG(o.Seed, 1))
	for at := next(r, o.Creates); at < o.Duration; at += next(r, o.Creates) {
		p.Lives = append(p.Lives, life(r, o, at, &index, true))
	}
	if o.FaultEvery > 0 {
		p.Faults = faults(rand.New(rand.NewPCG(o.Seed, 2)), o)
	}
	return p
}

// next is the time to the next arrival of an open loop.
func next(r *rand.Rand, rate float64) time.Duration {
	return time.Duration(r.ExpFloat64() / rate * float64(time.Second))
}

func between(r *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(r.Int64N(max(int64(high-low), 1)))
}

func chance(r *rand.Rand, percent int) bool { return r.IntN(100) < percent }

func life(r *rand.Rand, o Options, at time.Duration, index *int, again bool) Life {
	l := Life{Index: *index, Name: fmt.Sprintf("s%d-%d", o.Seed, *index), At: at, Strong: chance(r, 15), AutoRecreate: chance(r, 50)}
	*index++
	span := between(r, o.MinLife, o.MaxLife)
	if at+span < o.Duration {
		l.DeleteAfter = span
	}
	switch kind := r.IntN(100); {
	case kind < 10:
		l.TTL = between(r, 2*time.Second, o.MaxLife)
	case kind < 16:
		code := int32(3 * r.IntN(2))
		l.Exit = &code
	case kind < 21:
		l.Overtake = between(r, time.Millisecond, 80*time.Millisecond)
	case kind < 26:
		l.Twice = true
	}
	if chance(r, 35) && l.Overtake == 0 && l.TTL == 0 {
		l.Steps = steps(r, span)
	}
	if again && l.DeleteAfter > 0 && chance(r, 8) {
		second := life(r, o, at+span, index, false)
		second.Name, second.Overtake, second.Follows = l.Name, 0, true
		l.Again = &second
	}
	return l
}

func steps(r *rand.Rand, span time.Duration) []Step {
	what := []string{SetLabel, SetLabel, MoveExpiry, RemoveExpiry, FlipPolicy, Reset}
	var out []Step
	for at := between(r, 0, span); at < span && len(out) < 4; at += between(r, 200*time.Millisecond, span) {
		out = append(out, Step{After: at, What: what[r.IntN(len(what))]})
	}
	return out
}

// faults takes the kinds from a shuffled list of all of them, again and again, so that all are equally frequent.
func faults(r *rand.Rand, o Options) []Fault {
	var out []Fault
	var pack []Kind
	for at := between(r, o.FaultEvery/2, o.FaultEvery); at < o.Duration; at += between(r, o.FaultEvery/2, 3*o.FaultEvery/2) {
		if len(pack) == 0 {
			pack = Kinds()
			r.Shuffle(len(pack), func(i, j int) { pack[i], pack[j] = pack[j], pack[i] })
		}
		out = append(out, Fault{At: at, Kind: pack[0], Pick: r.Uint64(), For: between(r, 3*time.Second, 12*time.Second)})
		pack = pack[1:]
	}
	return out
}

// All returns every life, second lives included, in the order of their numbers.
func (p Plan) All() []Life {
	var out []Life
	for _, l := range p.Lives {
		out = append(out, l)
		if l.Again != nil {
			out = append(out, *l.Again)
		}
	}
	return out
}
