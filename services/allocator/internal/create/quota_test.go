package create_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// limit sets quotas of the namespace; -1 is none.
func (e *env) limit(sandboxes, cpu int64) {
	var limits registry.Limits
	if sandboxes >= 0 {
		limits[registry.Sandboxes] = &registry.Limit{Quota: "team", Key: "count/sandboxes.fast-sandbox.io", Hard: sandboxes}
	}
	if cpu >= 0 {
		limits[registry.CPU] = &registry.Limit{Quota: "team", Key: "requests.cpu", Hard: cpu}
	}
	e.registry.SetLimits(ns, limits)
}

// named is a request with a limit of cpu.
func named(name string, cpu int64, changes ...func(*sandboxv1.CreateSandboxRequest)) *sandboxv1.CreateSandboxRequest {
	return request(func(r *sandboxv1.CreateSandboxRequest) {
		r.Name, r.Spec.Resources = name, &sandboxv1.ResourceLimits{CpuMillis: cpu}
		for _, change := range changes {
			change(r)
		}
	})
}

func requireQuota(t *testing.T, err error, used, allowed string) {
	t.Helper()
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
	var f *fault.Error
	require.ErrorAs(t, err, &f)
	require.Equal(t, fault.QuotaExceeded, f.Reason())
	require.Equal(t, "team", f.Metadata()["quota"])
	require.Equal(t, used, f.Metadata()["used"])
	require.Equal(t, allowed, f.Metadata()["allowed"])
	require.False(t, fault.IsUnsettled(err))
}

func TestQuotaRefusesACreate(t *testing.T) {
	for name, change := range map[string]func(*sandboxv1.CreateSandboxRequest){"fast": func(*sandboxv1.CreateSandboxRequest) {}, "strong": strong} {
		t.Run(name+", sandboxes", func(t *testing.T) {
			e := newEnv(t, 5)
			e.limit(0, -1)
			_, err := e.create(t.Context(), named("one", 100, change))
			requireQuota(t, err, "0", "0")
			e.requireNothingNow()
			require.Zero(t, e.creates())
		})
		t.Run(name+", cpu", func(t *testing.T) {
			e := newEnv(t, 5)
			e.limit(-1, 99)
			_, err := e.create(t.Context(), named("one", 100, change))
			requireQuota(t, err, "0m", "99m")
			e.requireNothingNow()
		})
		t.Run(name+", the default limit", func(t *testing.T) {
			e := newEnv(t, 5)
			e.limit(-1, resources.Defaults().CPUMillis-1)
			_, err := e.create(t.Context(), request(change))
			requireQuota(t, err, "0m", "999m")
			e.requireNothingNow()
		})
	}
}

// TestConcurrentCreatesShareAQuota: however many creates run at a time, no more succeed than the quota allows, and no fewer.
func TestConcurrentCreatesShareAQuota(t *testing.T) {
	e := newEnv(t, 20, 20)
	e.limit(6, 1000)
	const calls = writeLimit
	done := make([]chan result, calls)
	for i := range calls {
		done[i] = e.begin(t.Context(), named(fmt.Sprint("s", i), 200))
	}
	made := 0
	for _, d := range done {
		r := <-d
		if r.err == nil {
			made++
			continue
		}
		require.Equal(t, fault.QuotaExceeded, fault.ReasonOf(r.err), "%v", r.err)
	}
	require.Equal(t, 5, made)
	require.Equal(t, registry.Amounts{5, 1000, 5 * resources.Defaults().MemoryBytes}, e.registry.Used(e.clock.Now(), ns))
	_, err := e.create(t.Context(), named("more", 1))
	requireQuota(t, err, "1000m", "1000m")
}

// TestFailedCreateGivesItsQuotaBack, wherever it fails.
func TestFailedCreateGivesItsQuotaBack(t *testing.T) {
	e := newEnv(t, 5)
	e.limit(1, 100)
	for name, err := range map[string]error{
		"the image":  fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no such image"),
		"the agent":  fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd is away"),
		"the unsaid": errors.New("boom"),
	} {
		t.Run(name, func(t *testing.T) {
			e.script(onFirst(err))
			_, got := e.create(t.Context(), named("one", 100))
			require.Error(t, got)
			require.NotEqual(t, fault.QuotaExceeded, fault.ReasonOf(got))
			e.requireNothing()
		})
	}
	e.script(nil)
	_, err := e.create(t.Context(), named("one", 100))
	require.NoError(t, err)
}

// TestEndedSandboxCountsUntilItIsDeleted, as it does for the API server: otherwise that would refuse the resource of a sandbox that
// was acknowledged. Its cpu is free.
func TestEndedSandboxCountsUntilItIsDeleted(t *testing.T) {
	e := newEnv(t, 5)
	e.limit(1, 100)
	response, err := e.create(t.Context(), named("one", 100))
	require.NoError(t, err)
	e.until("it is written", func() bool { return e.resource("one") != nil })
	e.agents["a"].Stop(response.GetSandbox().GetUid(), 0)
	e.report("a")
	require.Equal(t, registry.Amounts{1, 0, 0}, e.registry.Used(e.clock.Now(), ns))
	_, err = e.create(t.Context(), named("two", 100))
	requireQuota(t, err, "1", "1")
	e.limit(2, 100)
	_, err = e.create(t.Context(), named("two", 100))
	require.NoError(t, err)
}

// TestAPIServerRefusesForAQuota: another client may have used up the quota a moment ago.
func TestAPIServerRefusesForAQuota(t *testing.T) {
	e := newEnv(t, 5)
	e.api.Before(fails(apierrors.NewForbidden(v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource(), "one",
		errors.New("exceeded quota: team, requested: count/sandboxes.fast-sandbox.io=1, used: count/sandboxes.fast-sandbox.io=5, limited: count/sandboxes.fast-sandbox.io=5")), fakeapi.Create))
	_, err := e.create(t.Context(), named("one", 100, strong))
	require.Equal(t, fault.QuotaExceeded, fault.ReasonOf(err))
	require.ErrorContains(t, err, "limited: count/sandboxes.fast-sandbox.io=5")
	e.requireNothingNow()
}
