package store_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// deletedResource returns a custom resource that a delete call has annotated, and that is being deleted or not.
func deletedResource(uid, request string, deleting bool) *v1alpha1.Sandbox {
	sb := resource(uid, "1", v1alpha1.PhaseRunning)
	if request != "" {
		sb.Annotations[v1alpha1.AnnotationDeleteRequestID] = request
	}
	if deleting {
		now := metav1.Now()
		sb.DeletionTimestamp = &now
	}
	return sb
}

// TestDeletedBy: a delete call is known from each durable trace of it, and only in its namespace.
func TestDeletedBy(t *testing.T) {
	tombstone := func(request string) *agentv1.Tombstone {
		return &agentv1.Tombstone{Namespace: "ns", Name: "one", DeleteRequestId: request, Fence: &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "a"}}
	}
	for name, test := range map[string]struct {
		send func(*store.Store)
		want bool
	}{
		"a resource that is being deleted":        {func(s *store.Store) { s.SetResource(deletedResource("u", "d", true)) }, true},
		"a resource that was removed":             {func(s *store.Store) { s.RemoveResource(deletedResource("u", "d", false)) }, true},
		"an annotated one that is not deleted":    {func(s *store.Store) { s.SetResource(deletedResource("u", "d", false)) }, false},
		"a deletion by kubectl":                   {func(s *store.Store) { s.SetResource(deletedResource("u", "", true)) }, false},
		"a tombstone":                             {func(s *store.Store) { s.AgentTombstones([]*agentv1.Tombstone{tombstone("d")}, nil) }, true},
		"a tombstone of a call without an id":     {func(s *store.Store) { s.AgentTombstones([]*agentv1.Tombstone{tombstone("")}, nil) }, false},
		"a tombstone that an agent has dropped":   {func(s *store.Store) { s.AgentTombstones(nil, []*agentv1.Tombstone{tombstone("d")}) }, false},
		"a deletion that is only known in memory": {func(s *store.Store) { s.SetRecord(record("u")); s.MarkDeleting(key, "u") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			test.send(s)
			got, ok := s.DeletedBy("ns", "d")
			require.Equal(t, test.want, ok)
			if ok {
				require.Equal(t, store.Deleted{Key: key, UID: "u"}, got)
			}
			_, ok = s.DeletedBy("other", "d")
			require.False(t, ok, "request ids are unique in a namespace")
			_, ok = s.DeletedBy("ns", "")
			require.False(t, ok, "calls without an id are not repetitions of each other")
		})
	}
}

// TestDeleteCallsAreBounded: the latest calls are remembered, and each for an hour after its last trace.
func TestDeleteCallsAreBounded(t *testing.T) {
	c := clocktesting.NewFakePassiveClock(time.Unix(1e9, 0))
	s := store.New(c)
	known := func(request string) bool {
		_, ok := s.DeletedBy("ns", request)
		return ok
	}
	kept := deletedResource("kept", "kept", true)
	s.SetResource(kept)
	s.RemoveResource(deletedResource("u", "d", true))
	c.SetTime(c.Now().Add(40 * time.Minute))
	s.SetResource(kept) // the informer lists it again
	c.SetTime(c.Now().Add(40 * time.Minute))
	require.False(t, known("d"))
	require.True(t, known("kept"))
	for i := range 10_000 {
		s.RemoveResource(deletedResource(fmt.Sprint("u", i), fmt.Sprint("d", i), true))
	}
	require.False(t, known("kept"), "the oldest call gives way")
	require.True(t, known("d0"))
	require.True(t, known("d9999"))
}
