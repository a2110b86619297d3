package sweep

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Reporter returns a function that writes an Event for each deletion: on the Sandbox if it exists, otherwise on the node.
func Reporter(recorder events.EventRecorder, node string) func(observe.Finding) {
	// Events on nodes carry the name in place of the uid, as the kubelet's do, so that `kubectl describe node` shows them.
	onNode := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)}
	return func(f observe.Finding) {
		// Events that differ only in their text are aggregated under the first one's text.
		container := &corev1.ObjectReference{Kind: "Container", Name: f.Key.ID}
		if f.Key.Remnant {
			recorder.Eventf(onNode, container, corev1.EventTypeNormal, "LeftoverRemoved", "Remove",
				"removed what was left of container %s: %s", f.Key.ID, f.Key.Kind)
			return
		}
		o := f.Observation
		about := onNode
		if f.ResourceUID != "" && o.Resource.UID == o.Identity.SandboxUID {
			about = &corev1.ObjectReference{
				APIVersion: v1alpha1.GroupVersion.String(), Kind: "Sandbox", Namespace: o.Identity.Namespace, Name: o.Identity.Name,
				UID: types.UID(f.ResourceUID),
			}
		}
		what := "slot " + f.Key.ID
		if o.Identity.Name != "" {
			what = "container " + f.Key.ID + " of sandbox " + o.Identity.Namespace + "/" + o.Identity.Name
		} else if o.Defect != "" {
			what = "container " + f.Key.ID + ", whose labels do not add up,"
		}
		recorder.Eventf(about, container, corev1.EventTypeWarning, "OrphanRemoved", "Remove",
			"removed %s on node %s: %s", what, node, explain(f.Verdict.Reason))
	}
}

// explain returns a reason as text for people.
func explain(r verdict.Reason) string {
	switch r {
	case verdict.AgentPodGone:
		return "the Pod of its agent is gone"
	case verdict.SandboxAbsent:
		return "its Sandbox is gone"
	case verdict.SandboxReplaced:
		return "another Sandbox has its name"
	case verdict.AttemptOver:
		return "its Sandbox is at a later attempt"
	case verdict.AssignedElsewhere:
		return "its Sandbox is assigned to another agent"
	}
	return r.String()
}
