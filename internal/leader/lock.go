package leader

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// Lock is a Lease lock that knows the term under which this process holds it. The term is one more than the Lease's
// leaseTransitions, which increases with each change of the holder. After a deletion of the Lease it would start from zero,
// below the terms that agents remember. So the next write continues from the highest term that its process has seen, or from
// the one that Superseded reported. Lock implements resourcelock.Interface, for client-go's elector and a controller-runtime
// manager, and rpc.Leader. All methods may be called concurrently.
type Lock struct {
	resourcelock.Interface

	timeout time.Duration

	mu     sync.Mutex
	term   int64     // of this process's last write; 0 if there was none
	wrote  time.Time // when this process began its last successful write
	floor  int64     // the lowest term that the next write may carry
	seen   int64     // the highest term that the Lease had
	holder string
	// lost is set once another process held the Lease after this one.
	lost    bool
	changed chan struct{} // closed at each change of the above
}

// NewLock returns a lock over inner, which must not be used otherwise. Each call is bounded by timeout.
func NewLock(inner resourcelock.Interface, timeout time.Duration) *Lock {
	return &Lock{Interface: inner, timeout: timeout, changed: make(chan struct{})}
}

// State is the state of a Lock.
type State struct {
	// Term is the term under which this process holds the Lease, as far as it knows; 0 if it does not hold the Lease, or a
	// higher term is known.
	Term int64
	// Holder is the identity of the last known holder; empty if none is known.
	Holder string
	// Lost is set once another process held the Lease after this one. It stays set.
	Lost bool
}

// State returns the current state, and a channel that is closed when it has changed.
func (l *Lock) State() (State, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := State{Holder: l.holder, Lost: l.lost}
	if l.term >= l.floor && l.holder == l.Identity() && !l.lost {
		s.Term = l.term
	}
	return s, l.changed
}

// Term implements rpc.Leader: State's term.
func (l *Lock) Term() int64 {
	s, _ := l.State()
	return s.Term
}

// Superseded implements rpc.Leader: the term, which is not this process's, is in use. If this process still holds the Lease, its
// next write takes a higher term; if not, that write fails.
func (l *Lock) Superseded(term int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if term >= max(l.term, l.floor) { // otherwise the answer is outdated
		l.floor = term + 1
		l.wake()
	}
}

// Get implements resourcelock.Interface.
func (l *Lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	record, raw, err := l.Interface.Get(ctx)
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.observe(record)
	}
	return record, raw, err
}

// Create implements resourcelock.Interface.
func (l *Lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Create)
}

// Update implements resourcelock.Interface.
func (l *Lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Update)
}

func (l *Lock) write(ctx context.Context, record resourcelock.LeaderElectionRecord, write func(context.Context, resourcelock.LeaderElectionRecord) error) error {
	ours := record.HolderIdentity == l.Identity()
	if ours {
		record.LeaderTransitions = int(l.next(int64(record.LeaderTransitions)+1) - 1)
	}
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	began := time.Now()
	if err := write(ctx, record); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if ours {
		l.wrote = began
	}
	if term := int64(record.LeaderTransitions) + 1; ours && term != l.term {
		l.term = term
		l.wake()
	}
	l.observe(&record)
	return nil
}

// wroteWithin reports whether this process's last write of the Lease is younger than age.
func (l *Lock) wroteWithin(age time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Since(l.wrote) < age
}

// next returns the term of a write that would carry term: it is not lower than any known term.
func (l *Lock) next(term int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder == l.Identity() { // a renewal
		return max(term, l.floor, l.term)
	}
	return max(term, l.floor, l.seen+1)
}

// observe records the content of the Lease. mu is held.
func (l *Lock) observe(record *resourcelock.LeaderElectionRecord) {
	l.seen = max(l.seen, int64(record.LeaderTransitions)+1)
	holder := record.HolderIdentity
	if holder == l.holder {
		return
	}
	l.holder = holder
	l.lost = l.lost || l.term > 0 && holder != "" && holder != l.Identity()
	l.wake()
}

// wake signals a change. mu is held.
func (l *Lock) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}
