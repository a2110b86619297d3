package registry

import (
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Resource is what a quota of a namespace limits.
type Resource int

// The resources.
const (
	// Sandboxes are those that exist, whether they run or have ended, and those that are being created.
	Sandboxes Resource = iota
	// CPU is in thousandths of a core. CPU and Memory are sums over the sandboxes that hold capacity.
	CPU
	// Memory is in bytes.
	Memory
	resources
)

// retryQuota is the retry hint of a refusal by a quota: some sandbox has to end, or the quota has to change.
const retryQuota = 5 * time.Second

// maxDemand bounds what one sandbox counts, so that no sum overflows whatever agents report: 16 TiB.
const maxDemand = 1 << 44

// Demand is the resource limits of one sandbox, as far as quotas count them. Every sandbox has limits.
type Demand struct {
	// CPU is in thousandths of a core, Memory in bytes.
	CPU, Memory int64
}

// Amounts are amounts by Resource.
type Amounts [resources]int64

// Limit is the limit of one resource.
type Limit struct {
	// Quota is the name of the quota, Key that of the resource in it.
	Quota, Key string
	Hard       int64
}

// Limits are the limits of a namespace by Resource; nil for none.
type Limits [resources]*Limit

// space is what the sandboxes of a namespace use. Each allocation on an agent of the namespace counts its demand. A sandbox counts
// as one while a create makes it, and while it is visible:
//
//	     Allocate(New)                Shown
//	(0) ---------------> [creating] ---------> [shown] --Hidden--> (0)
//	 | ^                      | EndCreate         ^
//	 | +----------------------+                   |
//	 +------------------- Shown ------------------+
type space struct {
	name   string
	limits Limits
	used   Amounts
	pools  int
}

// space returns the namespace of a name, and makes one if there is none.
func (r *Registry) space(name string) *space {
	s := r.spaces[name]
	if s == nil {
		s = &space{name: name}
		r.spaces[name] = s
	}
	return s
}

// drop removes a namespace of which nothing is known.
func (r *Registry) drop(s *space) {
	if s.pools == 0 && s.used == (Amounts{}) && s.limits == (Limits{}) {
		delete(r.spaces, s.name)
	}
}

func (s *space) charge(d Demand) {
	s.used[CPU] += d.CPU
	s.used[Memory] += d.Memory
}

func (s *space) discharge(d Demand) {
	s.used[CPU] -= d.CPU
	s.used[Memory] -= d.Memory
}

// admit returns the error of a sandbox that would exceed a quota.
func (s *space) admit(d Demand, isNew bool) error {
	asked := Amounts{CPU: d.CPU, Memory: d.Memory}
	if isNew {
		asked[Sandboxes] = 1
	}
	for i, limit := range s.limits {
		if limit != nil && asked[i] > 0 && s.used[i] > limit.Hard-asked[i] {
			return s.exceeded(limit, Resource(i), asked[i])
		}
	}
	return nil
}

// exceeded is the error of a sandbox that asks for more than is left.
func (s *space) exceeded(limit *Limit, resource Resource, asked int64) error {
	requested, used, allowed := resource.format(asked), resource.format(s.used[resource]), resource.format(limit.Hard)
	return fault.New(errdefs.ErrResourceExhausted, fault.QuotaExceeded, "quota %s of namespace %s allows %s of %s: %s used, %s requested",
		limit.Quota, s.name, allowed, limit.Key, used, requested).
		With("quota", limit.Quota).With("resource", limit.Key).With("requested", requested).With("used", used).With("allowed", allowed).
		RetryIn(retryQuota)
}

// format returns an amount as a Kubernetes quantity.
func (r Resource) format(n int64) string {
	text := strconv.FormatInt(n, 10)
	if r == CPU {
		return text + "m"
	}
	return text
}

// bounded returns the demand as it counts.
func (d Demand) bounded() Demand {
	return Demand{CPU: min(max(d.CPU, 0), maxDemand), Memory: min(max(d.Memory, 0), maxDemand)}
}

// SetLimits replaces the limits of a namespace. They apply to what is reserved from now on.
func (r *Registry) SetLimits(namespace string, limits Limits) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.space(namespace)
	s.limits = limits
	r.drop(s)
}

// Admit returns the error that Allocate would return now for a new sandbox that exceeds a quota. It reserves nothing.
func (r *Registry) Admit(now time.Time, namespace string, d Demand) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if s := r.spaces[namespace]; s != nil {
		return s.admit(d, true)
	}
	return nil
}

// Used returns what the sandboxes of a namespace use.
func (r *Registry) Used(now time.Time, namespace string) Amounts {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if s := r.spaces[namespace]; s != nil {
		return s.used
	}
	return Amounts{}
}

// EndCreate ends that a sandbox counts because it is being created. It is idempotent.
func (r *Registry) EndCreate(sandboxUID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endCreate(sandboxUID)
}

func (r *Registry) endCreate(sandboxUID string) {
	if s := r.creating[sandboxUID]; s != nil {
		delete(r.creating, sandboxUID)
		s.used[Sandboxes]--
		r.drop(s)
	}
}

// Shown counts a sandbox that has become visible, in place of its create. It is called once for each time that this happens.
func (r *Registry) Shown(namespace, sandboxUID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.space(namespace).used[Sandboxes]++
	r.endCreate(sandboxUID)
}

// Hidden ends what Shown has begun.
func (r *Registry) Hidden(namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.space(namespace)
	s.used[Sandboxes]--
	r.drop(s)
}
