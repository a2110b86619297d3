// Package sandbox reconciles Sandbox resources: it observes the resource, the agents' reports and the clock, asks the state
// machine of internal/lifecycle for the next phase and the actions, and carries the actions out. It never writes a spec, and
// writes a status at most once in a reconcile.
//
// The assignment is written before an agent is asked for a container, so that a controller that starts at any point finds what
// the one before it has started. One worker reconciles a Sandbox at a time. Calls that may take long run in the background
// (calls), and reconcile the Sandbox again when they end.
//
// A reconcile is a sequence of steps, each of which returns a result:
//
//	leftovers -> pools -> ttl -> removeStale -> observer -> lifecycle.Next -> actions -> conclude -> announce
//	                                              ^                              |
//	                                              +------ up to maxSteps --------+
//
// The actions are those of the placer, the creator and the remover.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/feed"
)

const (
	// maxSteps bounds the events that one reconcile processes. A whole lifecycle has fewer.
	maxSteps = 8
	// cacheDelay is the time after which an outdated cache is read again. Usually its event comes first.
	cacheDelay = 20 * time.Millisecond
)

// Agents are the connections to agents. *agents.Conns implements it.
type Agents interface {
	// Client returns a client of the agent whose Pod has the uid, at the address. It does no I/O.
	Client(address, agentUID string) (agentv1.AgentServiceClient, error)
	// Snapshot returns the agent's own snapshot, which may be 2 s old. It fails if the agent does not answer within 2 s, or if
	// another agent has the address.
	Snapshot(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)
	// FreshSnapshot is like Snapshot, but always asks the agent.
	FreshSnapshot(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)
}

// Timing has the intervals of seed 002.
type Timing struct {
	// Requeue is the interval of retries, and the longest time between two reconciles of a sandbox that makes progress.
	Requeue time.Duration
	// DeletionPoll is the same for a deletion.
	DeletionPoll time.Duration
	// ExpirationThreshold is the time before its expire time at which a sandbox is reconciled.
	ExpirationThreshold time.Duration
}

// Config has the dependencies of the reconciler. All fields are required.
type Config struct {
	// Client reads from the cache; Live reads from the API server.
	Client client.Client
	Live   client.Reader
	// Allocator reserves capacity.
	Allocator allocatorv1.AllocatorServiceClient
	// Agents run the containers.
	Agents Agents
	// Index has the agents' reports.
	Index *agents.Index
	// Recorder writes Events.
	Recorder events.EventRecorder
	// Clock is the time.
	Clock clock.Clock
	// Timing has the intervals.
	Timing Timing
	// Workers is the number of sandboxes that are reconciled at a time.
	Workers int
	// Metrics registers the metrics.
	Metrics prometheus.Registerer
}

// Reconciler reconciles Sandboxes. Create it with New.
type Reconciler struct {
	config Config

	changed    *feed.Feed[types.NamespacedName]
	resynced   *feed.Feed[struct{}]
	background *background
	memory     *memory
	creates    *calls
	deletes    *calls

	writer    *writer
	pools     *pools
	leftovers *leftovers
	ttl       *ttl
	observer  *observer
	placer    *placer
	creator   *creator
	remover   *remover
	announcer *announcer
}

// New returns a reconciler that is not started.
func New(cfg Config) (*Reconciler, error) {
	metrics, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, err
	}
	r := &Reconciler{
		config: cfg, changed: feed.New[types.NamespacedName](), resynced: feed.New[struct{}](), background: newBackground(), memory: newMemory(cfg.Clock),
	}
	r.creates, r.deletes = newCalls(cfg.Clock, r.background, r.changed.Send), newCalls(cfg.Clock, r.background, r.changed.Send)
	access := &agentAccess{client: cfg.Client, live: cfg.Live, index: cfg.Index, calls: cfg.Agents}
	events, timing := eventWriter{cfg.Recorder}, cfg.Timing
	deleter := &deleter{agents: access, calls: r.deletes, metrics: metrics}
	r.writer = &writer{client: cfg.Client, memory: r.memory}
	r.pools = &pools{client: cfg.Client, agents: access}
	r.leftovers = &leftovers{live: cfg.Live, deleter: deleter, allocator: cfg.Allocator, background: r.background, memory: r.memory,
		timing: timing, clock: cfg.Clock, forget: r.forget}
	r.ttl = &ttl{client: cfg.Client, pools: r.pools, events: events}
	r.observer = &observer{loss: &lossDetector{agents: access, memory: r.memory, timing: timing, heartbeatTimeout: cfg.Index.HeartbeatTimeout}, memory: r.memory, timing: timing,
		reports: &reportObserver{agents: access, memory: r.memory, timing: timing,
			creates: &createObserver{calls: r.creates, memory: r.memory, timing: timing, events: events}}}
	r.placer = &placer{allocator: cfg.Allocator, explainer: &explainer{pools: r.pools, index: cfg.Index}, writer: r.writer, memory: r.memory,
		timing: timing, metrics: metrics}
	r.creator = &creator{agents: access, pools: r.pools, calls: r.creates, memory: r.memory, timing: timing, metrics: metrics}
	r.remover = &remover{deleter: deleter, allocator: cfg.Allocator, creates: r.creates, deletes: r.deletes, writer: r.writer, timing: timing}
	r.announcer = &announcer{events: events, memory: r.memory, metrics: metrics}
	return r, nil
}

// forget drops the calls on a sandbox and all that is remembered of it.
func (r *Reconciler) forget(n types.NamespacedName) {
	r.creates.forget(n)
	r.deletes.forget(n)
	r.memory.forget(n)
}

// Reconcile reconciles one Sandbox. It implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var s v1alpha1.Sandbox
	if err := r.config.Client.Get(ctx, req.NamespacedName, &s); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return reconcile.Result{}, fmt.Errorf("reading sandbox: %w", err)
		}
		err := r.leftovers.collect(ctx, req.NamespacedName, "")
		if err == nil {
			r.forget(req.NamespacedName)
		}
		return reconcile.Result{}, err
	}
	if err := r.leftovers.collect(ctx, req.NamespacedName, s.EffectiveUID()); err != nil {
		return reconcile.Result{}, err
	}
	if r.memory.stale(req.NamespacedName, s.ResourceVersion) {
		return reconcile.Result{RequeueAfter: cacheDelay}, nil
	}
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, req.String(), obs.KeySandboxUID, s.EffectiveUID()))
	return r.reconcile(ctx, newTarget(&s, r.config.Clock.Now()))
}

func (r *Reconciler) reconcile(ctx context.Context, t *target) (reconcile.Result, error) {
	done, lost, err := r.advance(ctx, t)
	if done.finalized {
		r.forget(t.name)
		return reconcile.Result{}, err
	}
	if !outdated(err) {
		err = errors.Join(err, r.writeStatus(ctx, t, done, lost))
	}
	if outdated(err) {
		return reconcile.Result{RequeueAfter: cacheDelay}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: done.requeue}, nil
}

// outdated reports whether an error says that the cache is outdated: the resource was changed or removed since it was read.
func outdated(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// advance processes events until there is none, or until something has to be waited for. It returns the results of all steps,
// and whether the agent is lost.
func (r *Reconciler) advance(ctx context.Context, t *target) (total result, lost bool, err error) {
	if total, ready, err := r.prepare(ctx, t); err != nil || !ready {
		return total, t.wasLost(), err
	}
	if total, err = r.ttl.reconcile(ctx, t); err != nil {
		return total, t.wasLost(), err
	}
	total = total.merge(r.remover.removeStale(ctx, t))
	var event lifecycle.Event
	for range maxSteps {
		if event == 0 {
			seen, err := r.observer.observe(ctx, t)
			total, lost, event = total.merge(seen.result), seen.lost, seen.event
			if err != nil || event == 0 {
				return total, lost, err
			}
		}
		phase, actions, ok := lifecycle.Next(t.state(), event)
		if !ok {
			return total, lost, nil
		}
		old := t.sandbox.Status.Phase
		moved := t.enter(phase)
		if moved && phase != lifecycle.Gone {
			logr.FromContextOrDiscard(ctx).Info("phase changed", obs.KeyFrom, old, obs.KeyTo, phase, obs.KeyEvent, event.String())
		}
		did, err := r.act(ctx, t, event, actions, total.cause)
		total = total.merge(did.result)
		if err != nil || !did.done || total.finalized || !moved && len(actions) == 0 {
			return total, lost, err
		}
		event = did.next
	}
	return total.merge(result{requeue: cacheDelay}), lost, nil
}

// prepare decodes the assignment, adds the finalizer and fills in the parts of the status that do not depend on events. It
// reports false if the sandbox cannot be processed.
func (r *Reconciler) prepare(ctx context.Context, t *target) (result, bool, error) {
	if err := r.assignment(t); err != nil {
		// A container may be running: not even a deletion can be carried out until the annotation is corrected.
		why := &cause{"AssignmentInvalid", err.Error()}
		return result{requeue: after(r.config.Timing.Requeue), cause: why, blocked: why}, false, nil //nolint:nilerr // the cause carries it
	}
	if !t.deleting() && controllerutil.AddFinalizer(t.sandbox, v1alpha1.Finalizer) {
		if err := r.writer.metadata(ctx, t); err != nil {
			return result{}, false, fmt.Errorf("adding finalizer: %w", err)
		}
	}
	if t.deleting() && !controllerutil.ContainsFinalizer(t.sandbox, v1alpha1.Finalizer) {
		return result{finalized: true}, false, nil
	}
	st := &t.sandbox.Status
	if st.Phase == "" && st.AcceptedResetRevision == nil {
		st.AcceptedResetRevision = t.sandbox.Spec.ResetRevision // a revision that the resource was created with is no request
	}
	recordAssignment(t, r.memory)
	return result{}, true, r.pools.resolve(ctx, t)
}

// assignment decodes the assignment, and returns an error for one that cannot be followed.
func (r *Reconciler) assignment(t *target) (err error) {
	if t.assignment, err = t.sandbox.Assignment(); err != nil {
		return err
	}
	if err = r.remover.deleter.agents.verify(t); err != nil {
		t.assignment = nil
	}
	return err
}

// act carries out actions, until one has to wait. why is the cause of the event.
func (r *Reconciler) act(ctx context.Context, t *target, event lifecycle.Event, actions []lifecycle.Action, why *cause) (progress, error) {
	total := progress{done: true}
	for _, a := range actions {
		p, err := r.actOne(ctx, t, event, a, why)
		p.result = total.merge(p.result)
		total = p
		if err != nil || !p.done {
			return total, err
		}
	}
	return total, nil
}

func (r *Reconciler) actOne(ctx context.Context, t *target, event lifecycle.Event, a lifecycle.Action, why *cause) (progress, error) {
	switch a {
	case lifecycle.Allocate:
		return r.placer.allocate(ctx, t)
	case lifecycle.Create:
		return r.creator.create(ctx, t), nil
	case lifecycle.Remove:
		return r.remover.remove(ctx, t, event)
	case lifecycle.Release:
		return r.remover.release(ctx, t)
	case lifecycle.AcceptReset:
		t.sandbox.Status.AcceptedResetRevision = t.sandbox.Spec.ResetRevision
		clearEnd(&t.sandbox.Status)
		return progress{done: true}, nil
	case lifecycle.RecordEnd:
		recordEnd(t, why)
		return progress{}, nil
	case lifecycle.MarkLost: // conclude sets the condition
		return progress{}, nil
	case lifecycle.Finalize:
		return r.finalize(ctx, t)
	default:
		return progress{}, fmt.Errorf("event %s: unknown action %q", event, a)
	}
}

// finalize removes the finalizer.
func (r *Reconciler) finalize(ctx context.Context, t *target) (progress, error) {
	controllerutil.RemoveFinalizer(t.sandbox, v1alpha1.Finalizer)
	if err := r.writer.metadata(ctx, t); client.IgnoreNotFound(err) != nil {
		return progress{}, fmt.Errorf("removing finalizer: %w", err)
	}
	return progress{done: true, result: result{finalized: true}}, nil
}

// writeStatus writes the status if it has changed, and then Events for the changes.
func (r *Reconciler) writeStatus(ctx context.Context, t *target, done result, lost bool) error {
	conclude(t, done, lost)
	if equality.Semantic.DeepEqual(t.base.Status, t.sandbox.Status) {
		return nil
	}
	if err := r.writer.status(ctx, t); err != nil {
		return err
	}
	r.announcer.announce(t, done)
	return nil
}
