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
	// vacantAge is how long a holder that has ended keeps the Lease; 0: until it expires.
	vacantAge time.Duration

	mu      sync.Mutex
	claim   claim
	changed chan struct{} // closed at each change of the state
}

// NewLock returns a lock over inner, which must not be used otherwise. Each call is bounded by timeout.
func NewLock(inner resourcelock.Interface, timeout time.Duration) *Lock {
	return &Lock{Interface: inner, timeout: timeout, claim: claim{identity: inner.Identity()}, changed: make(chan struct{})}
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
	return State{Term: l.claim.leading(), Holder: l.claim.holder, Lost: l.claim.lost}, l.changed
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
	if l.claim.superseded(term) {
		l.wake()
	}
}

// Get implements resourcelock.Interface. The Lease of a holder that has ended is returned as one without a holder, so that
// client-go's elector writes it before it has expired.
func (l *Lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	record, raw, err := l.Interface.Get(ctx)
	if err != nil {
		return record, raw, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.claim.read(record, now) {
		l.wake()
	}
	if l.claim.vacant(now, l.vacantAge) {
		free := *record
		free.HolderIdentity = ""
		return &free, raw, nil
	}
	return record, raw, nil
}

// Ended reports that the process that holds the Lease seems to have ended, so that this process need not wait for the expiry of the
// Lease if the holder no longer writes it. It must be repeated for as long as it seems so.
func (l *Lock) Ended(holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	suspected := l.claim.suspects(now, l.vacantAge)
	l.claim.report(holder, now)
	if !suspected && l.claim.suspects(now, l.vacantAge) {
		l.wake()
	}
}

// suspects reports whether the holder of the Lease is another process that seems to have ended.
func (l *Lock) suspects() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claim.suspects(time.Now(), l.vacantAge)
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
		l.mu.Lock()
		record.LeaderTransitions = int(l.claim.next(int64(record.LeaderTransitions)+1) - 1)
		l.mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	began := time.Now()
	if err := write(ctx, record); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if ours && l.claim.wroteTerm(int64(record.LeaderTransitions)+1, began) {
		l.wake()
	}
	l.observe(&record)
	return nil
}

// wroteWithin reports whether this process's last write of the Lease is younger than age.
func (l *Lock) wroteWithin(age time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claim.certain(time.Now(), age)
}

// observe records the content of the Lease. mu is held.
func (l *Lock) observe(record *resourcelock.LeaderElectionRecord) {
	if l.claim.observe(record) {
		l.wake()
	}
}

// wake signals a change. mu is held.
func (l *Lock) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}
