package create

import (
	"context"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
)

// dryRun asks the API server whether it would admit the custom resource, if the pool wants that to be known before the start. A name
// that is taken there is left to the steps that follow. Without an answer the create fails: the pool would rather have no sandbox.
func (c *Creator) dryRun(ctx context.Context, k *call) error {
	if !k.checked {
		return nil
	}
	want := persistence.StrongResource(k.record)
	want.Spec.ConsistencyMode = v1alpha1.ConsistencyModeFast
	callCtx, cancel := context.WithTimeout(ctx, c.config.API.Timeout())
	defer cancel()
	began := c.config.Clock.Now()
	err := c.config.API.Create(callCtx, want, client.DryRunAll)
	switch {
	case err == nil, apierrors.IsAlreadyExists(err):
		k.timings.add("admission", c.config.Clock.Since(began))
		return nil
	case ctx.Err() != nil:
		return fault.FromContext(ctx, "asking admission about the sandbox", err)
	case apierrors.IsInvalid(err):
		return apiserver.Invalid(err, "spec")
	case apierrors.IsForbidden(err):
		return forbidden(k, err)
	}
	return apiserver.Unavailable(err)
}

// forbidden returns the error of a create that admission refuses.
func forbidden(k *call, err error) error {
	return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the API server forbids sandbox %s: %v", k.name, err)
}
