//go:build integration

package app_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const countKey = "count/sandboxes.fast-sandbox.io"

// setUsed says how many sandboxes the API server's own admission has counted: here is no controller that notices deletions.
func (c *cluster) setUsed(quota string, used int64) {
	c.t.Helper()
	require.NoError(c.t, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		q := &corev1.ResourceQuota{}
		if err := c.admin.Get(c.t.Context(), client.ObjectKey{Namespace: ns, Name: quota}, q); err != nil {
			return err
		}
		q.Status = corev1.ResourceQuotaStatus{Hard: q.Spec.Hard, Used: corev1.ResourceList{countKey: *resource.NewQuantity(used, resource.DecimalSI)}}
		return c.admin.Status().Update(c.t.Context(), q)
	}))
}

// TestQuotasAgainstAnAPIServer: the allocator refuses what the API server would refuse when the resource is written, so that no sandbox
// is acknowledged that cannot be kept, and what the API server cannot count.
func TestQuotasAgainstAnAPIServer(t *testing.T) {
	c := newCluster(t)
	background(t, c.finalize)
	ctx := t.Context()
	require.NoError(t, c.admin.Create(ctx, &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "team"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{countKey: resource.MustParse("4"), corev1.ResourceRequestsCPU: resource.MustParse("1")}},
	}))
	c.setUsed("team", 0)
	a := c.start()
	a.awaitAgent(t)
	request := func(name string, cpu int64) *sandboxv1.CreateSandboxRequest {
		r := create(name)
		r.Spec.Resources = &sandboxv1.ResourceLimits{CpuMillis: cpu}
		return r
	}
	reasonOf := func(r *sandboxv1.CreateSandboxRequest) fault.Reason {
		_, err := a.sandboxes.CreateSandbox(ctx, r)
		return fault.ReasonOf(rpc.FromStatus(err))
	}

	var mu sync.Mutex
	var all sync.WaitGroup
	answers := map[fault.Reason]int{}
	for i := range 16 {
		all.Go(func() {
			reason := reasonOf(request(fmt.Sprint("s", i), 100))
			mu.Lock()
			defer mu.Unlock()
			answers[reason]++
		})
	}
	all.Wait()
	require.Equal(t, map[fault.Reason]int{"": 4, fault.QuotaExceeded: 12}, answers)
	require.Eventually(t, func() bool { return c.count() == 4 }, wait, tick)
	require.Never(t, func() bool { return c.count() != 4 || len(c.agent.Sandboxes()) != 4 }, 500*time.Millisecond, tick, "what was acknowledged is kept")
	strong := request("strong", 100)
	strong.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	require.Equal(t, fault.QuotaExceeded, reasonOf(strong))

	a.stop()
	a = c.start()
	a.awaitAgent(t)
	require.Equal(t, fault.QuotaExceeded, reasonOf(request("after", 100)), "the next allocator counts what it finds")

	list, err := a.sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: ns})
	require.NoError(t, err)
	_, err = a.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: list.GetSandboxes()[0].GetName()})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return c.count() == 3 }, wait, tick)
	c.setUsed("team", 3)
	require.Eventually(t, func() bool { return reasonOf(request("large", 701)) == fault.QuotaExceeded }, wait, tick, "of cpu")
	require.Equal(t, fault.QuotaExceeded, reasonOf(create("unlimited")), "without limits of its own, it counts with the default of one cpu")
	require.Eventually(t, func() bool { return reasonOf(request("after", 700)) == "" }, wait, tick)
	require.Eventually(t, func() bool { return c.count() == 4 }, wait, tick)
}
