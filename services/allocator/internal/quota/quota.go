// Package quota owns the informer's view of ResourceQuotas, and gives the registry the limits of each namespace: of several quotas the
// lowest of each resource. What is used it neither knows nor reads from the quotas' status, which is behind. It does no I/O. All
// methods may be called concurrently.
//
// A quota limits sandboxes by three names in spec.hard:
//
//	count/sandboxes.fast-sandbox.io   the number of Sandboxes, ended ones included; the API server enforces this one, too
//	requests.cpu, requests.memory     the sums of the limits of the sandboxes that hold capacity; a sandbox requests what it is limited to
//
// A quota with scopes or a scopeSelector limits no sandbox: scopes select Pods and volume claims, as they do for every custom resource.
package quota

import (
	"math"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// CountKey is the name of the number of Sandboxes in a ResourceQuota.
const CountKey corev1.ResourceName = "count/sandboxes." + v1alpha1.Group

// keys are the names of resources in a ResourceQuota.
var keys = [...]corev1.ResourceName{ //nolint:gochecknoglobals // a constant
	registry.Sandboxes: CountKey, registry.CPU: corev1.ResourceRequestsCPU, registry.Memory: corev1.ResourceRequestsMemory,
}

// Registry is the part of registry.Registry that is used.
type Registry interface {
	SetLimits(namespace string, limits registry.Limits)
}

// Quotas is the memory of quotas. Its lock is taken before the registry's.
type Quotas struct {
	registry Registry

	mu         sync.Mutex
	namespaces map[string]map[string]registry.Limits // by namespace and name
}

// New returns an empty memory.
func New(r Registry) *Quotas {
	return &Quotas{registry: r, namespaces: map[string]map[string]registry.Limits{}}
}

// Set adds or replaces a quota.
func (q *Quotas) Set(quota *corev1.ResourceQuota) {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.namespaces[quota.Namespace]
	if all == nil {
		all = map[string]registry.Limits{}
		q.namespaces[quota.Namespace] = all
	}
	all[quota.Name] = limitsOf(quota)
	q.publish(quota.Namespace)
}

// Remove removes a quota.
func (q *Quotas) Remove(quota *corev1.ResourceQuota) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.namespaces[quota.Namespace], quota.Name)
	if len(q.namespaces[quota.Namespace]) == 0 {
		delete(q.namespaces, quota.Namespace)
	}
	q.publish(quota.Namespace)
}

// publish gives the registry the lowest limits of a namespace. mu is held.
func (q *Quotas) publish(namespace string) {
	var lowest registry.Limits
	for _, limits := range q.namespaces[namespace] {
		for i, limit := range limits {
			if limit != nil && (lowest[i] == nil || lower(limit, lowest[i])) {
				lowest[i] = limit
			}
		}
	}
	q.registry.SetLimits(namespace, lowest)
}

// lower orders limits; of equal ones the first name counts, so that errors are the same every time.
func lower(a, b *registry.Limit) bool {
	if a.Hard != b.Hard {
		return a.Hard < b.Hard
	}
	return strings.Compare(a.Quota, b.Quota) < 0
}

// limitsOf returns the limits that a quota sets on sandboxes.
func limitsOf(quota *corev1.ResourceQuota) registry.Limits {
	var limits registry.Limits
	if len(quota.Spec.Scopes) > 0 || quota.Spec.ScopeSelector != nil {
		return limits
	}
	for resource, hard := range quota.Spec.Hard {
		i := slices.Index(keys[:], resource)
		if i < 0 {
			continue
		}
		amount := hard.Value()
		if registry.Resource(i) == registry.CPU {
			amount = millis(amount, hard.MilliValue())
		}
		limits[i] = &registry.Limit{Quota: quota.Name, Key: string(resource), Hard: amount}
	}
	return limits
}

// millis returns an amount in thousandths: that of the quantity, unless it overflows.
func millis(whole, thousandths int64) int64 {
	if whole > math.MaxInt64/1000 {
		return math.MaxInt64
	}
	return thousandths
}
