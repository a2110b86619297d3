package fastpath

import (
	"context"
	"errors"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// api is the API server, with the memory of whether it answered last.
type api struct {
	Resources
	away atomic.Bool
}

// note remembers how a call ended. Whose caller left says nothing.
func (a *api) note(err error) error {
	var status apierrors.APIStatus
	switch {
	case errors.Is(err, context.Canceled):
	case err == nil, errors.As(err, &status) && !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) &&
		!apierrors.IsServiceUnavailable(err) && !apierrors.IsInternalError(err):
		a.away.Store(false)
	default:
		a.away.Store(true)
	}
	return err
}

// Get implements Resources.
func (a *api) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	return a.note(a.Resources.Get(ctx, key, obj, opts...))
}

// Create implements Resources.
func (a *api) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	return a.note(a.Resources.Create(ctx, obj, opts...))
}

// Update implements Resources.
func (a *api) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	return a.note(a.Resources.Update(ctx, obj, opts...))
}

// Delete implements Resources.
func (a *api) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	return a.note(a.Resources.Delete(ctx, obj, opts...))
}
