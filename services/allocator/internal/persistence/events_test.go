package persistence_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
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
			require.Equal(t, test.rejected, f.store.Gone("u"))
		})
	}
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
			f.tracker.Mark(&agentv1.Fence{SandboxUid: "u", Attempt: 2, AgentUid: "a"})
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
