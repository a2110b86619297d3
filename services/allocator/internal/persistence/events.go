package persistence

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Events takes Kubernetes Events; events.EventRecorder has it.
type Events interface {
	Eventf(regarding runtime.Object, related runtime.Object, eventtype, reason, action, note string, args ...any)
}

// Reasons of Events.
const (
	reasonAdopted       = "Adopted"
	reasonNameConflict  = "NameConflict"
	reasonNamespaceGone = "NamespaceGone"
	// reasonRejected is the reason of the sandbox's last state, too.
	reasonRejected = "Rejected"
)

// recordAdoption writes the Event of a custom resource that was written from its agent's record: the process that
// acknowledged the sandbox had ended.
func (t *Tracker) recordAdoption(there *v1alpha1.Sandbox, r *store.Record) {
	if t.config.Events == nil {
		return
	}
	t.config.Events.Eventf(there, nil, corev1.EventTypeNormal, reasonAdopted, "Adopt",
		"the sandbox was written from the record of agent %s; the allocator that created it had ended before", r.AgentPod)
}

// recordRejection writes the Event of a fast-created sandbox that is deleted although it was acknowledged: only admission knows what it
// refuses, and it is asked after the start. There is no custom resource, but its name and uid.
func (t *Tracker) recordRejection(r *store.Record, cause string) {
	if t.config.Events == nil {
		return
	}
	t.config.Events.Eventf(&v1alpha1.Sandbox{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.Record.GetNamespace(), Name: r.Record.GetName(), UID: types.UID(r.Record.GetFence().GetSandboxUid()),
		},
	}, nil, corev1.EventTypeWarning, reasonRejected, "Remove", "the sandbox is removed from agent %s: the API server refuses its resource: %s", r.AgentPod, cause)
}

// recordConflict writes the Event of a fast-created sandbox that is deleted although it was acknowledged.
func (t *Tracker) recordConflict(r *store.Record, there *v1alpha1.Sandbox) {
	if t.config.Events == nil {
		return
	}
	uid := r.Record.GetFence().GetSandboxUid()
	if there == nil { // no Event can be written in a namespace that is terminating
		t.config.Events.Eventf(&corev1.Namespace{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: r.Record.GetNamespace()},
		}, nil, corev1.EventTypeWarning, reasonNamespaceGone, "Remove",
			"sandbox %s (uid %s) on agent %s is removed: its namespace is gone or terminating", r.Record.GetName(), uid, r.AgentPod)
		return
	}
	t.config.Events.Eventf(there, nil, corev1.EventTypeWarning, reasonNameConflict, "Remove",
		"another sandbox of this name (uid %s, created on the fast path) is removed from agent %s: the custom resource that was there first wins",
		uid, r.AgentPod)
}
