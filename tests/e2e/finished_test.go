//go:build e2e

package e2e_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// Sandboxes whose process has ended hold no capacity: more of them than an agent has capacity fit, with their logs.
func TestEndedSandboxesFreeCapacity(t *testing.T) {
	pool := ownPool(t, "ended", func(p *v1alpha1.SandboxPool) {
		p.Spec.MaxSandboxesPerPod, p.Spec.Capacity = 2, v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1}
	})
	var names []string
	for i := range 5 {
		name := uniqueName("ended")
		r := cluster.Run(t, "", "fsb-ctl", "run", name, "--image", cluster.Busybox, "--pool", pool, "--port", "8200", "--", "echo", "line "+itoa(i))
		require.Zero(t, r.Code, r.Stderr)
		names = append(names, name)
		customResource(t, name, func(s *v1alpha1.Sandbox) bool {
			return conditionOf(s, v1alpha1.ConditionFinished) == metav1.ConditionTrue
		})
	}
	for i, name := range names {
		require.Equal(t, "line "+itoa(i)+"\n", fsbctl(t, "logs", name), "the log of an ended sandbox is kept")
	}
	waitFor(t, "sbp", pool, ".status.freeCapacity", "2")
}

// A sandbox is deleted ttlAfterFinished after its process has ended; its own setting wins over its pool's.
func TestTTLAfterFinished(t *testing.T) {
	pool := ownPool(t, "ttl", func(p *v1alpha1.SandboxPool) { p.Spec.TTLAfterFinished = &metav1.Duration{Duration: 2 * time.Second} })
	short, long := sandboxManifest(uniqueName("short"), pool), sandboxManifest(uniqueName("long"), pool)
	long.Spec.TTLAfterFinished = &metav1.Duration{Duration: time.Hour}
	for _, s := range []*v1alpha1.Sandbox{short, long} {
		s.Spec.Command = []string{"sh", "-c", "sleep 1; echo done"}
		apply(t, s)
	}
	finished := func(s *v1alpha1.Sandbox) bool {
		return conditionOf(s, v1alpha1.ConditionFinished) == metav1.ConditionTrue
	}
	kept := customResource(t, long.Name, finished)
	kubectl(t, "wait", "sbx/"+short.Name, "--for=delete", "--timeout="+flowTime)
	require.True(t, finished(read(t, long.Name)))
	require.Equal(t, "done\n", fsbctl(t, "logs", long.Name))
	kubectl(t, "patch", "sbx", long.Name, "--type=merge", "-p", `{"spec":{"ttlAfterFinished":"1s"}}`)
	kubectl(t, "wait", "sbx/"+long.Name, "--for=delete", "--timeout="+flowTime)
	gone(t, cluster.Namespace, long.Name, kept.EffectiveUID())
}
