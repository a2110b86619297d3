// Package sweep removes orphans. It has each one confirmed by containerd and by the API server themselves, and then removes it with
// everything that belongs to it. A removal that fails, or an orphan that cannot be confirmed, is retried with backoff; a thing that
// turns out to be no orphan is dropped. Every step is idempotent: what a process that dies leaves half done, the next completes.
// All of it may be called concurrently.
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
	// retryMin and retryMax bound the backoff of one thing.
	retryMin, retryMax = 200 * time.Millisecond, 15 * time.Second
)

// Judge confirms that a thing is an orphan.
type Judge interface {
	// Confirm judges a thing by the live answers of containerd and of the API server; errdefs.ErrNotFound if it no longer exists.
	Confirm(ctx context.Context, key observe.Key) (observe.Finding, error)
	// Gone records that a thing was removed.
	Gone(key observe.Key)
}

// Remover removes things from the node. ctrd.Remover implements it.
type Remover interface {
	// Remove removes a container with everything that belongs to it.
	Remove(ctx context.Context, id string) error
	// RemovePiece removes a part of a container that has no record.
	RemovePiece(ctx context.Context, p ctrd.Piece) error
	// Measure returns approximately how many bytes the removal of a container frees.
	Measure(ctx context.Context, id string) int64
	// MarkDeleted records in a container's log directory, which is kept, that the container is deleted.
	MarkDeleted(id string) error
}

// Outcome is the result of sweeping one thing.
type Outcome uint8

// The outcomes.
const (
	// Deleted: it was removed with everything that belonged to it.
	Deleted Outcome = iota
	// WouldDelete: it would have been removed, but this is a dry run.
	WouldDelete
	// Kept: it is no orphan, or was not selected.
	Kept
	// Gone: it did not exist.
	Gone
	// Failed: a part of it still exists, or it could not be confirmed to be an orphan.
	Failed
)

// Result is what happened to one thing. Finding is its last confirmation; without one, it has only the key.
type Result struct {
	Finding observe.Finding
	Outcome Outcome
	Err     error
	// FreedBytes is the disk space that was freed.
	FreedBytes int64
}

// Config is what a Sweeper needs.
type Config struct {
	Judge   Judge
	Remover Remover
	// Policy is the janitor's policy: its LogRetention says whether output is kept.
	Policy verdict.Policy
	// Workers is the number of concurrent removals.
	Workers int
	// Report reports a deletion to people; nil means not at all.
	Report func(f observe.Finding)
	// Metrics of the sweeps; see NewMetrics. A nil Metrics counts nothing.
	Metrics *Metrics
	// Clock is the clock; nil means the real one.
	Clock clock.WithTicker
	Log   logr.Logger
}

// Sweeper removes orphans. Create it with New.
type Sweeper struct {
	config Config
	clock  clock.WithTicker
	queue  workqueue.TypedRateLimitingInterface[observe.Key]

	mu   sync.Mutex
	busy map[observe.Key]chan struct{} // closed when the sweep of the key has ended
}

// New returns a Sweeper with an empty queue.
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

// Add queues a thing for Run. It does not block.
func (s *Sweeper) Add(key observe.Key) { s.queue.Add(key) }

// Run sweeps queued things until ctx ends. A removal that is interrupted leaves an orphan, which is found again.
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
		s.config.Log.Info("orphan not removed yet", obs.KeyContainer, key.ID, obs.KeyRemnant, key.Remnant, obs.KeyError, r.Err.Error())
		s.queue.AddRateLimited(key)
	}
}

// Sweep confirms one thing and removes it if it is an orphan that wanted selects (nil selects all); a dry run removes nothing. It
// waits for another sweep of the same thing. It is safe to retry, also after ctx has ended in the middle.
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

// enter waits until no other sweep of the thing runs.
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

// remove removes a confirmed orphan, in a span that is linked to the call that created it.
func (s *Sweeper) remove(ctx context.Context, f observe.Finding) Result {
	var links []trace.Link
	if f.Traceparent != "" {
		links = append(links, trace.LinkFromContext(obs.WithTraceparent(context.Background(), f.Traceparent)))
	}
	ctx, span := obs.Tracer().Start(ctx, "janitor.sweep", trace.WithLinks(links...), trace.WithAttributes(
		attribute.String(obs.AttrContainer, f.Key.ID), attribute.String(obs.AttrReason, f.Verdict.Reason.String()), attribute.Bool(obs.AttrRemnant, f.Key.Remnant)))
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
	log := s.config.Log.WithValues(obs.KeyContainer, f.Key.ID, obs.KeyReason, f.Verdict.Reason.String(), obs.KeyFreedBytes, freed)
	if f.Key.Remnant {
		log.Info("remnant removed", obs.KeyKind, f.Key.Kind.String())
	} else {
		i := f.Observation.Identity
		log.Info("orphan removed", obs.KeySandbox, i.Namespace+"/"+i.Name, obs.KeySandboxUID, i.SandboxUID, obs.KeyAttempt, i.Attempt, obs.KeyAgentUID, i.AgentUID,
			obs.KeyState, f.Observation.Container.String())
	}
	if s.config.Report != nil {
		s.config.Report(f)
	}
	return Result{Finding: f, Outcome: Deleted, FreedBytes: freed}
}

func (s *Sweeper) removeAll(ctx context.Context, f observe.Finding) error {
	if !f.Key.Remnant {
		if s.config.Policy.LogRetention > 0 {
			// Before the record is removed: it is the evidence for a retry. A full or read-only disk does not keep the rest; the log
			// is then removed by its agent.
			if err := s.config.Remover.MarkDeleted(f.Key.ID); err != nil {
				s.config.Log.Error(err, "marking the log of an orphan", obs.KeyContainer, f.Key.ID)
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
