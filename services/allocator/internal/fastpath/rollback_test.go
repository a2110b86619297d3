package fastpath_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// A create that failed is rolled back, and its request_id, repeated, makes a new sandbox: it is not "deleted", and never the
// one that is being rolled back.
func TestRepeatAfterFailedCreate(t *testing.T) {
	strong := request("one")
	strong.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	strong.RequestId = "again"
	m := newMesh(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	first := make(chan error, 1)
	go func() {
		_, err := m.sandbox.CreateSandbox(ctx, strong)
		first <- err
	}()
	m.eventually("the custom resource comes first", func() bool { return m.resource("one") != nil })
	uid := m.resource("one").UID
	cancel()
	require.Equal(t, fault.Cancelled, fault.ReasonOf(rpc.FromStatus(<-first)))

	type result struct {
		resp *sandboxv1.CreateSandboxResponse
		err  error
	}
	second := make(chan result, 1)
	go func() {
		for {
			resp, err := m.create(strong)
			if fault.ReasonOf(err) == fault.AgentUnavailable { // being rolled back
				continue
			}
			second <- result{resp, err}
			return
		}
	}()
	m.eventually("a new one replaces it", func() bool {
		cr := m.resource("one")
		return cr != nil && cr.UID != uid
	})
	cr := m.resource("one")
	cr.Status.Phase = v1alpha1.PhaseRunning
	require.NoError(t, m.api.Status().Update(context.Background(), cr))
	r := <-second
	require.NoError(t, r.err)
	require.False(t, r.resp.GetReplayed())
	require.Equal(t, string(cr.UID), r.resp.GetSandbox().GetUid())

	// What its owner deletes stays deleted.
	require.NoError(t, m.remove("one"))
	m.nothing()
	_, err := m.create(strong)
	require.Equal(t, fault.SandboxTerminating, fault.ReasonOf(err))
}

// An API server that has just started refuses every user until it has read its roles; callers see it as unavailable.
func TestAPIServerWithoutRoles(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	m.api.starting.Store(true)
	_, err := m.create(request("two"))
	require.NoError(t, err)
	fresh := request("three")
	fresh.Spec.Pool = "unknown"
	_, err = m.create(fresh)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
	require.ErrorContains(t, err, "roles", "should it last")
	require.NoError(t, m.remove("one"), "the agent remembers it")
	require.Len(t, a.Tombstones(), 1)
	m.api.starting.Store(false)
	m.eventually("both have landed", func() bool { return m.resource("one") == nil && m.resource("two") != nil })
}

// A pool that the informer has not shown yet is looked up before it is said not to exist.
func TestPoolNewerThanInformer(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, nil)
	req := request("one")
	req.Spec.Pool = "newer"
	_, err := m.create(req)
	require.Equal(t, fault.PoolNotFound, fault.ReasonOf(err))
	require.NoError(t, m.api.Create(context.Background(), &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "newer"}}))
	_, err = m.create(req)
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err), "it is there, without agents")
	m.api.down.Store(true)
	req.Spec.Pool = "unknown"
	_, err = m.create(req)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "it is not known")
}
