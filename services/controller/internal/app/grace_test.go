//go:build integration

package app_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// annotate sets an annotation of a sandbox.
func (env *testEnv) annotate(name, key, value string) {
	env.t.Helper()
	env.change(name, func(s *v1alpha1.Sandbox) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[key] = value
	})
}

// TestGracePeriodOfDeletion: the grace period of the delete call overrides that of the spec, longer or shorter.
func TestGracePeriodOfDeletion(t *testing.T) {
	for name, tc := range map[string]struct {
		annotation string
		want       time.Duration
	}{
		"spec":    {"", 5 * time.Second},
		"longer":  {"60", time.Minute},
		"shorter": {"0", 0},
		"invalid": {"soon", 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			env.start()
			env.runSandbox("s", func(s *v1alpha1.Sandbox) { s.Spec.TerminationGracePeriodSeconds = ptr.To(int64(5)) })
			if tc.annotation != "" {
				env.annotate("s", v1alpha1.AnnotationDeleteGracePeriod, tc.annotation)
			}
			env.delete("s")
			env.waitForRemoval("s")
			require.Equal(t, []time.Duration{tc.want}, a.gracePeriods())
			if name == "invalid" {
				env.hasOneEvent("InvalidGracePeriod", `"soon" is not a number`)
			}
		})
	}
}

// TestGracePeriodSurvivesRestart: the sandbox is deleted while there is no controller.
func TestGracePeriodSurvivesRestart(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s")
	env.stop()
	env.annotate("s", v1alpha1.AnnotationDeleteGracePeriod, "60")
	env.delete("s")
	env.start()
	env.waitForRemoval("s")
	require.Equal(t, []time.Duration{time.Minute}, a.gracePeriods())
}

// TestGracePeriodChangedWhileTerminating: the agent gets the new grace period at once, and not after the old one has passed.
func TestGracePeriodChangedWhileTerminating(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	env.start()
	env.runSandbox("s")
	env.delete("s")
	calls := func(want ...time.Duration) {
		t.Helper()
		env.eventually(func() bool { return a.deleteCalls() >= len(want) }, func() string { return "the agent was not called" })
		require.Equal(t, want, a.gracePeriods())
	}
	calls(10 * time.Second)
	env.annotate("s", v1alpha1.AnnotationDeleteGracePeriod, "60")
	calls(10*time.Second, time.Minute)
	env.annotate("s", v1alpha1.AnnotationDeleteGracePeriod, "1")
	calls(10*time.Second, time.Minute, time.Second)
	close(gate)
	env.waitForRemoval("s")
}

// TestGracePeriodOfRunningSandboxChanges: resets use the current spec, not that of the container's creation.
func TestGracePeriodOfRunningSandboxChanges(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s")
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.TerminationGracePeriodSeconds = ptr.To(int64(7)) })
	env.annotate("s", v1alpha1.AnnotationDeleteGracePeriod, "60") // not deleted yet: not in force
	env.reset("s")
	env.waitFor("s", "attempt 2", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 2
	})
	require.Equal(t, []time.Duration{7 * time.Second}, a.gracePeriods())
}
