package registry_test

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

func limits(sandboxes, cpu, memory int64) registry.Limits {
	var all registry.Limits
	for i, hard := range []int64{sandboxes, cpu, memory} {
		if hard >= 0 {
			all[i] = &registry.Limit{Quota: "team", Key: []string{"count/sandboxes.fast-sandbox.io", "requests.cpu", "requests.memory"}[i], Hard: hard}
		}
	}
	return all
}

// asking is a request for a new sandbox with limits.
func asking(uid string, cpu, memory int64) registry.Request {
	r := request(uid)
	r.New, r.Demand = true, registry.Demand{CPU: cpu, Memory: memory}
	return r
}

func TestQuotas(t *testing.T) {
	tests := map[string]struct {
		limits   registry.Limits
		held     []registry.Request
		request  registry.Request
		reason   fault.Reason
		metadata map[string]string
	}{
		"none":         {limits(-1, -1, -1), []registry.Request{asking("1", 0, 0)}, asking("x", 0, 0), "", nil},
		"sandboxes":    {limits(2, -1, -1), []registry.Request{asking("1", 0, 0)}, asking("x", 0, 0), "", nil},
		"no sandboxes": {limits(0, -1, -1), nil, asking("x", 0, 0), fault.QuotaExceeded, map[string]string{"used": "0", "requested": "1", "allowed": "0"}},
		"too many": {limits(1, -1, -1), []registry.Request{asking("1", 0, 0)}, asking("x", 0, 0), fault.QuotaExceeded,
			map[string]string{"quota": "team", "resource": "count/sandboxes.fast-sandbox.io", "used": "1", "requested": "1", "allowed": "1"}},
		"one that exists is not another": {limits(0, -1, -1), nil, request("x"), "", nil},
		"cpu":                            {limits(-1, 1000, -1), []registry.Request{asking("1", 600, 0)}, asking("x", 400, 0), "", nil},
		"too much cpu": {limits(-1, 1000, -1), []registry.Request{asking("1", 600, 0)}, asking("x", 401, 0), fault.QuotaExceeded,
			map[string]string{"quota": "team", "resource": "requests.cpu", "used": "600m", "requested": "401m", "allowed": "1000m"}},
		"too much memory": {limits(-1, -1, 1<<30), []registry.Request{asking("1", 0, 1<<29)}, asking("x", 0, 1<<30), fault.QuotaExceeded,
			map[string]string{"quota": "team", "resource": "requests.memory", "used": "536870912", "requested": "1073741824", "allowed": "1073741824"}},
		"more than any number": {limits(-1, 1000, -1), []registry.Request{asking("1", 600, 0)}, asking("x", math.MaxInt64, 0), fault.QuotaExceeded, nil},
		"a restart needs cpu":  {limits(-1, 1000, -1), []registry.Request{asking("1", 1000, 0)}, registry.Request{Fence: identity.Fence{SandboxUID: "x", Attempt: 2}, Pool: pool, Demand: registry.Demand{CPU: 1}}, fault.QuotaExceeded, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := registry.New(0, 0)
			r.ApplySnapshot(epoch, snapshot("a", 10))
			other := snapshot("b", 10)
			other.Pool.Namespace = "other"
			r.ApplySnapshot(epoch, other)
			r.SetLimits(pool.Namespace, test.limits)
			for _, held := range test.held {
				_, err := r.Allocate(epoch, held)
				require.NoError(t, err)
			}
			before := r.Used(epoch, pool.Namespace)
			_, err := r.Allocate(epoch, test.request)
			require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
			if test.reason == "" {
				return
			}
			require.Equal(t, before, r.Used(epoch, pool.Namespace), "what is refused uses nothing")
			var f *fault.Error
			require.ErrorAs(t, err, &f)
			require.Subset(t, f.Metadata(), test.metadata)
			if test.reason == fault.QuotaExceeded {
				require.True(t, errdefs.IsResourceExhausted(err))
				_, retry := fault.RetryAfter(err)
				require.True(t, retry)
			}
			if test.request.New {
				require.EqualError(t, r.Admit(epoch, pool.Namespace, test.request.Demand), err.Error())
			}
			elsewhere := test.request
			elsewhere.Pool.Namespace = "other"
			_, err = r.Allocate(epoch, elsewhere)
			require.NoError(t, err, "quotas are of one namespace")
		})
	}
}

// TestConcurrentCreatesDoNotExceedAQuota: the check and the reservation are one step.
func TestConcurrentCreatesDoNotExceedAQuota(t *testing.T) {
	r := registry.New(0, 0)
	for i := range 4 {
		r.ApplySnapshot(epoch, snapshot(fmt.Sprint(i), 100))
	}
	r.SetLimits(pool.Namespace, limits(10, 1000, -1))
	var placed atomic.Int64
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			if _, err := r.Allocate(epoch, asking(fmt.Sprint(i), 125, 0)); err == nil {
				placed.Add(1)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 8, placed.Load())
	require.Equal(t, registry.Amounts{8, 1000, 0}, r.Used(epoch, pool.Namespace))
}

// TestSandboxCountsOnce follows one sandbox from its create to the end of its resource.
func TestSandboxCountsOnce(t *testing.T) {
	r := registry.New(0, 0)
	r.ApplySnapshot(epoch, snapshot("a", 10))
	r.ApplySnapshot(epoch, snapshot("b", 10))
	used := func(sandboxes, cpu int64, when string) {
		t.Helper()
		require.Equal(t, registry.Amounts{sandboxes, cpu, 0}, r.Used(epoch, pool.Namespace), when)
	}
	first, second := asking("x", 5, 0), asking("x", 5, 0)
	second.Fence.Attempt = 2
	_, err := r.Allocate(epoch, first)
	require.NoError(t, err)
	used(1, 5, "it is being created")
	_, err = r.Allocate(epoch, first)
	require.NoError(t, err)
	used(1, 5, "a repetition")
	_, err = r.Allocate(epoch, second)
	require.NoError(t, err)
	used(1, 10, "two attempts may run, of one sandbox")
	r.Release(epoch, first.Fence)
	used(1, 5, "the first attempt has failed")
	for _, uid := range []string{"a", "b"} {
		r.ApplyDelta(epoch, registry.Delta{UID: uid, Sandboxes: []registry.Sandbox{{Fence: second.Fence, Ended: true}}})
	}
	used(1, 0, "its process has ended, and its caller was not answered yet")
	r.Shown(pool.Namespace, "x")
	r.EndCreate("x")
	used(1, 0, "an ended sandbox exists")
	r.Hidden(pool.Namespace)
	used(0, 0, "it was deleted")

	_, err = r.Allocate(epoch, asking("y", 5, 0))
	require.NoError(t, err)
	r.EndCreate("y")
	used(0, 5, "the create has failed, and its container is being removed")
	require.Equal(t, registry.Amounts{}, r.Used(epoch.Add(time.Minute), pool.Namespace), "the reservation has expired")
}

// TestUsageFollowsAgents: what an agent holds counts where its Pod is, whatever it reports.
func TestUsageFollowsAgents(t *testing.T) {
	r := registry.New(0, 0)
	s := snapshot("a", 10)
	for i := range 3 {
		s.Sandboxes = append(s.Sandboxes, registry.Sandbox{
			Fence: identity.Fence{SandboxUID: fmt.Sprint(i), Attempt: 1}, Demand: registry.Demand{CPU: math.MaxInt64, Memory: -5},
		})
	}
	r.ApplySnapshot(epoch, s)
	used := r.Used(epoch, pool.Namespace)
	require.Positive(t, used[registry.CPU], "the sum of lies does not overflow")
	require.Zero(t, used[registry.Memory])
	require.Zero(t, used[registry.Sandboxes], "only what is visible, or being created, counts")

	s.Pool.Namespace, s.Sandboxes = "other", s.Sandboxes[:2]
	r.ApplySnapshot(epoch, s)
	require.Zero(t, r.Used(epoch, pool.Namespace))
	require.Equal(t, used[registry.CPU]/3*2, r.Used(epoch, "other")[registry.CPU])
	r.Leave("a")
	require.Zero(t, r.Used(epoch, "other"))
	require.Zero(t, r.Spaces(), "nothing is remembered of namespaces without agents, sandboxes and quotas")
	r.SetLimits("other", limits(1, -1, -1))
	require.Equal(t, 1, r.Spaces())
	r.SetLimits("other", registry.Limits{})
	r.Shown("third", "x")
	r.Hidden("third")
	require.Zero(t, r.Spaces())
}

// TestReservedDemandCounts: an agent cannot make a sandbox count less than it was created with.
func TestReservedDemandCounts(t *testing.T) {
	r := registry.New(0, 0)
	r.ApplySnapshot(epoch, snapshot("a", 10))
	_, err := r.Allocate(epoch, asking("x", 500, 1000))
	require.NoError(t, err)
	r.ApplyDelta(epoch, registry.Delta{UID: "a", Sandboxes: []registry.Sandbox{{Fence: identity.Fence{SandboxUID: "x", Attempt: 1}, Demand: registry.Demand{CPU: 1}}}})
	require.Equal(t, registry.Amounts{1, 500, 1000}, r.Used(epoch, pool.Namespace))
}
