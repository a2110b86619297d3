package deletion

import (
	"context"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
)

// Options are what a delete call sets.
type Options struct {
	// Grace overrides the sandbox's termination grace period; nil does not.
	Grace *durationpb.Duration
	// RequestID and Traceparent of the call; empty if it has none.
	RequestID, Traceparent string
}

func optionsOf(t *agentv1.Tombstone) Options {
	return Options{Grace: t.GetGracePeriod(), RequestID: t.GetDeleteRequestId(), Traceparent: t.GetTraceparent()}
}

// resources deletes custom resources, with what a delete call set.
type resources struct {
	api    *apiserver.Client
	traced bool
}

// remove deletes a custom resource. What the call set is written before, for the component that carries the
// deletion out.
func (rs resources) remove(ctx context.Context, resource *v1alpha1.Sandbox, o Options) error {
	ctx, span := obs.Tracer().Start(ctx, "CR delete", trace.WithAttributes(
		attribute.String(obs.AttrSandboxNamespace, resource.Namespace), attribute.String(obs.AttrSandboxName, resource.Name),
		attribute.String(obs.AttrSandboxUID, resource.EffectiveUID())))
	defer span.End()
	if resource.DeletionTimestamp != nil {
		return rs.annotate(ctx, resource, Options{Grace: o.Grace}) // the first call's id and trace stay
	}
	if err := rs.annotate(ctx, resource, o); err != nil {
		return err
	}
	return rs.api.DeleteByUID(ctx, resource)
}

// annotate writes what a delete call set into a custom resource. A trace alone is worth that write only if it is exported.
func (rs resources) annotate(ctx context.Context, resource *v1alpha1.Sandbox, o Options) error {
	annotations := map[string]string{}
	if o.Grace != nil {
		annotations[v1alpha1.AnnotationDeleteGracePeriod] = graceSeconds(o.Grace)
	}
	if o.RequestID != "" {
		annotations[v1alpha1.AnnotationDeleteRequestID] = o.RequestID
	}
	if o.Traceparent != "" && (rs.traced || len(annotations) > 0) {
		annotations[v1alpha1.AnnotationDeleteTraceparent] = o.Traceparent
	}
	if len(annotations) == 0 {
		return nil
	}
	_, err := rs.api.Annotate(ctx, resource, annotations)
	return err
}

// graceSeconds rounds up, as the custom resource's own grace period does.
func graceSeconds(d *durationpb.Duration) string {
	return strconv.FormatInt(int64((d.AsDuration()+time.Second-1)/time.Second), 10)
}
