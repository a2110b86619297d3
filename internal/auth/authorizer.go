package auth

import (
	"context"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Access is what a caller wants: a verb on a resource. An empty Namespace asks for all namespaces.
type Access struct {
	Verb, Group, Resource, Subresource, Namespace string
}

// String returns the access as kubectl auth can-i prints it.
func (a Access) String() string {
	s := a.Verb + " " + a.Resource
	if a.Group != "" {
		s += "." + a.Group
	}
	if a.Subresource != "" {
		s += "/" + a.Subresource
	}
	if a.Namespace == "" {
		return s + " in all namespaces"
	}
	return s + " in namespace " + a.Namespace
}

// key identifies the access. Its parts are texts of the caller's.
func (a Access) key() string {
	var b strings.Builder
	for _, s := range []string{a.Verb, a.Group, a.Resource, a.Subresource, a.Namespace} {
		writeField(&b, s)
	}
	return b.String()
}

// Decision says whether an access is allowed, and why.
type Decision struct {
	Allowed bool
	Reason  string
}

// Reviews creates SubjectAccessReviews. client-go's SubjectAccessReviewInterface implements it.
type Reviews interface {
	Create(ctx context.Context, review *authorizationv1.SubjectAccessReview, opts metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error)
}

// Authorizer decides what callers may do: what the API server allows them.
type Authorizer struct {
	reviews Reviews
	memory  *memory[Decision]
}

// NewAuthorizer returns an authorizer that has not asked yet.
func NewAuthorizer(r Reviews, t Timing, c clock.PassiveClock) *Authorizer {
	return &Authorizer{reviews: r, memory: newMemory[Decision](t, c)}
}

// Decide returns whether a caller may do something. The error, if the API server does not answer and nothing is remembered, is
// API_UNAVAILABLE.
func (a *Authorizer) Decide(ctx context.Context, c Caller, what Access) (Decision, error) {
	got, err := a.memory.ask(ctx, what.key()+c.key(), func(ctx context.Context) (answer[Decision], error) {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: c.User, UID: c.UID, Groups: c.Groups,
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: what.Namespace, Verb: what.Verb, Group: what.Group, Resource: what.Resource, Subresource: what.Subresource,
			},
		}}
		for key, values := range c.Extra {
			if review.Spec.Extra == nil {
				review.Spec.Extra = map[string]authorizationv1.ExtraValue{}
			}
			review.Spec.Extra[key] = values
		}
		response, err := a.reviews.Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return answer[Decision]{}, err
		}
		d := Decision{Allowed: response.Status.Allowed && !response.Status.Denied, Reason: response.Status.Reason}
		if d.Reason == "" {
			d.Reason = response.Status.EvaluationError
		}
		return answer[Decision]{value: d, allowed: d.Allowed}, nil
	})
	if ctx.Err() != nil && err != nil {
		return Decision{}, fault.FromContext(ctx, "reviewing access", err)
	}
	if err != nil {
		return Decision{}, undecided(err, "the API server cannot be asked whether you may do this")
	}
	return got.value, nil
}

// Denied returns the error of a caller that may not do something.
func Denied(c Caller, what Access) error {
	return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "user %q may not %s", c.User, what).
		With("user", c.User).With("verb", what.Verb).With("resource", what.Resource).With("namespace", what.Namespace)
}

// undecided is the error of a question that the API server did not answer.
func undecided(cause error, message string) error {
	return fault.Wrap(cause, errdefs.ErrUnavailable, fault.APIUnavailable, "%s", message).RetryIn(time.Second)
}
