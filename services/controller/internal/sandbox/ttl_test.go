package sandbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func (f *fixture) ttl() *ttl {
	return &ttl{client: f.client, pools: f.pools(), events: eventWriter{f.recorder}}
}

func keptFor(d time.Duration) change {
	return func(s *v1alpha1.Sandbox) { s.Spec.TTLAfterFinished = &metav1.Duration{Duration: d} }
}

func crashedSandbox(s *v1alpha1.Sandbox) {
	s.Status.Phase, s.Status.ExitCode, s.Status.FinishTime = v1alpha1.PhaseFailed, ptr.To(int32(3)), &metav1.MicroTime{Time: start}
}

func TestTTL(t *testing.T) {
	poolTTL := newPool(func(p *v1alpha1.SandboxPool) { p.Spec.TTLAfterFinished = &metav1.Duration{Duration: time.Minute} })
	for _, tt := range []struct {
		name    string
		changes []change
		pool    *v1alpha1.SandboxPool
		passed  time.Duration
		deleted bool
		requeue time.Duration
	}{
		{"running", []change{inPhase(v1alpha1.PhaseRunning), onAgent, keptFor(0)}, nil, time.Hour, false, 0},
		{"never ran", []change{inPhase(v1alpha1.PhaseFailed), keptFor(0)}, nil, time.Hour, false, 0},
		{"expired while it ran", []change{inPhase(v1alpha1.PhaseExpired), keptFor(0)}, nil, time.Hour, false, 0},
		{"own, before", []change{finishedSandbox, keptFor(time.Second)}, poolTTL, 999 * time.Millisecond, false, time.Millisecond},
		{"own, then", []change{finishedSandbox, keptFor(time.Second)}, poolTTL, time.Second, true, 0},
		{"zero", []change{finishedSandbox, keptFor(0)}, nil, 0, true, 0},
		{"crashed", []change{crashedSandbox, keptFor(time.Second)}, nil, time.Second, true, 0},
		{"finished and expired", []change{crashedSandbox, inPhase(v1alpha1.PhaseExpired), keptFor(time.Second)}, nil, time.Second, true, 0},
		{"of the pool, before", []change{finishedSandbox}, poolTTL, 0, false, time.Minute},
		{"of the pool, then", []change{finishedSandbox}, poolTTL, time.Minute, true, 0},
		{"default, before", []change{finishedSandbox}, newPool(), time.Minute, false, 59 * time.Minute},
		{"default, then", []change{finishedSandbox}, newPool(), time.Hour, true, 0},
		{"no pool", []change{finishedSandbox}, nil, time.Hour, true, 0},
		{"reset", []change{finishedSandbox, keptFor(0), resetAt(time.Second)}, nil, time.Hour, false, 0},
		{"reset of an expired one", []change{crashedSandbox, inPhase(v1alpha1.PhaseExpired), keptFor(0), resetAt(time.Second)}, nil, time.Hour, true, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, newSandbox(tt.changes...))
			if tt.pool != nil {
				require.NoError(t, f.client.Create(t.Context(), tt.pool.DeepCopy()))
			}
			x := f.target()
			x.now = start.Add(tt.passed)
			r, err := f.ttl().reconcile(t.Context(), x)
			require.NoError(t, err)
			require.Equal(t, tt.requeue, r.requeue)
			require.Equal(t, tt.deleted, f.get().DeletionTimestamp != nil)
			require.Equal(t, tt.deleted, len(f.recorder.all()) == 1)
		})
	}
}

func TestTTLEvent(t *testing.T) {
	f := newFixture(t, newSandbox(finishedSandbox, keptFor(time.Second)))
	x := f.target()
	x.now = start.Add(time.Hour)
	_, err := f.ttl().reconcile(t.Context(), x)
	require.NoError(t, err)
	require.Equal(t, []string{"Normal TTLExpired the process ended at 2026-01-02T03:04:05Z, and ttlAfterFinished is 1s"}, f.recorder.all())
	r, err := f.ttl().reconcile(t.Context(), f.target())
	require.NoError(t, err)
	require.Equal(t, result{}, r, "it is being deleted")
}

// TestTTLOfAChangedSandbox: a change that the cache does not show, for example a reset, keeps the sandbox.
func TestTTLOfAChangedSandbox(t *testing.T) {
	f := newFixture(t, newSandbox(finishedSandbox, keptFor(0)))
	x := f.target()
	changed := f.get()
	resetAt(time.Second)(changed)
	require.NoError(t, f.client.Update(t.Context(), changed))
	r, err := f.ttl().reconcile(t.Context(), x)
	require.NoError(t, err)
	require.Equal(t, cacheDelay, r.requeue)
	require.Nil(t, f.get().DeletionTimestamp)
	require.Empty(t, f.recorder.all())
}

func TestTTLOfARemovedSandbox(t *testing.T) {
	f := newFixture(t, newSandbox(finishedSandbox, keptFor(0), func(s *v1alpha1.Sandbox) { s.Finalizers = nil }))
	x := f.target()
	require.NoError(t, f.client.Delete(t.Context(), f.get()))
	_, err := f.ttl().reconcile(t.Context(), x)
	require.NoError(t, err)
	require.Empty(t, f.recorder.all())
	require.True(t, apierrors.IsNotFound(f.client.Get(t.Context(), name, &v1alpha1.Sandbox{})))
}
