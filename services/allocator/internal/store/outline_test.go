package store_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// outline returns the metadata of a resource.
func outline(uid, version string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{ObjectMeta: resource(uid, version, "").ObjectMeta}
	sb.Annotations[v1alpha1.AnnotationRequestID] = "r-" + uid
	sb.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "m"}}
	return sb
}

// TestOutline: all but spec and status is known of a resource by its metadata.
func TestOutline(t *testing.T) {
	s := newStore()
	require.True(t, s.Filled())
	s.AgentSandboxes("a", []*agentv1.SandboxReport{report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)})
	given := outline("u", "5")
	s.SetOutline(given)
	require.NotEmpty(t, given.ManagedFields, "the argument is not changed")
	require.False(t, s.Filled())
	require.Equal(t, 1, s.Len())
	item, ok := s.Get(key)
	require.True(t, ok)
	require.True(t, item.Outline)
	given.ManagedFields = nil
	require.Equal(t, given.ObjectMeta, item.Resource.ObjectMeta)
	require.Equal(t, "u", item.Sandbox.GetUid())
	require.Equal(t, "u", item.Fence.GetSandboxUid())
	require.Equal(t, "r-u", item.RequestID)
	byRequest, ok := s.ByRequest("ns", "r-u")
	require.True(t, ok)
	require.Equal(t, key, byRequest.Key)

	s.Fill(resource("u", "5", v1alpha1.PhaseExpired))
	require.True(t, s.Filled())
	item, _ = s.Get(key)
	require.False(t, item.Outline)
	require.Equal(t, "busybox", item.Sandbox.GetSpec().GetImage())
	require.Equal(t, sandboxv1.Phase_PHASE_EXPIRED, item.Sandbox.GetStatus().GetPhase())
}

// TestOutlineOrder: no older state replaces a newer one, and no deleted sandbox is shown again.
func TestOutlineOrder(t *testing.T) {
	get := func(s *store.Store) string {
		item, ok := s.Get(key)
		if !ok {
			return "none"
		}
		if item.Outline {
			return "outline " + item.Resource.ResourceVersion
		}
		return "whole " + item.Resource.ResourceVersion
	}
	another := outline("u", "5")
	another.UID = "another"
	full := func(version string) *v1alpha1.Sandbox { return resource("u", version, v1alpha1.PhaseRunning) }
	for name, test := range map[string]struct {
		do   func(s *store.Store)
		want string
	}{
		"a newer fill":               {func(s *store.Store) { s.Fill(full("6")) }, "whole 6"},
		"an older fill":              {func(s *store.Store) { s.Fill(full("4")) }, "outline 5"},
		"a fill of another resource": {func(s *store.Store) { s.Fill(&v1alpha1.Sandbox{ObjectMeta: another.ObjectMeta}) }, "outline 5"},
		"a change, then the fill":    {func(s *store.Store) { s.SetResource(full("7")); s.Fill(full("8")) }, "whole 7"},
		"a fill, then the outline":   {func(s *store.Store) { s.Fill(full("5")); s.SetOutline(outline("u", "9")) }, "whole 5"},
		"a deletion, then the fill":  {func(s *store.Store) { s.RemoveResource(full("6")); s.Fill(full("5")) }, "none"},
		"a deletion, then an outline": {func(s *store.Store) {
			s.RemoveResource(full("6"))
			s.SetOutline(outline("u", "5"))
		}, "none"},
		"a fill without an outline": {func(s *store.Store) { s.RemoveResource(full("6")); s.Fill(resource("v", "9", "")) }, "none"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			s.SetOutline(outline("u", "5"))
			test.do(s)
			require.Equal(t, test.want, get(s))
			require.Equal(t, test.want != "outline 5", s.Filled())
		})
	}
}

// TestOutlineOfDeletion: a delete call that a former leader answered is known by the metadata.
func TestOutlineOfDeletion(t *testing.T) {
	s := newStore()
	sb := outline("u", "5")
	sb.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	sb.Annotations[v1alpha1.AnnotationDeleteRequestID] = "d"
	s.SetOutline(sb)
	deleted, ok := s.DeletedBy("ns", "d")
	require.True(t, ok)
	require.Equal(t, "u", deleted.UID)
	item, _ := s.Get(key)
	require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, item.Sandbox.GetStatus().GetPhase())
}
