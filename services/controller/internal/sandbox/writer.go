package sandbox

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/trace"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// writer writes Sandboxes to the API server, each time against the version that was read, so that a concurrent change is a
// conflict and never lost.
type writer struct {
	client client.Client
	memory *memory
}

// metadata writes finalizers, annotations and labels of the working copy.
func (w *writer) metadata(ctx context.Context, t *target) error {
	next := t.sandbox.DeepCopy()
	next.Status = t.base.Status
	if err := w.client.Patch(ctx, next, client.MergeFromWithOptions(t.base, client.MergeFromWithOptimisticLock{})); err != nil {
		return err
	}
	w.memory.overwritten(t.name, t.base.ResourceVersion)
	t.base.ObjectMeta = *next.ObjectMeta.DeepCopy()
	t.sandbox.ObjectMeta = *next.ObjectMeta.DeepCopy()
	return nil
}

// status writes the status of the working copy.
func (w *writer) status(ctx context.Context, t *target) error {
	ctx, span := obs.Tracer().Start(withTrace(ctx, t), "sandbox.status", spanOf(t))
	defer span.End()
	next := t.sandbox.DeepCopy()
	if err := w.client.Status().Patch(ctx, next, client.MergeFromWithOptions(t.base, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("writing status: %w", err)
	}
	w.memory.overwritten(t.name, t.base.ResourceVersion)
	return nil
}

// withTrace returns a context in the trace of the call that the work on the sandbox belongs to, unless ctx has a trace.
func withTrace(ctx context.Context, t *target) context.Context {
	if trace.SpanContextFromContext(ctx).IsValid() {
		return ctx
	}
	return obs.WithTraceparent(ctx, t.traceparent())
}
