package fastpath

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// unauthorized is what sets a refusal by authorization (RBAC) apart from one by admission (a quota, a namespace that
// ends): the API server itself writes both as Forbidden, and tells no more.
const unauthorized = `is forbidden: User "`

// api is the API server, with the memory of whether it answered last.
type api struct {
	Resources
	away atomic.Bool
}

// note remembers how a call ended. Whose caller left says nothing. An API server that has just started refuses everybody
// until it has read who may do what: that is no answer, and is returned as if the server were away.
func (a *api) note(err error) error {
	var status apierrors.APIStatus
	switch {
	case errors.Is(err, context.Canceled):
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), unauthorized):
		a.away.Store(true)
		return apierrors.NewServiceUnavailable(err.Error())
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
