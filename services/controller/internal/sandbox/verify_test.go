package sandbox

import (
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// onVictim gives a Sandbox the uid and the assignment of another one, whose container agent-uid reports.
func onVictim(s *v1alpha1.Sandbox) {
	withAnnotation(v1alpha1.AnnotationSandboxUID, "victim")(s)
	a := assigned
	a.SandboxUID = "victim"
	s.SetAssignment(&a)
	s.Status.Attempt = 1
}

func TestVerifyAssignment(t *testing.T) {
	victims := identity.Fence{SandboxUID: "victim", Attempt: 1, AgentUID: "agent-uid"}
	for _, tt := range []struct {
		name    string
		changes []change
		report  func(f *fixture)
		want    error
	}{
		{"not assigned", nil, nil, nil},
		{"its own", []change{onAgent}, func(f *fixture) { f.registry.reports[fence] = report(runningState) }, nil},
		{"not reported yet", []change{onAgent}, nil, nil},
		{"an agent that is not known", []change{onAgent}, func(f *fixture) { delete(f.registry.agents, "agent-uid") }, nil},
		{"the uid of another sandbox", []change{onVictim, func(s *v1alpha1.Sandbox) { delete(s.Annotations, v1alpha1.AnnotationSandboxUID) }}, nil, errOtherUID},
		{"uid and container of another sandbox", []change{onVictim}, func(f *fixture) {
			r := report(runningState)
			r.Record.Name, r.Record.Fence.SandboxUid = "victim", "victim"
			f.registry.reports[victims] = r
		}, errOtherContainer},
		{"container of another namespace", []change{onVictim}, func(f *fixture) {
			r := report(runningState)
			r.Record.Namespace, r.Record.Fence.SandboxUid = "victim", "victim"
			f.registry.reports[victims] = r
		}, errOtherContainer},
		{"an agent of another namespace", []change{onAgent}, func(f *fixture) {
			a := registered("10.0.0.1:5758", "pool")
			a.Info.Namespace = "victim"
			f.registry.agents["agent-uid"] = a
		}, errOtherNamespace},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.registry.agents["agent-uid"] = registered("10.0.0.1:5758", "pool")
			if tt.report != nil {
				tt.report(f)
			}
			require.ErrorIs(t, f.access().verify(targetOf(t, newSandbox(tt.changes...))), tt.want)
		})
	}
}

// TestForgedAssignmentReachesNoContainer: a Sandbox that names the container of another one is neither run nor deleted there, and
// goes once its annotation is removed.
func TestForgedAssignmentReachesNoContainer(t *testing.T) {
	for _, phase := range []v1alpha1.Phase{"", v1alpha1.PhasePending, v1alpha1.PhaseBound, v1alpha1.PhaseRunning, v1alpha1.PhaseFailed} {
		t.Run(string(phase), func(t *testing.T) {
			f := newFixture(t, agentPod(), newPool(), newSandbox(onVictim, inPhase(phase)))
			r := f.reconciler()
			stolen := report(runningState)
			stolen.Record.Name, stolen.Record.Fence.SandboxUid, stolen.ContainerId = "victim", "victim", "victim-1"
			f.registry.reports[identity.Fence{SandboxUID: "victim", Attempt: 1, AgentUID: "agent-uid"}] = stolen
			r.useRegistry(f.registry)
			f.reconcile(r)
			require.NoError(t, f.client.Delete(t.Context(), f.get()))
			f.reconcile(r)
			require.Empty(t, f.agents.service.creates)
			require.Empty(t, f.agents.service.deleteRequests())
			require.Empty(t, f.allocator.released())
			s := f.get()
			require.Empty(t, s.Status.SandboxID, "it learns nothing of the other sandbox")
			c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionReady)
			require.Equal(t, "AssignmentInvalid", c.Reason)
			s.SetAssignment(nil)
			require.NoError(t, f.client.Update(t.Context(), s))
			f.reconcile(r)
			require.True(t, apierrors.IsNotFound(f.client.Get(t.Context(), name, s)))
			require.Empty(t, f.agents.service.deleteRequests())
		})
	}
}

// TestForgedUIDDeletesNoOtherContainer: a forged later attempt makes the container of another sandbox look stale.
func TestForgedUIDDeletesNoOtherContainer(t *testing.T) {
	f := newFixture(t)
	for _, change := range []func(ns, n *string){func(ns, _ *string) { *ns = "victim" }, func(_, n *string) { *n = "victim" }} {
		stolen := report(runningState)
		change(&stolen.Record.Namespace, &stolen.Record.Name)
		stolen.Record.Fence.SandboxUid = "victim"
		f.registry.reports[identity.Fence{SandboxUID: "victim", Attempt: 1, AgentUID: "agent-uid"}] = stolen
		r := f.remover()
		r.removeStale(t.Context(), targetOf(t, newSandbox(onVictim, func(s *v1alpha1.Sandbox) {
			a := assigned
			a.SandboxUID, a.Attempt = "victim", 9
			s.SetAssignment(&a)
		})))
		_, ok := r.deletes.get(name, identity.Fence{SandboxUID: "victim", Attempt: 1, AgentUID: "agent-uid"})
		require.False(t, ok)
	}
}

// TestForgedAssignmentIsNotRemembered: what a removed Sandbox named is deleted only if it was its own.
func TestForgedAssignmentIsNotRemembered(t *testing.T) {
	f := newFixture(t, agentPod(), newSandbox(inPhase(v1alpha1.PhaseRunning), func(s *v1alpha1.Sandbox) {
		a := assigned
		a.SandboxUID = "victim"
		s.SetAssignment(&a)
	}))
	r := f.reconciler()
	f.reconcile(r)
	require.Empty(t, r.memory.holds.get(name).SandboxUID)
}

// useRegistry makes the steps read another Registry.
func (r *Reconciler) useRegistry(index registry) { r.remover.deleter.agents.index = index }
