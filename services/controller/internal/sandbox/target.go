package sandbox

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// target is the Sandbox of one reconcile. Steps change its working copy, which is written to the API server at the end.
type target struct {
	// now is the time of the reconcile.
	now  time.Time
	name types.NamespacedName
	// base is the Sandbox as the API server has it, sandbox the working copy.
	base, sandbox *v1alpha1.Sandbox
	// assignment in force, or nil.
	assignment *v1alpha1.Assignment
}

func newTarget(s *v1alpha1.Sandbox, now time.Time) *target {
	return &target{now: now, name: client.ObjectKeyFromObject(s), sandbox: s.DeepCopy(), base: s.DeepCopy()}
}

func (t *target) deleting() bool { return t.sandbox.DeletionTimestamp != nil }

// fence returns the fence of the assignment, which must not be nil.
func (t *target) fence() identity.Fence { return fenceOf(*t.assignment) }

func fenceOf(a v1alpha1.Assignment) identity.Fence {
	return identity.Fence{SandboxUID: a.SandboxUID, Attempt: a.Attempt, AgentUID: a.AgentUID}
}

// state returns the state for lifecycle.Next.
func (t *target) state() lifecycle.State {
	return lifecycle.State{
		Phase: lifecycle.Phase(t.sandbox.Status.Phase), Assigned: t.assignment != nil,
		Finished: t.sandbox.Status.Phase == v1alpha1.PhaseRunning &&
			meta.IsStatusConditionTrue(t.sandbox.Status.Conditions, v1alpha1.ConditionFinished),
	}
}

// enter changes the phase of the working copy, and reports whether it was another one. The phase Gone is never written.
func (t *target) enter(phase lifecycle.Phase) bool {
	if phase == lifecycle.Gone || string(phase) == string(t.sandbox.Status.Phase) {
		return phase == lifecycle.Gone
	}
	t.sandbox.Status.Phase = v1alpha1.Phase(phase)
	if phase == lifecycle.Pending {
		clearEnd(&t.sandbox.Status)
	}
	return true
}

// fast reports whether the assignment in force was made on the fast path, where the container is created before the resource.
func (t *target) fast() bool {
	if t.sandbox.Annotations[v1alpha1.AnnotationSandboxUID] == "" || t.base.Status.Attempt > 0 && t.base.Status.Attempt < t.assignment.Attempt {
		return false
	}
	c := meta.FindStatusCondition(t.sandbox.Status.Conditions, v1alpha1.ConditionScheduled)
	return c == nil || c.Reason == reasonFastPath
}

// toCreate reports whether the container has to be created by this controller, and has not been observed to run.
func (t *target) toCreate() bool {
	return t.sandbox.Status.Phase != v1alpha1.PhaseRunning && t.sandbox.Status.Phase != v1alpha1.PhaseFailed && !t.fast()
}

// wasLost reports whether the agent was lost at the last reconcile.
func (t *target) wasLost() bool {
	return meta.IsStatusConditionTrue(t.sandbox.Status.Conditions, v1alpha1.ConditionAgentLost)
}

// resetRequested reports whether the spec asks for a reset that is not carried out yet.
func (t *target) resetRequested() bool {
	want, have := t.sandbox.Spec.ResetRevision, t.sandbox.Status.AcceptedResetRevision
	return want != nil && (have == nil || want.After(have.Time))
}

// gracePeriod returns the time between SIGTERM and SIGKILL: that of the delete call, or else that of the spec. nil: that of
// the agent's record. A malformed annotation of the delete call counts as unset.
func (t *target) gracePeriod() *time.Duration {
	if t.deleting() {
		if d, err := t.sandbox.DeleteGracePeriod(); err == nil && d != nil {
			return d
		}
	}
	if seconds := t.sandbox.Spec.TerminationGracePeriodSeconds; seconds != nil {
		d := time.Duration(*seconds) * time.Second
		return &d
	}
	return nil
}

// traceparent returns the trace that the work on the sandbox belongs to: that of the delete call, or else that of the create
// call.
func (t *target) traceparent() string {
	if parent := t.sandbox.Annotations[v1alpha1.AnnotationDeleteTraceparent]; t.deleting() && parent != "" {
		return parent
	}
	return t.sandbox.Annotations[v1alpha1.AnnotationTraceparent]
}

// clearEnd removes what the status says about the end of the last container.
func clearEnd(st *v1alpha1.SandboxStatus) {
	st.ExitCode, st.StartTime, st.StartPath, st.FinishTime, st.Reason, st.Message = nil, nil, "", nil, "", ""
	meta.RemoveStatusCondition(&st.Conditions, v1alpha1.ConditionFinished)
}

// clearAssignment removes the assignment from the working copy.
func (t *target) clearAssignment() {
	t.assignment = nil
	st := &t.sandbox.Status
	st.AssignedPod, st.NodeName, st.SandboxID, st.Endpoints = "", "", "", nil
}
