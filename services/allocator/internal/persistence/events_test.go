package persistence_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// recorder records Events.
type recorder struct{ seen chan string }

func (r *recorder) Eventf(regarding, _ runtime.Object, kind, reason, _, note string, args ...any) {
	_ = fmt.Sprintf(note, args...)
	name := regarding.(metav1.Object).GetName()
	r.seen <- fmt.Sprintf("%s %s of %T %s", kind, reason, regarding, name)
}

// namespaceTerminating is the answer to a write in a namespace that is being deleted.
func namespaceTerminating() error {
	err := apierrors.NewForbidden(corev1.Resource("sandboxes"), "one", fmt.Errorf("the namespace is terminating"))
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
	return err
}

// TestEvents is about the Events of a write that no create asked for, and of one that costs its sandbox the name.
func TestEvents(t *testing.T) {
	tests := map[string]struct {
		adopted  bool
		arrange  func(*fixture)
		want     string // empty: none
		rejected bool
	}{
		"a create's write":        {},
		"an adoption":             {adopted: true, want: "Normal Adopted of *v1alpha1.Sandbox one"},
		"the name is another's":   {arrange: func(f *fixture) { f.createTheirs(t) }, want: "Warning NameConflict of *v1alpha1.Sandbox one", rejected: true},
		"the namespace goes away": {arrange: func(f *fixture) { f.fail(namespaceTerminating()) }, want: "Warning NamespaceGone of *v1.Namespace ns", rejected: true},
		"admission refuses it":    {arrange: func(f *fixture) { f.fail(quotaExceeded()) }, want: "Warning Rejected of *v1alpha1.Sandbox one", rejected: true},
		"an adoption is refused":  {adopted: true, arrange: func(f *fixture) { f.fail(quotaExceeded()) }, want: "Warning Rejected of *v1alpha1.Sandbox one", rejected: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			events := &recorder{seen: make(chan string, 2)}
			f := start(t, nil)
			f.useEvents(events)
			if test.arrange != nil {
				test.arrange(f)
			}
			f.persistAs(t, !test.adopted)
			require.Eventually(t, func() bool { return !f.tracker.Owns("u") }, testkit.Timeout, testkit.Tick)
			if test.want == "" {
				require.Empty(t, events.seen)
			} else {
				require.Equal(t, test.want, <-events.seen)
			}
			require.Equal(t, test.rejected, len(f.rejected) == 1)
			require.Equal(t, test.rejected, f.store.Gone(store.Key{Namespace: "ns", Name: "one"}, "u"))
		})
	}
}

// quotaExceeded is the answer to a write that admission refuses.
func quotaExceeded() error {
	return apierrors.NewForbidden(v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource(), "one", errors.New("exceeded quota: small"))
}

// TestRejectionIsShownToWatches: a caller that was answered learns why its sandbox ends.
func TestRejectionIsShownToWatches(t *testing.T) {
	f := start(t, nil)
	f.fail(quotaExceeded())
	_, watch := f.store.Watch(store.Filter{Namespace: "ns", Name: "one"})
	defer watch.Close()
	f.persist(t)
	<-f.rejected
	var last *sandboxv1.WatchSandboxesResponse
	for last.GetType() != sandboxv1.WatchSandboxesResponse_TYPE_DELETED {
		last = <-watch.Events()
	}
	status := last.GetSandbox().GetStatus()
	require.Equal(t, sandboxv1.Phase_PHASE_FAILED, status.GetPhase())
	require.Equal(t, "Rejected", status.GetReason())
	require.Contains(t, status.GetMessage(), "exceeded quota: small")
	_, ok := f.store.Get(store.Key{Namespace: "ns", Name: "one"})
	require.False(t, ok)
	require.Zero(t, f.tracker.Pending())
	require.Zero(t, f.agents.marked())
}

// TestMarkEnds: an agent is asked to mark a sandbox again and again, until there is no point in it.
func TestMarkEnds(t *testing.T) {
	never := fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "later")
	tests := map[string]func(*fixture){
		"its agent's Pod is gone": func(f *fixture) { f.agents.mu.Lock(); defer f.agents.mu.Unlock(); f.agents.gone = true },
		"it is being deleted":     func(f *fixture) { f.store.MarkDeleting(store.Key{Namespace: "ns", Name: "one"}, "u") },
		"another process leads":   func(f *fixture) { f.follows.Store(true) },
	}
	for name, end := range tests {
		t.Run(name, func(t *testing.T) {
			script := make([]error, 1000)
			for i := range script {
				script[i] = never
			}
			f := start(t, nil, script...)
			f.tracker.Mark(store.Key{Namespace: "ns", Name: "one"}, &agentv1.Fence{SandboxUid: "u", Attempt: 2, AgentUid: "a"})
			require.Eventually(t, func() bool { return f.agents.marked() >= 2 }, testkit.Timeout, testkit.Tick)
			require.True(t, f.tracker.Owns("u"))
			end(f)
			require.Eventually(t, func() bool { return !f.tracker.Owns("u") }, testkit.Timeout, testkit.Tick)
		})
	}
}

func (f *fixture) createTheirs(t *testing.T) {
	t.Helper()
	require.NoError(t, f.api.Direct.Create(context.Background(), persistence.StrongResource(record())))
}
