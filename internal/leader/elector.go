// Package leader elects one of several processes by a Lease, with client-go's algorithm, and gives each leadership a term: a
// number that increases with every change of leader, by which agents refuse a former leader that does not know yet that it lost
// leadership. A controller-runtime manager uses a Lock. A process that continues to lead while the API server is unreachable
// uses an Elector. Both own the Lease; all methods but Run may be called concurrently.
//
//	           Lease written                   another holds the Lease
//	standby -------------------> leading -------------------------------> Run returns ErrLeadershipLost
//	                              |   ^
//	  a higher term is in use     v   | Lease written, under a higher term
//	                            suspended ------------------------------> Run returns ErrLeadershipLost
//
// While the API server is unreachable no process can be elected, so the leader continues: the expiry of the Lease does not end
// its leadership, but another holder of the Lease does, or a refusal of its term.
package leader

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// ErrLeadershipLost is returned when another process leads. This process has the memory of a former leader, so it must end
// or start again.
var ErrLeadershipLost = errors.New("another process leads now")

// suspectedPeriod is the interval in which the Lease is read while its holder seems to have ended.
const suspectedPeriod = 50 * time.Millisecond

// Defaults: a dead leader is replaced within about LeaseDuration + RetryPeriod, and within a quarter of that if it is known to have ended.
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
	// Identity identifies this process uniquely, for all time. Other processes see it as State.Holder.
	Identity string
	// Timing of the election. Zero: the default.
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
	lock := NewLock(&resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: cfg.Namespace, Name: cfg.Name},
		Client:     cfg.Leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: cfg.Identity},
	}, cfg.RenewDeadline/2)
	lock.vacantAge = cfg.vacantAge()
	return &Elector{config: cfg, Lock: lock}
}

// Confirm reports whether this process certainly leads, so that no other process has led until now: its last write of the Lease
// is too recent for another process to have acquired it since, or the API server confirms it. State alone is not certain after
// this process was suspended.
func (e *Elector) Confirm(ctx context.Context) (bool, error) {
	return e.confirm(ctx, e.config.certainAge())
}

func (e *Elector) confirm(ctx context.Context, age time.Duration) (bool, error) {
	if e.Term() == 0 { // a standby may read a Lease that is older than its election
		return false, nil
	}
	if !e.wroteWithin(age) {
		ctx, cancel := context.WithTimeout(ctx, e.timeout)
		defer cancel()
		// The lock's Get would prepare the election's next write.
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

// Run takes part in elections until ctx ends, then releases the Lease if it is held, and returns nil; or it returns ErrLeadershipLost.
func (e *Elector) Run(ctx context.Context) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- e.compete(inner) }()
	for {
		state, changed := e.State()
		if state.Lost {
			cancel()
			_ = <-ended // another process holds it: the result of the renewal does not matter
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

// compete runs one election after the other: client-go's elector ends when it cannot renew in time.
func (e *Elector) compete(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := e.elect(ctx, e.suspects()); err != nil {
			return err
		}
	}
	return nil
}

// elect runs one election. While the holder is suspected it reads the Lease often, until this process leads or the suspicion is over;
// client-go's elector has one interval for reading and for renewing.
func (e *Elector) elect(ctx context.Context, suspected bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	period := e.config.RetryPeriod
	if suspected {
		period = min(period, suspectedPeriod)
		ctx, cancel = context.WithTimeout(ctx, 2*e.config.vacantAge())
		defer cancel()
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: e.Lock, Name: e.config.Name,
		LeaseDuration: e.config.LeaseDuration, RenewDeadline: e.config.RenewDeadline, RetryPeriod: period,
		// The lock reports all changes, in order.
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
	})
	if err != nil {
		return fmt.Errorf("making the elector: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer cancel()
		for {
			_, changed := e.State()
			if e.suspects() != suspected {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	})
	elector.Run(ctx)
	return nil
}

// Inherit releases the Lease if its holder is a process that has certainly ended, as an earlier run of this one has, so that
// others need not wait for its expiry. It must be called before Run. A failure costs no more than that wait.
func (e *Elector) Inherit(ctx context.Context, ended func(holder string) bool) {
	e.releaseOf(ctx, ended)
}

// release releases the Lease, so that a successor need not wait for its expiry.
func (e *Elector) release(ctx context.Context) {
	e.releaseOf(ctx, func(holder string) bool { return holder == e.Identity() })
}

func (e *Elector) releaseOf(ctx context.Context, holder func(string) bool) {
	record, _, err := e.Get(ctx)
	if err != nil || record.HolderIdentity == "" || !holder(record.HolderIdentity) {
		return
	}
	now := metav1.Now()
	err = e.Update(ctx, resourcelock.LeaderElectionRecord{
		LeaderTransitions: record.LeaderTransitions, LeaseDurationSeconds: 1, RenewTime: now, AcquireTime: now,
	})
	if err != nil {
		logr.FromContextOrDiscard(ctx).V(2).Info("releasing the lease", obs.KeyError, err.Error())
	}
}
