package apiserver_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	resource     = v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource()                                                //nolint:gochecknoglobals // a constant
	unauthorized = apierrors.NewForbidden(resource, "one", errors.New(`User "system:serviceaccount:x:allocator" cannot do that`)) //nolint:gochecknoglobals,staticcheck // a constant, in the words of the API server
	refused      = &net.OpError{Op: "dial", Err: errors.New("connection refused")}                                                //nolint:gochecknoglobals // a constant
)

// server is an API server in memory whose next calls fail as scripted.
type server struct {
	client.WithWatch
	script []error
	calls  int
}

func (s *server) next() error {
	s.calls++
	if len(s.script) == 0 {
		return nil
	}
	err := s.script[0]
	s.script = s.script[1:]
	return err
}

func newServer(t *testing.T, objects ...client.Object) *server {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	s := &server{}
	s.WithWatch = fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			if err := s.next(); err != nil {
				return err
			}
			return c.Get(ctx, key, obj, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if err := s.next(); err != nil {
				return err
			}
			return c.Patch(ctx, obj, patch, opts...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, _ ...client.DeleteOption) error {
			if err := s.next(); err != nil {
				return err
			}
			return c.Delete(ctx, obj)
		},
	}).Build()
	return s
}

func sandbox() *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "one", UID: "u1"}}
}

func get(t *testing.T, s *server) *v1alpha1.Sandbox {
	t.Helper()
	there := &v1alpha1.Sandbox{}
	require.NoError(t, s.Get(t.Context(), client.ObjectKeyFromObject(sandbox()), there))
	return there
}

func TestTimeoutFollowsTheLastAnswer(t *testing.T) {
	tests := map[string]struct {
		err  error
		away bool
	}{
		"answered":             {nil, false},
		"not found":            {apierrors.NewNotFound(resource, "one"), false},
		"connection refused":   {refused, true},
		"timeout":              {apierrors.NewTimeoutError("late", 1), true},
		"unavailable":          {apierrors.NewServiceUnavailable("etcd"), true},
		"has not read roles":   {unauthorized, true},
		"forbidden by a quota": {apierrors.NewForbidden(resource, "one", errors.New("exceeded quota")), false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, sandbox())
			api := apiserver.New(s, clock.RealClock{})
			before := api.Timeout()
			s.script = []error{test.err}
			_, _ = api.Lookup(t.Context(), store.Key{Namespace: "ns", Name: "one"}, "")
			if test.away {
				require.Less(t, api.Timeout(), before)
			} else {
				require.Equal(t, before, api.Timeout())
			}
			s.script = []error{context.Canceled}
			_, _ = api.Lookup(t.Context(), store.Key{Namespace: "ns", Name: "one"}, "")
			require.Equal(t, test.away, api.Timeout() < before, "a call that its caller canceled says nothing")
			_, err := api.Lookup(t.Context(), store.Key{Namespace: "ns", Name: "one"}, "")
			require.NoError(t, err)
			require.Equal(t, before, api.Timeout())
		})
	}
}

func TestLookup(t *testing.T) {
	api := apiserver.New(newServer(t, sandbox()), clock.RealClock{})
	for name, test := range map[string]struct {
		name, uid string
		found     bool
	}{"by name": {"one", "", true}, "by uid": {"one", "u1", true}, "another uid": {"one", "u2", false}, "absent": {"two", "", false}} {
		t.Run(name, func(t *testing.T) {
			found, err := api.Lookup(t.Context(), store.Key{Namespace: "ns", Name: test.name}, test.uid)
			require.NoError(t, err)
			require.Equal(t, test.found, found != nil)
		})
	}
}

func TestDeleteByUID(t *testing.T) {
	tests := map[string]struct {
		script []error
		reason fault.Reason
		calls  int
	}{
		"deleted":          {nil, "", 1},
		"gone":             {[]error{apierrors.NewNotFound(resource, "one")}, "", 1},
		"replaced":         {[]error{apierrors.NewConflict(resource, "one", errors.New("uid"))}, "", 1},
		"after a failure":  {[]error{refused}, "", 2},
		"refused for good": {[]error{apierrors.NewForbidden(resource, "one", errors.New("policy"))}, fault.Internal, 1},
		"starts up":        {[]error{unauthorized}, "", 2},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, sandbox())
			s.script = test.script
			err := apiserver.New(s, clock.RealClock{}).DeleteByUID(t.Context(), sandbox())
			require.Equal(t, test.reason, fault.ReasonOf(err))
			require.Equal(t, test.reason == "", err == nil)
			require.Equal(t, test.calls, s.calls)
		})
	}
	t.Run("the API server stays away", func(t *testing.T) {
		s := newServer(t, sandbox())
		for range 100 {
			s.script = append(s.script, refused)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		err := apiserver.New(s, clock.RealClock{}).DeleteByUID(ctx, sandbox())
		require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
	})
}

func TestAnnotate(t *testing.T) {
	want := map[string]string{"a": "1"}
	t.Run("by one patch", func(t *testing.T) {
		s := newServer(t, sandbox())
		current := get(t, s)
		s.calls = 0
		got, err := apiserver.New(s, clock.RealClock{}).Annotate(t.Context(), current, want)
		require.NoError(t, err)
		require.Equal(t, "1", got.Annotations["a"])
		require.Equal(t, want, get(t, s).Annotations)
	})
	t.Run("nothing to change", func(t *testing.T) {
		sb := sandbox()
		sb.Annotations = map[string]string{"a": "1", "b": "2"}
		s := newServer(t, sb)
		_, err := apiserver.New(s, clock.RealClock{}).Annotate(t.Context(), sb, want)
		require.NoError(t, err)
		require.Zero(t, s.calls)
	})
	t.Run("another writer was faster", func(t *testing.T) {
		s := newServer(t, sandbox())
		stale := get(t, s)
		newer := stale.DeepCopy()
		newer.Annotations = map[string]string{"theirs": "kept"}
		require.NoError(t, s.Update(t.Context(), newer))
		_, err := apiserver.New(s, clock.RealClock{}).Annotate(t.Context(), stale, want)
		require.NoError(t, err)
		require.Equal(t, map[string]string{"a": "1", "theirs": "kept"}, get(t, s).Annotations)
	})
	t.Run("it is another sandbox's", func(t *testing.T) {
		other := sandbox()
		other.UID = "u2"
		s := newServer(t, other)
		old := sandbox()
		old.ResourceVersion = "1"
		got, err := apiserver.New(s, clock.RealClock{}).Annotate(t.Context(), old, want)
		require.NoError(t, err)
		require.Nil(t, got)
		require.Empty(t, get(t, s).Annotations)
	})
	t.Run("the API server stays away", func(t *testing.T) {
		s := newServer(t, sandbox())
		for range 100 {
			s.script = append(s.script, refused)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := apiserver.New(s, clock.RealClock{}).Annotate(ctx, sandbox(), want)
		require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
	})
}

func TestInvalidNamesTheField(t *testing.T) {
	err := apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("Sandbox").GroupKind(), "one", nil)
	var f *fault.Error
	require.ErrorAs(t, apiserver.Invalid(err, "spec"), &f)
	require.Equal(t, "spec", f.Metadata()[fault.FieldKey])
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{Field: "spec.image", Message: "no"}}
	require.ErrorAs(t, apiserver.Invalid(err, "spec"), &f)
	require.Equal(t, "spec.image", f.Metadata()[fault.FieldKey])
}

func TestUnavailableNamesMissingRoles(t *testing.T) {
	require.NotContains(t, apiserver.Unavailable(refused).Message(), "roles")
	require.Contains(t, apiserver.Unavailable(unauthorized).Message(), "roles")
	_, retry := fault.RetryAfter(apiserver.Unavailable(nil))
	require.True(t, retry)
}
