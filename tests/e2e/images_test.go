//go:build e2e

package e2e_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// The agents of a pool pull its images ahead, and its status has the state of each image on each node.
func TestPoolImages(t *testing.T) {
	const missing = "127.0.0.1:1/no/such:image"
	pool := ownPool(t, "images", func(p *v1alpha1.SandboxPool) { p.Spec.Images = []string{cluster.Busybox, missing} })
	var s v1alpha1.SandboxPoolStatus
	require.True(t, eventually(time.Minute, func() bool {
		s = v1alpha1.SandboxPoolStatus{}
		require.NoError(t, json.Unmarshal([]byte(kubectl(t, "get", "sbp", pool, "-o", "jsonpath={.status}")), &s))
		return len(s.Images) == 2 && s.Images[0].ReadyNodes == 1 && len(s.Images[1].Nodes) == 1 && s.Images[1].Nodes[0].State == v1alpha1.ImageStateFailed
	}), "status %+v", s.Images)
	require.Equal(t, cluster.Busybox, s.Images[0].Image)
	require.Equal(t, v1alpha1.ImageStateReady, s.Images[0].Nodes[0].State)
	require.Equal(t, "fsb-local", s.Images[0].Nodes[0].Node)
	require.NotEmpty(t, s.Images[1].Nodes[0].Message)

	list := fsbctl(t, "image", "list", "--pool", pool)
	require.Contains(t, list, cluster.Busybox)
	// A pull asks the registry, also for an image that the node has; no registry is in reach of the local cluster.
	pull := cluster.Run(t, "", "fsb-ctl", "image", "pull", missing, "--pool", pool)
	require.NotZero(t, pull.Code)
	require.Contains(t, pull.Stdout+pull.Stderr, "IMAGE_PULL_FAILED")
	require.Contains(t, pull.Stdout+pull.Stderr, "fsb-local", "the node that failed is named")
}

// A sandbox without a pool goes to the default pool of its namespace.
func TestDefaultPool(t *testing.T) {
	pool := ownPool(t, "standard", nil)
	run := func() string {
		name := uniqueName("nopool")
		r := cluster.Run(t, "", "fsb-ctl", "run", name, "--image", cluster.Busybox, "--", "sleep", "600")
		require.Zero(t, r.Code, r.Stderr)
		t.Cleanup(func() { fsbctl(t, "delete", name) })
		return customResource(t, name, running).Spec.PoolRef
	}
	require.Equal(t, v1alpha1.DefaultPool, run())
	kubectl(t, "annotate", "namespace", cluster.Namespace, v1alpha1.AnnotationDefaultPool+"="+pool)
	t.Cleanup(func() { kubectl(t, "annotate", "namespace", cluster.Namespace, v1alpha1.AnnotationDefaultPool+"-") })
	require.True(t, eventually(settle, func() bool { return run() == pool }), "the namespace's annotation must choose the pool")

	s := sandboxManifest(uniqueName("nopool"), "")
	apply(t, s)
	waitFor(t, "sbx", s.Name, ".status.phase", "Running")
	kubectl(t, "delete", "sbx", s.Name, "--timeout="+flowTime)
}
