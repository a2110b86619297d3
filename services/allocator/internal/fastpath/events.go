package fastpath

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Reasons of Events.
const (
	reasonAdopted       = "Adopted"
	reasonNameConflict  = "NameConflict"
	reasonNamespaceGone = "NamespaceGone"
)

// tellAdopted tells that a custom resource was written from its agent's record: who had acknowledged the sandbox is gone.
func (s *Server) tellAdopted(there *v1alpha1.Sandbox, r *store.Record) {
	if s.config.Events == nil {
		return
	}
	s.config.Events.Eventf(there, nil, corev1.EventTypeNormal, reasonAdopted, "Adopt",
		"the sandbox was written from the record of agent %s; the allocator that created it had ended before", r.AgentPod)
}

// tellConflict tells why a fast-created sandbox went although it had been acknowledged.
func (s *Server) tellConflict(r *store.Record, there *v1alpha1.Sandbox) {
	if s.config.Events == nil {
		return
	}
	uid := r.Record.GetFence().GetSandboxUid()
	if there == nil { // in a namespace that is going no Event can be written
		s.config.Events.Eventf(&corev1.Namespace{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: r.Record.GetNamespace()},
		}, nil, corev1.EventTypeWarning, reasonNamespaceGone, "Remove",
			"sandbox %s (uid %s) on agent %s is removed: its namespace is gone or going", r.Record.GetName(), uid, r.AgentPod)
		return
	}
	s.config.Events.Eventf(there, nil, corev1.EventTypeWarning, reasonNameConflict, "Remove",
		"another sandbox of this name (uid %s, created on the fast path) is removed from agent %s: the custom resource that was there first wins",
		uid, r.AgentPod)
}
