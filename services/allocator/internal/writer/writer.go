// Package writer writes the custom resources of fast-created sandboxes behind their acknowledgement, each repeated until
// the API server has it. A write can be stopped, and then says whether it may have happened. Its memory is bounded by
// Admit. All methods may be called concurrently. Nothing is lost with the process: agents keep what is not yet written.
//
//	         +--- stopped, nothing sent since the last clear answer ---> NotWritten
//	         |
//	pending -+--- the API server has it (201, or 409 and it is ours) ---> Landed
//	         |
//	         +--- another sandbox has the name, or the namespace is gone --> Conflict
//	         |
//	         +--- admission (a quota, a webhook, a policy) refuses it -----> Rejected
//	         |
//	         +--- stopped after a call without an answer ----------------> Unknown
package writer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// Outcome is what became of a write.
type Outcome int

// The outcomes.
const (
	Pending Outcome = iota
	Landed
	Conflict
	Rejected
	NotWritten
	Unknown
)

// Resources is the part of the API server that is used; client.Client has it.
type Resources interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
}

// Config is what a Writer needs.
type Config struct {
	Resources Resources
	Tasks     *tasks.Set
	Clock     clock.Clock
	// Confirm reports whether this process certainly leads, so that no other process has until now. One that does not holds its writes
	// back: its successor writes them, or has answered that there is no such sandbox. A process that was suspended does not know.
	Confirm func(ctx context.Context) (bool, error)
	// Dead reports whether the sandbox of a custom resource was deleted: it does not keep the name.
	Dead func(sb *v1alpha1.Sandbox) bool
	// Limit is how many writes may be pending.
	Limit int
	// Parallel is how many calls may be under way at once. Zero: 32.
	Parallel int
	// CallTimeout bounds one call. Zero: 5 s.
	CallTimeout time.Duration
	// YieldDelay is how long a write waits so that the answer to its create goes first, and then others for as long as Busy
	// reports creates, up to MaxYield. The API server, its etcd and all watchers work on a write several times as long as its
	// create took, on the same cores in a small cluster. Zero: 10 ms, 250 ms.
	YieldDelay, MaxYield time.Duration
	// Busy reports whether creates run. Nil: never.
	Busy func() bool
}

// Writer writes custom resources.
type Writer struct {
	config  Config
	slots   chan struct{}
	pending atomic.Int64
}

// New returns a writer with nothing to do.
func New(cfg Config) *Writer {
	if cfg.Parallel == 0 {
		cfg.Parallel = 32
	}
	if cfg.CallTimeout == 0 {
		cfg.CallTimeout = 5 * time.Second
	}
	if cfg.YieldDelay == 0 {
		cfg.YieldDelay = 10 * time.Millisecond
	}
	if cfg.MaxYield == 0 {
		cfg.MaxYield = 250 * time.Millisecond
	}
	if cfg.Busy == nil {
		cfg.Busy = func() bool { return false }
	}
	return &Writer{config: cfg, slots: make(chan struct{}, cfg.Parallel)}
}

// Admit takes room for one more write, or returns an Overloaded error. Give the room up with Abandon, or use it by Write.
func (w *Writer) Admit() error {
	if n := w.pending.Add(1); n > int64(w.config.Limit) {
		w.pending.Add(-1)
		return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded,
			"%d sandboxes wait to be written to the API server", w.config.Limit).RetryIn(2 * time.Second)
	}
	return nil
}

// AdmitAlways takes room even where there is none, for a sandbox that was acknowledged already.
func (w *Writer) AdmitAlways() { w.pending.Add(1) }

// Abandon gives up the room that Admit took.
func (w *Writer) Abandon() { w.pending.Add(-1) }

// Pending is the number of writes that are admitted and not done.
func (w *Writer) Pending() int64 { return w.pending.Load() }

// Job is one write.
type Job struct {
	stop     chan struct{}
	stopOnce sync.Once
	done     chan struct{}

	// Set before done is closed, read after.
	outcome  Outcome
	resource *v1alpha1.Sandbox
	cause    error
}

// Write writes sb in the background and then calls after, in the same goroutine, with the outcome and the custom resource
// that is there, if there is one. The room was taken by Admit. sb is not changed and must not be.
func (w *Writer) Write(sb *v1alpha1.Sandbox, after func(ctx context.Context, o Outcome, there *v1alpha1.Sandbox)) *Job {
	j := &Job{stop: make(chan struct{}), done: make(chan struct{})}
	w.config.Tasks.Go(func(ctx context.Context) {
		j.outcome, j.resource, j.cause = w.run(ctx, sb, j.stop)
		w.pending.Add(-1)
		close(j.done)
		after(ctx, j.outcome, j.resource)
	})
	return j
}

// Stop stops the write and returns its outcome, which is final: nothing is sent after it has returned. A call that is under
// way is awaited: its answer decides what the caller has to do.
func (j *Job) Stop(ctx context.Context) (Outcome, *v1alpha1.Sandbox, error) {
	j.stopOnce.Do(func() { close(j.stop) })
	return j.Wait(ctx)
}

// Wait blocks until the write is done and returns its outcome and the custom resource that is there, or ctx's error.
func (j *Job) Wait(ctx context.Context) (Outcome, *v1alpha1.Sandbox, error) {
	select {
	case <-j.done:
		return j.outcome, j.resource, nil
	case <-ctx.Done():
		return Pending, nil, ctx.Err()
	}
}

// Cause returns why a write was Rejected, once it is done.
func (j *Job) Cause() error {
	<-j.done
	return j.cause
}

// run returns the outcome with the custom resource that is there, or with why it was Rejected.
func (w *Writer) run(ctx context.Context, sb *v1alpha1.Sandbox, stop <-chan struct{}) (Outcome, *v1alpha1.Sandbox, error) {
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, client.ObjectKeyFromObject(sb).String())
	delays := backoff.New(w.config.Clock, backoff.Policy{Initial: 20 * time.Millisecond, Max: 5 * time.Second})
	stopped := NotWritten
	w.pause(ctx, w.config.YieldDelay, stop)
	for waited := w.config.YieldDelay; waited < w.config.MaxYield && w.config.Busy(); waited += w.config.YieldDelay {
		w.pause(ctx, w.config.YieldDelay, stop)
	}
	for {
		select {
		case <-stop:
			return stopped, nil, nil
		case <-ctx.Done():
			return stopped, nil, nil
		case w.slots <- struct{}{}:
		}
		// A select with several ready channels takes any of them: what was stopped must not be sent by chance.
		if ended(ctx, stop) {
			<-w.slots
			return stopped, nil, nil
		}
		outcome, there, err := w.call(ctx, sb)
		<-w.slots
		switch {
		case err == nil, outcome == Rejected:
			return outcome, there, err
		case !definite(err):
			stopped = Unknown
		}
		log.V(2).Info("writing custom resource again", obs.KeyError, err.Error())
		w.pause(ctx, delays.Next(), stop)
	}
}

// pause waits, and not for what was stopped.
func (w *Writer) pause(ctx context.Context, d time.Duration, stop <-chan struct{}) {
	timer := w.config.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-stop:
	case <-ctx.Done():
	case <-timer.C():
	}
}

func ended(ctx context.Context, stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return ctx.Err() != nil
	}
}

var (
	errNotLeading = errors.New("another process may lead")
	errGoing      = errors.New("the name is that of a sandbox that is being deleted")
)

// call makes one attempt. A nil error comes with Landed or Conflict, and Rejected with the refusal.
func (w *Writer) call(ctx context.Context, sb *v1alpha1.Sandbox) (Outcome, *v1alpha1.Sandbox, error) {
	// The end of the process must not tear a call whose answer is milliseconds away.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.config.CallTimeout)
	defer cancel()
	switch sure, err := w.config.Confirm(ctx); {
	case err != nil:
		return Pending, nil, fmt.Errorf("%w: %w", errNotLeading, err)
	case !sure:
		return Pending, nil, errNotLeading
	}
	ctx, span := obs.Tracer().Start(obs.WithTraceparent(ctx, sb.Annotations[v1alpha1.AnnotationTraceparent]), "CR write")
	defer span.End()
	created := sb.DeepCopy()
	err := w.config.Resources.Create(ctx, created)
	if err == nil {
		return Landed, created, nil
	}
	if namespaceGone(err) {
		return Conflict, nil, nil
	}
	refused := apierrors.IsForbidden(err) || apierrors.IsInvalid(err)
	if !apierrors.IsAlreadyExists(err) {
		span.RecordError(err)
		if !refused {
			return Pending, nil, err
		}
	}
	there := &v1alpha1.Sandbox{}
	getErr := w.config.Resources.Get(ctx, client.ObjectKeyFromObject(sb), there)
	if refused && (apierrors.IsNotFound(getErr) || getErr == nil && there.EffectiveUID() != sb.EffectiveUID()) {
		return Rejected, nil, err // and no earlier attempt without an answer has landed
	}
	if getErr != nil {
		return Pending, nil, getErr
	}
	if there.EffectiveUID() == sb.EffectiveUID() {
		return Landed, there, nil
	}
	if there.DeletionTimestamp != nil || w.config.Dead(there) {
		return Pending, nil, errGoing
	}
	return Conflict, there, nil
}

// namespaceGone reports whether the namespace is gone or terminating, so that the custom resource can never be written.
func namespaceGone(err error) bool {
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return true
	}
	var status apierrors.APIStatus
	if !apierrors.IsNotFound(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return status.Status().Details.Kind == "namespaces"
}

// definite reports whether an error of the API server says that nothing was written. A write whose answer was lost is not
// made definite by a later refusal: the caller keeps that in mind.
func definite(err error) bool {
	var op *net.OpError
	switch {
	case errors.Is(err, errNotLeading), errors.Is(err, errGoing):
		return true
	case errors.As(err, &op) && op.Op == "dial", errors.Is(err, syscall.ECONNREFUSED):
		return true
	case apierrors.IsTimeout(err), apierrors.IsServerTimeout(err), apierrors.IsInternalError(err), apierrors.IsServiceUnavailable(err):
		return false
	}
	var status apierrors.APIStatus
	return errors.As(err, &status)
}
