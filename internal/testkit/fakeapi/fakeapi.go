// Package fakeapi is an API server in memory for this project's resources. A test can fail its calls, and lose their answers.
// It keeps the precondition on a UID, which controller-runtime's fake client ignores. All methods may be called concurrently.
package fakeapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Verb names a call.
type Verb string

// The verbs whose calls are hooked. List and Watch are not.
const (
	Get    Verb = "get"
	Create Verb = "create"
	Update Verb = "update"
	Patch  Verb = "patch"
	Delete Verb = "delete"
)

// Hook is called with a call and its object; of a Get that is the one to fill. Its error, if any, is returned to the caller.
type Hook func(Verb, client.Object) error

// Server is an API server.
type Server struct {
	client.WithWatch
	// Direct is a client whose calls are not hooked, as of another user of the API server.
	Direct client.WithWatch

	mu            sync.Mutex
	before, after Hook
	created       int
}

// New returns an empty server.
func New(t testing.TB) *Server {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	s := &Server{}
	s.Direct = interceptor.NewClient(
		fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.Sandbox{}).Build(),
		interceptor.Funcs{Create: s.create, Delete: deleteObject})
	s.WithWatch = interceptor.NewClient(s.Direct, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			return s.call(Get, obj, func() error { return c.Get(ctx, key, obj, opts...) })
		},
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			return s.call(Create, obj, func() error { return c.Create(ctx, obj, opts...) })
		},
		Update: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			return s.call(Update, obj, func() error { return c.Update(ctx, obj, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			return s.call(Patch, obj, func() error { return c.Patch(ctx, obj, patch, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			return s.call(Delete, obj, func() error { return c.Delete(ctx, obj, opts...) })
		},
	})
	return s
}

// Before sets what is called before each call: after its error, the call is not carried out. Nil removes it.
func (s *Server) Before(h Hook) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = h
}

// After sets what is called after each call that succeeded: its error replaces the answer. Nil removes it.
func (s *Server) After(h Hook) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.after = h
}

func (s *Server) call(verb Verb, obj client.Object, do func() error) error {
	s.mu.Lock()
	before, after := s.before, s.after
	s.mu.Unlock()
	if before != nil {
		if err := before(verb, obj); err != nil {
			return err
		}
	}
	if err := do(); err != nil || after == nil {
		return err
	}
	return after(verb, obj)
}

// create gives each object a UID of its own.
func (s *Server) create(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
	s.mu.Lock()
	s.created++
	obj.SetUID(types.UID("cr-" + strconv.Itoa(s.created)))
	s.mu.Unlock()
	return c.Create(ctx, obj, opts...)
}

// deleteObject keeps the precondition on the UID.
func deleteObject(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
	o := (&client.DeleteOptions{}).ApplyOptions(opts)
	if o.Preconditions == nil || o.Preconditions.UID == nil {
		return c.Delete(ctx, obj, opts...)
	}
	for {
		there := obj.DeepCopyObject().(client.Object)
		if err := c.Get(ctx, client.ObjectKeyFromObject(obj), there); err != nil {
			return err
		}
		if there.GetUID() != *o.Preconditions.UID {
			return apierrors.NewConflict(resource, obj.GetName(), errors.New("the UID in the precondition is another"))
		}
		version := there.GetResourceVersion()
		o.Preconditions.ResourceVersion = &version // so that the read and the deletion are one step
		if err := c.Delete(ctx, obj, o); !apierrors.IsConflict(err) {
			return err
		}
	}
}

var resource = v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource() //nolint:gochecknoglobals // a constant

// Refused returns the error of a call that does not reach an API server.
func Refused() error { return &net.OpError{Op: "dial", Err: fmt.Errorf("connection refused")} }

// Unauthorized returns the answer of an API server that has just started, before it has read its roles.
func Unauthorized() error {
	return apierrors.NewForbidden(resource, "one", errors.New(`User "system:serviceaccount:fast-sandbox-system:allocator" cannot do that`)) //nolint:staticcheck // in the words of the API server
}
