// Package leader elects one of several processes by a Lease, with client-go's algorithm, and gives each leadership a
// term: a number that grows with every change of leader, by which those who take orders (agents) refuse a leader that was
// deposed without knowing it. A controller-runtime manager takes a Lock; who wants to lead on while the API server is away
// takes an Elector.
//
//	           Lease written                   another holds the Lease
//	standby -------------------> leading -------------------------------> Run returns ErrDeposed
//	                              |   ^
//	  a higher term is in use     v   | Lease written, under a higher term
//	                            suspended ------------------------------> Run returns ErrDeposed
//
// While the API server is away nobody can be elected, so that a leader goes on: the Lease's time does not end its lead,
// another's name in the Lease, or a refusal of its term, does.
package leader

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// ErrDeposed tells that another process leads now. What this one has in memory is a former leader's: it ends.
var ErrLeadershipLost = errors.New("another process leads now")

// Defaults: a dead leader is replaced within about LeaseDuration + RetryPeriod.
const (
	DefaultLeaseDuration = 5 * time.Second
	DefaultRenewDeadline = 4 * time.Second
	DefaultRetryPeriod   = 500 * time.Millisecond
)

// Config is what an Elector needs.
type Config struct {
	// Leases reaches the API server.
	Leases coordinationv1.LeasesGetter
	// Namespace and Name of the Lease.
	Namespace, Name string
	// Identity names this process, and no other ever. State tells it to the others.
	Identity string
	// Timing; zero is the default.
	Timing
}

// Elector takes part in elections. Run is called once; all other methods may be called concurrently.
type Elector struct {
	*Lock

	config Config
}

// New returns an elector that is not running.
func New(cfg Config) *Elector {
	if cfg.Timing == (Timing{}) {
		cfg.Timing = DefaultTiming()
	}
	return &Elector{config: cfg, Lock: NewLock(&resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: cfg.Namespace, Name: cfg.Name},
		Client:     cfg.Leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: cfg.Identity},
	}, cfg.RenewDeadline/2)}
}

// Confirm tells whether this process leads for certain, so that nobody else has until now: its last write of the Lease is
// much too young for another to have taken it since, or the API server says so when asked. What State says is not certain
// after a pause of this process.
func (e *Elector) Confirm(ctx context.Context) (bool, error) {
	return e.confirm(ctx, e.config.LeaseDuration/2)
}

func (e *Elector) confirm(ctx context.Context, age time.Duration) (bool, error) {
	if e.Term() == 0 { // what a standby reads may be older than its election
		return false, nil
	}
	if !e.wroteWithin(age) {
		ctx, cancel := context.WithTimeout(ctx, e.timeout)
		defer cancel()
		// Not by the lock, whose Get prepares the election's next write.
		lease, err := e.config.Leases.Leases(e.config.Namespace).Get(ctx, e.config.Name, metav1.GetOptions{})
		if err != nil {
			return false, fmt.Errorf("reading the lease: %w", err)
		}
		e.mu.Lock()
		e.observe(resourcelock.LeaseSpecToLeaderElectionRecord(&lease.Spec))
		e.mu.Unlock()
	}
	return e.Term() > 0, nil
}

// Run takes part until ctx ends, gives the Lease up if it is held, and returns nil; or returns ErrDeposed.
func (e *Elector) Run(ctx context.Context) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- e.compete(inner) }()
	for {
		state, changed := e.State()
		if state.Lost {
			cancel()
			_ = <-ended // another holds it; how the attempt to renew ended tells nothing more
			return fmt.Errorf("%w: %s", ErrLeadershipLost, state.Holder)
		}
		select {
		case <-changed:
		case err := <-ended:
			e.release(context.WithoutCancel(ctx))
			return err
		}
	}
}

// compete runs one election after the other: client-go's elector ends when it could not renew in time.
func (e *Elector) compete(ctx context.Context) error {
	for ctx.Err() == nil {
		elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: e.Lock, Name: e.config.Name,
			LeaseDuration: e.config.LeaseDuration, RenewDeadline: e.config.RenewDeadline, RetryPeriod: e.config.RetryPeriod,
			// The lock tells all there is to know, and in order.
			Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
		})
		if err != nil {
			return fmt.Errorf("making the elector: %w", err)
		}
		elector.Run(ctx)
	}
	return nil
}

// release lets a successor in at once. Without it one waits for the Lease's end.
func (e *Elector) release(ctx context.Context) {
	record, _, err := e.Get(ctx)
	if err != nil || record.HolderIdentity != e.Identity() {
		return
	}
	now := metav1.Now()
	err = e.Update(ctx, resourcelock.LeaderElectionRecord{
		LeaderTransitions: record.LeaderTransitions, LeaseDurationSeconds: 1, RenewTime: now, AcquireTime: now,
	})
	if err != nil {
		logr.FromContextOrDiscard(ctx).V(2).Info("releasing the lease", "err", err.Error())
	}
}
