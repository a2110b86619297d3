package store_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// forgedResource returns a custom resource whose annotations name the sandbox "u" of ns/one, which another user has.
func forgedResource(namespace, name string) *v1alpha1.Sandbox {
	sb := resource("u", "9", v1alpha1.PhaseRunning)
	sb.Namespace, sb.Name, sb.UID = namespace, name, "forged"
	return sb
}

// TestForgedUIDChangesNothing: what happens to a custom resource with the uid of another sandbox happens to it alone.
func TestForgedUIDChangesNothing(t *testing.T) {
	forged := store.Key{Namespace: "evil", Name: "forged"}
	tests := map[string]func(s *store.Store){
		"its resource is removed": func(s *store.Store) {
			s.SetResource(forgedResource(forged.Namespace, forged.Name))
			s.RemoveResource(forgedResource(forged.Namespace, forged.Name))
		},
		"it is being deleted": func(s *store.Store) {
			s.SetResource(forgedResource(forged.Namespace, forged.Name))
			s.MarkDeleting(forged, "u")
		},
		"it is gone": func(s *store.Store) { s.MarkGone(forged, "u") },
		"a tombstone": func(s *store.Store) {
			s.AgentTombstones([]*agentv1.Tombstone{{Namespace: forged.Namespace, Name: forged.Name, RequestId: "r-u",
				Fence: &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "b"}}}, nil)
		},
	}
	for name, attack := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			victim := resource("u", "5", v1alpha1.PhaseRunning)
			s.SetResource(victim)
			attack(s)
			require.False(t, s.Gone(key, "u"))
			require.False(t, s.Deleting(key, "u"))
			item, ok := s.Get(key)
			require.True(t, ok)
			require.Nil(t, item.Sandbox.GetDeleteTime())
			require.NotNil(t, item.Fence)
			victim = victim.DeepCopy()
			victim.ResourceVersion = "10"
			s.SetResource(victim)
			item, _ = s.Get(key)
			require.Equal(t, "10", item.Resource.ResourceVersion, "it is followed on")
			require.False(t, s.RequestGone("ns", "r-u"))
		})
	}
}

// TestForgedAssignmentNamesNoContainer: no call that acts on a custom resource reaches the container of another sandbox.
func TestForgedAssignmentNamesNoContainer(t *testing.T) {
	tests := map[string]struct {
		namespace, name string
		change          func(*v1alpha1.Sandbox)
		own             bool
	}{
		"its own":                {"ns", "one", nil, true},
		"of another namespace":   {"evil", "forged", nil, false},
		"of the same namespace":  {"ns", "forged", nil, false},
		"without the uid":        {"ns", "forged", func(sb *v1alpha1.Sandbox) { delete(sb.Annotations, v1alpha1.AnnotationSandboxUID) }, false},
		"not reported, next uid": {"evil", "forged", assignedTo("u", 7), false},
		"not reported, own":      {"ns", "forged", assignedTo("u", 7), true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			s.AgentJoined("a", "ns")
			s.AgentSandboxes("a", []*agentv1.SandboxReport{report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)})
			sb := forgedResource(test.namespace, test.name)
			if test.change != nil {
				test.change(sb)
			}
			sb.Annotations[v1alpha1.AnnotationRequestID] = "forged-request"
			s.SetResource(sb)
			item, ok := s.Get(store.KeyOf(sb))
			require.True(t, ok)
			require.Equal(t, test.own, item.Fence != nil)
			byRequest, ok := s.ByRequest(sb.Namespace, "forged-request")
			require.True(t, ok)
			require.Equal(t, test.own, byRequest.Fence != nil)
		})
	}
}

func assignedTo(uid string, attempt int64) func(*v1alpha1.Sandbox) {
	return func(sb *v1alpha1.Sandbox) {
		sb.SetAssignment(&v1alpha1.Assignment{AgentPod: "pod", AgentUID: "a", SandboxUID: uid, Attempt: attempt})
	}
}
