// Package apiserver is the allocator's way to the Kubernetes API server. It classifies errors, remembers whether the API
// server answered the last call, so that callers with an alternative wait less while it does not, and makes the calls that
// several packages share. It keeps no resources. All methods may be called concurrently.
package apiserver

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

const (
	// CallTimeout bounds a call to an API server that does not answer, if the caller has no alternative.
	CallTimeout = 5 * time.Second
	// shortTimeout is the same for callers that have an alternative; awayTimeout, if the last call was not answered.
	shortTimeout = time.Second
	awayTimeout  = 200 * time.Millisecond
	// lookupLimit is how many lookups run at once.
	lookupLimit = 16
)

// Resources is the part of client.Client that is used.
type Resources interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
	Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error
	Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error
}

// unauthorized distinguishes a refusal by authorization (RBAC) from one by admission (a quota, a namespace that is
// terminating): the API server reports both as Forbidden.
const unauthorized = `is forbidden: User "`

// Client calls the API server.
type Client struct {
	resources Resources
	clock     clock.Clock
	lookups   chan struct{}
	away      atomic.Bool
}

// New returns a client that assumes that the API server answers.
func New(r Resources, c clock.Clock) *Client {
	return &Client{resources: r, clock: c, lookups: make(chan struct{}, lookupLimit)}
}

// note remembers how a call ended and returns its error. A call that the caller canceled says nothing. An API server that
// has just started refuses every user until it has read the roles: that is returned as if it were unavailable.
func (c *Client) note(err error) error {
	var status apierrors.APIStatus
	switch {
	case errors.Is(err, context.Canceled):
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), unauthorized):
		c.away.Store(true)
		return apierrors.NewServiceUnavailable(err.Error())
	case err == nil, errors.As(err, &status) && !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) &&
		!apierrors.IsServiceUnavailable(err) && !apierrors.IsInternalError(err):
		c.away.Store(false)
	default:
		c.away.Store(true)
	}
	return err
}

// Timeout returns how long a caller that has an alternative waits for the API server.
func (c *Client) Timeout() time.Duration {
	if c.away.Load() {
		return awayTimeout
	}
	return shortTimeout
}

// Get reads an object.
func (c *Client) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	return c.note(c.resources.Get(ctx, key, obj, opts...))
}

// Create writes a new object.
func (c *Client) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	return c.note(c.resources.Create(ctx, obj, opts...))
}

// Update writes an object over the version that was read.
func (c *Client) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	return c.note(c.resources.Update(ctx, obj, opts...))
}

// Lookup reads the custom resource of a name: nil if there is none, or if uid is set and it is another sandbox's. It makes
// one call.
func (c *Client) Lookup(ctx context.Context, name store.Key, uid string) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	select {
	case c.lookups <- struct{}{}:
		defer func() { <-c.lookups }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	found := &v1alpha1.Sandbox{}
	err := c.Get(ctx, client.ObjectKey{Namespace: name.Namespace, Name: name.Name}, found)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case uid != "" && found.EffectiveUID() != uid:
		return nil, nil
	}
	return found, nil
}

// policy is that of calls that are repeated while the API server does not answer.
var policy = backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second}

// DeleteByUID deletes a custom resource if it still has its uid, and repeats that while the API server does not answer and
// ctx lasts. One that is gone or was replaced counts as deleted.
func (c *Client) DeleteByUID(ctx context.Context, resource *v1alpha1.Sandbox) error {
	var last error
	err := backoff.Retry(ctx, c.clock, policy, func(ctx context.Context) error {
		last = c.note(c.resources.Delete(ctx, resource.DeepCopy(), client.Preconditions{UID: &resource.UID}))
		switch {
		case last == nil, apierrors.IsNotFound(last), apierrors.IsConflict(last):
			return nil
		case apierrors.IsForbidden(last), apierrors.IsInvalid(last):
			return backoff.Permanent(fault.Wrap(last, errdefs.ErrInternal, fault.Internal, "the API server refused the deletion"))
		}
		return last
	})
	if err != nil && fault.ReasonOf(err) == "" {
		return Unavailable(last)
	}
	return err
}

// Annotate sets annotations of a custom resource, and of no other of its name, and returns it as it is then; nil if it is
// gone. It repeats that while the API server does not answer, or another writer is faster, and ctx lasts.
func (c *Client) Annotate(ctx context.Context, resource *v1alpha1.Sandbox, annotations map[string]string) (*v1alpha1.Sandbox, error) {
	var last error
	current := resource
	err := backoff.Retry(ctx, c.clock, policy, func(ctx context.Context) error {
		if current == nil {
			if current, last = c.Lookup(ctx, store.Key{Namespace: resource.Namespace, Name: resource.Name}, resource.EffectiveUID()); last != nil || current == nil {
				return last
			}
		}
		next := current.DeepCopy()
		if next.Annotations == nil {
			next.Annotations = map[string]string{}
		}
		changed := false
		for key, value := range annotations {
			changed = changed || next.Annotations[key] != value
			next.Annotations[key] = value
		}
		if !changed {
			return nil
		}
		last = c.note(c.resources.Patch(ctx, next, client.MergeFromWithOptions(current, client.MergeFromWithOptimisticLock{})))
		switch {
		case last == nil:
			current = next
			return nil
		case apierrors.IsForbidden(last), apierrors.IsInvalid(last):
			return backoff.Permanent(fault.Wrap(last, errdefs.ErrInternal, fault.Internal, "the API server refused the annotations"))
		case apierrors.IsConflict(last), apierrors.IsNotFound(last):
			current = nil
		}
		return last
	})
	if err != nil && fault.ReasonOf(err) == "" {
		return nil, Unavailable(last)
	}
	return current, err
}

// Unavailable returns the error of a call that the API server did not answer, or did not allow.
func Unavailable(cause error) *fault.Error {
	message := "the Kubernetes API server cannot be reached"
	if cause != nil && strings.Contains(cause.Error(), unauthorized) { // see note
		message = "the Kubernetes API server does not authorize the allocator; unless it has just started, check the allocator's roles"
	}
	return fault.Wrap(cause, errdefs.ErrUnavailable, fault.APIUnavailable, "%s", message).RetryIn(time.Second)
}

// Invalid returns the error of a custom resource that the API server found invalid. It names the field, or the fallback if
// the API server names none.
func Invalid(err error, fallback string) error {
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil && len(status.Status().Details.Causes) > 0 {
		cause := status.Status().Details.Causes[0]
		return fault.Field(cause.Field, "%s", cause.Message)
	}
	return fault.Field(fallback, "%v", err)
}
