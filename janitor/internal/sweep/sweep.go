// Package sweep carries out what was judged to be deleted: it has each orphan confirmed, by containerd and by the API server
// itself, and removes it then, with all that belongs to it. An orphan that cannot be removed, or about which nobody says
// anything, is tried again, later and later; one that is none any more is let be. Every step can be repeated, so that a
// process that dies in the middle of one leaves nothing that the next does not finish. All of it may be called concurrently.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	// sweepTimeout bounds one removal.
	sweepTimeout = time.Minute
	// retryMin and retryMax bound the time between two tries at one thing.
	retryMin, retryMax = 200 * time.Millisecond, 15 * time.Second
)

// Judge confirms that a thing is an orphan.
type Judge interface {
	// Confirm judges a thing anew by what containerd and the API server themselves say; errdefs.ErrNotFound if it is no more.
	Confirm(ctx context.Context, key observe.Key) (observe.Finding, error)
	// Gone forgets what is no more.
	Gone(key observe.Key)
}

// Remover removes. ctrd.Remover is one.
type Remover interface {
	// Remove removes a container with all that belongs to it.
	Remove(ctx context.Context, id string) error
	// RemovePiece removes something that has no container.
	RemovePiece(ctx context.Context, p ctrd.Piece) error
	// Measure is about how many bytes the removal of a container frees.
	Measure(ctx context.Context, id string) int64
	// MarkDeleted notes beside a container's output, which is kept, that the container is deleted.
	MarkDeleted(id string) error
}

// Outcome is what became of one thing.
type Outcome uint8

// The outcomes.
const (
	// Deleted: it is gone, with all that belonged to it.
	Deleted Outcome = iota
	// WouldDelete: it would be, were this no dry run.
	WouldDelete
	// Kept: it is not to be deleted, or not selected.
	Kept
	// Gone: it was gone before.
	Gone
	// Failed: something of it is still there, or nobody could say whether it is an orphan.
	Failed
)

// Result is what became of one thing. Finding is the last look at it; it has its key alone if there was none.
type Result struct {
	Finding observe.Finding
	Outcome Outcome
	Err     error
	// FreedBytes is what it took on the disk.
	FreedBytes int64
}

// Config is what a Sweeper needs.
type Config struct {
	Judge   Judge
	Remover Remover
	// Policy is what was judged by: its LogRetention says whether output is kept.
	Policy verdict.Policy
	// Workers is how many things are removed at once.
	Workers int
	// Tell tells people of a deletion; nil for nobody.
	Tell func(f observe.Finding)
	// Metrics of the sweeps; see NewMetrics. nil counts nothing.
	Metrics *Metrics
	// Clock; nil is the real one.
	Clock clock.WithTicker
	Log   logr.Logger
}

// Sweeper removes orphans. Make it with New.
type Sweeper struct {
	config Config
	clock  clock.WithTicker
	queue  workqueue.TypedRateLimitingInterface[observe.Key]

	mu   sync.Mutex
	busy map[observe.Key]chan struct{} // closed when a sweep of it is over
}

// New returns a Sweeper with nothing to do.
func New(cfg Config) *Sweeper {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[observe.Key](retryMin, retryMax)
	return &Sweeper{
		config: cfg, clock: cfg.Clock, busy: map[observe.Key]chan struct{}{},
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[observe.Key]{Clock: cfg.Clock}),
	}
}

// Add has a thing swept by Run. It does not block.
func (s *Sweeper) Add(key observe.Key) { s.queue.Add(key) }

// Run sweeps what is added until ctx ends. What is being removed then is left as it is: it is an orphan still.
func (s *Sweeper) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for range s.config.Workers {
		wg.Go(func() {
			for {
				key, stop := s.queue.Get()
				if stop {
					return
				}
				s.work(ctx, key)
				s.queue.Done(key)
			}
		})
	}
	<-ctx.Done()
	s.queue.ShutDown()
	wg.Wait()
	return nil
}

func (s *Sweeper) work(ctx context.Context, key observe.Key) {
	if ctx.Err() != nil {
		return
	}
	r := s.Sweep(ctx, key, nil, false)
	if r.Outcome != Failed {
		s.queue.Forget(key)
		return
	}
	if ctx.Err() == nil {
		s.config.Log.Info("orphan not removed yet", "container", key.ID, "remnant", key.Remnant, "err", r.Err.Error())
		s.queue.AddRateLimited(key)
	}
}

// Sweep has one thing confirmed and, if it is an orphan that wanted (nil: every one is) selects, removed; in a dry run, it is
// kept. It waits for another sweep of the same thing. A sweep that is cut short by the end of ctx can be done again.
func (s *Sweeper) Sweep(ctx context.Context, key observe.Key, wanted func(verdict.Verdict) bool, dryRun bool) Result {
	leave, err := s.enter(ctx, key)
	if err != nil {
		return Result{Finding: observe.Finding{Key: key}, Outcome: Failed, Err: err}
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	f, err := s.config.Judge.Confirm(ctx, key)
	switch {
	case errdefs.IsNotFound(err):
		return Result{Finding: observe.Finding{Key: key}, Outcome: Gone}
	case err != nil:
		s.config.Metrics.unconfirmed()
		return Result{Finding: observe.Finding{Key: key}, Outcome: Failed, Err: fmt.Errorf("confirming that %s is an orphan: %w", key.ID, err)}
	case f.Verdict.Action != verdict.Delete || (wanted != nil && !wanted(f.Verdict)):
		return Result{Finding: f, Outcome: Kept}
	case dryRun:
		return Result{Finding: f, Outcome: WouldDelete, FreedBytes: s.measure(ctx, f)}
	}
	return s.remove(ctx, f)
}

// enter waits until nobody sweeps the thing.
func (s *Sweeper) enter(ctx context.Context, key observe.Key) (leave func(), err error) {
	for {
		s.mu.Lock()
		other := s.busy[key]
		if other == nil {
			mine := make(chan struct{})
			s.busy[key] = mine
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				delete(s.busy, key)
				s.mu.Unlock()
				close(mine)
			}, nil
		}
		s.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *Sweeper) measure(ctx context.Context, f observe.Finding) int64 {
	if f.Key.Remnant && f.Key.Kind != verdict.Snapshot && f.Key.Kind != verdict.Log {
		return 0
	}
	return s.config.Remover.Measure(ctx, f.Key.ID)
}

// remove removes what was confirmed to be an orphan, under a span that is linked to the call that created it.
func (s *Sweeper) remove(ctx context.Context, f observe.Finding) Result {
	var links []trace.Link
	if f.Traceparent != "" {
		links = append(links, trace.LinkFromContext(obs.WithTraceparent(context.Background(), f.Traceparent)))
	}
	ctx, span := obs.Tracer().Start(ctx, "janitor.sweep", trace.WithLinks(links...), trace.WithAttributes(
		attribute.String("container", f.Key.ID), attribute.String("reason", f.Verdict.Reason.String()), attribute.Bool("remnant", f.Key.Remnant)))
	defer span.End()
	started := s.clock.Now()
	freed := s.measure(ctx, f)
	err := s.removeAll(ctx, f)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		s.config.Metrics.failed(f.Verdict.Reason)
		return Result{Finding: f, Outcome: Failed, Err: fmt.Errorf("removing orphan %s: %w", f.Key.ID, err), FreedBytes: 0}
	}
	now := s.clock.Now()
	s.config.Judge.Gone(f.Key)
	s.config.Metrics.deleted(f, now.Sub(started), now.Sub(f.Orphan), freed)
	log := s.config.Log.WithValues("container", f.Key.ID, "reason", f.Verdict.Reason.String(), "freedBytes", freed)
	if f.Key.Remnant {
		log.Info("leftover removed", "kind", f.Key.Kind.String())
	} else {
		i := f.Observation.Identity
		log.Info("orphan removed", "sandbox", i.Namespace+"/"+i.Name, "sandboxUID", i.SandboxUID, "attempt", i.Attempt, "agentUID", i.AgentUID,
			"state", f.Observation.Container.String())
	}
	if s.config.Tell != nil {
		s.config.Tell(f)
	}
	return Result{Finding: f, Outcome: Deleted, FreedBytes: freed}
}

func (s *Sweeper) removeAll(ctx context.Context, f observe.Finding) error {
	if !f.Key.Remnant {
		if s.config.Policy.LogRetention > 0 {
			// Before the record goes: it is the evidence of whoever has to go on with this. A disk that is full, or cannot be
			// written to, is no reason to keep the rest; the log is then its agent's to remove.
			if err := s.config.Remover.MarkDeleted(f.Key.ID); err != nil {
				s.config.Log.Error(err, "keeping the output of an orphan", "container", f.Key.ID)
				s.config.Metrics.unnoted()
			}
		}
		return s.config.Remover.Remove(ctx, f.Key.ID)
	}
	var errs []error
	for _, p := range f.Pieces {
		errs = append(errs, s.config.Remover.RemovePiece(ctx, p))
	}
	return errors.Join(errs...)
}
