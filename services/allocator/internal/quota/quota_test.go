package quota_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/quota"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limits are the last that were published, by namespace.
type limits map[string]registry.Limits

func (l limits) SetLimits(namespace string, all registry.Limits) { l[namespace] = all }

func object(name string, hard map[corev1.ResourceName]string, scopes ...corev1.ResourceQuotaScope) *corev1.ResourceQuota {
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.ResourceQuotaSpec{Scopes: scopes, Hard: corev1.ResourceList{}}}
	for key, amount := range hard {
		q.Spec.Hard[key] = resource.MustParse(amount)
	}
	return q
}

func TestLimits(t *testing.T) {
	const count, cpu, memory = "count/sandboxes.fast-sandbox.io", "requests.cpu", "requests.memory"
	selected := object("q", map[corev1.ResourceName]string{count: "1"})
	selected.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
		{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpExists},
	}}
	limit := func(name, key string, hard int64) *registry.Limit {
		return &registry.Limit{Quota: name, Key: key, Hard: hard}
	}
	tests := map[string]struct {
		quotas []*corev1.ResourceQuota
		want   registry.Limits
	}{
		"none": {},
		"all three": {
			[]*corev1.ResourceQuota{object("q", map[corev1.ResourceName]string{count: "10", cpu: "1500m", memory: "2Gi"})},
			registry.Limits{limit("q", count, 10), limit("q", cpu, 1500), limit("q", memory, 2<<30)},
		},
		"zero": {[]*corev1.ResourceQuota{object("q", map[corev1.ResourceName]string{count: "0"})}, registry.Limits{limit("q", count, 0)}},
		"resources of others": {
			[]*corev1.ResourceQuota{object("q", map[corev1.ResourceName]string{"count/pods": "1", "pods": "1", "limits.cpu": "1", "requests.storage": "1Gi", "count/sandboxpools.fast-sandbox.io": "1"})},
			registry.Limits{},
		},
		"the lowest of each": {
			[]*corev1.ResourceQuota{
				object("a", map[corev1.ResourceName]string{count: "10", cpu: "1"}), object("b", map[corev1.ResourceName]string{count: "5", cpu: "2", memory: "1Gi"}),
			},
			registry.Limits{limit("b", count, 5), limit("a", cpu, 1000), limit("b", memory, 1<<30)},
		},
		"of equals the first by name": {
			[]*corev1.ResourceQuota{object("b", map[corev1.ResourceName]string{count: "5"}), object("a", map[corev1.ResourceName]string{count: "5"})},
			registry.Limits{limit("a", count, 5)},
		},
		"a quota with scopes":           {[]*corev1.ResourceQuota{object("q", map[corev1.ResourceName]string{count: "1"}, corev1.ResourceQuotaScopeNotTerminating)}, registry.Limits{}},
		"a quota with a scope selector": {[]*corev1.ResourceQuota{selected}, registry.Limits{}},
		"more than can be counted":      {[]*corev1.ResourceQuota{object("q", map[corev1.ResourceName]string{cpu: "1E"})}, registry.Limits{1: limit("q", cpu, math.MaxInt64)}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := limits{}
			q := quota.New(got)
			for _, object := range test.quotas {
				q.Set(object)
			}
			require.Equal(t, test.want, got["ns"])
			for _, object := range test.quotas {
				q.Remove(object)
			}
			require.Equal(t, registry.Limits{}, got["ns"])
		})
	}
}

func TestQuotaChanges(t *testing.T) {
	got := limits{}
	q := quota.New(got)
	q.Set(object("q", map[corev1.ResourceName]string{quota.CountKey: "1"}))
	q.Set(object("q", map[corev1.ResourceName]string{quota.CountKey: "7"}))
	require.EqualValues(t, 7, got["ns"][registry.Sandboxes].Hard)
	q.Set(object("q", map[corev1.ResourceName]string{"pods": "7"}))
	require.Equal(t, registry.Limits{}, got["ns"])
}
