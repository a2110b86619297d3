package fastpath_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
)

// blocked keeps containers from being removed until the test's end.
func blocked(t *testing.T) func(*fakeagent.Agent) {
	t.Helper()
	end := make(chan struct{})
	once := sync.OnceFunc(func() { close(end) })
	t.Cleanup(once)
	return func(a *fakeagent.Agent) {
		a.OnRemove = func(*agentv1.Fence) { <-end }
	}
}

func (m *mesh) removeWith(change func(*sandboxv1.DeleteSandboxRequest)) (*sandboxv1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	req := &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "one"}
	change(req)
	resp, err := m.sandbox.DeleteSandbox(ctx, req)
	return resp.GetSandbox(), rpc.FromStatus(err)
}

func grace(seconds int64) func(*sandboxv1.DeleteSandboxRequest) {
	return func(r *sandboxv1.DeleteSandboxRequest) {
		r.GracePeriod = durationpb.New(time.Duration(seconds) * time.Second)
	}
}

func requestID(id string) func(*sandboxv1.DeleteSandboxRequest) {
	return func(r *sandboxv1.DeleteSandboxRequest) { r.RequestId = id }
}

// TestDeleteGraceIsDurable: the component that carries the deletion out finds what the caller asked for.
func TestDeleteGraceIsDurable(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, blocked(t))
	m.written(a, "one")
	_, err := m.removeWith(grace(60))
	require.NoError(t, err)
	sb := m.resource("one")
	require.NotNil(t, sb.DeletionTimestamp)
	require.Equal(t, "60", sb.Annotations[v1alpha1.AnnotationDeleteGracePeriod], "written before the deletion")

	require.NoError(t, m.remove("one"), "a call that sets none")
	require.Equal(t, "60", m.resource("one").Annotations[v1alpha1.AnnotationDeleteGracePeriod], "changes nothing")

	last := func() int64 {
		requests := a.DeleteRequests()
		if len(requests) == 0 {
			return 0
		}
		return requests[len(requests)-1].GetGracePeriod().GetSeconds()
	}
	m.eventually("the agent receives it", func() bool { return last() == 60 })
	_, err = m.removeWith(grace(2))
	require.NoError(t, err)
	require.Equal(t, "2", m.resource("one").Annotations[v1alpha1.AnnotationDeleteGracePeriod], "a later one replaces it")
	m.eventually("the agent receives that, too", func() bool { return last() == 2 })
}

func TestDeleteGraceWithoutTheAPIServer(t *testing.T) {
	m := newMesh(t, soon)
	a := m.agent("a", 5, blocked(t))
	m.written(a, "one")
	m.api.down.Store(true)
	const traceparent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	_, err := m.server.DeleteSandbox(obs.WithTraceparent(context.Background(), traceparent), &sandboxv1.DeleteSandboxRequest{
		Namespace: ns, Name: "one", GracePeriod: durationpb.New(time.Minute), RequestId: "d1",
	})
	require.NoError(t, err)
	require.Len(t, a.Tombstones(), 1)
	require.Equal(t, int64(60), a.Tombstones()[0].GetGracePeriod().GetSeconds())
	require.Equal(t, "d1", a.Tombstones()[0].GetDeleteRequestId())
	require.Equal(t, traceparent, a.Tombstones()[0].GetTraceparent())
	m.api.down.Store(false)
	m.eventually("the custom resource carries it before it is deleted", func() bool {
		sb := m.resource("one")
		return sb != nil && sb.DeletionTimestamp != nil
	})
	sb := m.resource("one")
	require.Equal(t, "60", sb.Annotations[v1alpha1.AnnotationDeleteGracePeriod])
	require.Equal(t, "d1", sb.Annotations[v1alpha1.AnnotationDeleteRequestID])
	require.Equal(t, traceparent, sb.Annotations[v1alpha1.AnnotationDeleteTraceparent])
	_, err = m.removeWith(grace(1))
	require.NoError(t, err)
	require.Equal(t, "1", m.resource("one").Annotations[v1alpha1.AnnotationDeleteGracePeriod])
	last := a.DeleteRequests()[len(a.DeleteRequests())-1]
	require.Equal(t, int64(1), last.GetGracePeriod().GetSeconds())
	require.Equal(t, int64(1), last.GetTombstone().GetGracePeriod().GetSeconds())
}

// TestNextLeaderReplacesGrace: the tombstone is a former leader's, and a later delete call sets another grace period.
func TestNextLeaderReplacesGrace(t *testing.T) {
	m := newMesh(t, soon)
	a := m.agent("a", 5, blocked(t))
	m.written(a, "one")
	m.api.down.Store(true)
	_, err := m.removeWith(grace(60))
	require.NoError(t, err)
	m.stop()
	m.api.down.Store(false)
	m.start(soon)
	m.eventually("the next leader deletes the custom resource", func() bool {
		sb := m.resource("one")
		return sb != nil && sb.DeletionTimestamp != nil
	})
	require.Equal(t, "60", m.resource("one").Annotations[v1alpha1.AnnotationDeleteGracePeriod])
	_, err = m.removeWith(grace(3))
	require.NoError(t, err)
	require.Equal(t, "3", m.resource("one").Annotations[v1alpha1.AnnotationDeleteGracePeriod])
	m.eventually("the agent receives it", func() bool {
		last := a.DeleteRequests()[len(a.DeleteRequests())-1]
		return last.GetGracePeriod().GetSeconds() == 3
	})
}

func TestDeleteRequestID(t *testing.T) {
	tests := map[string]struct {
		between func(m *mesh)
		holds   bool // the container stays until the end
	}{
		"at once":               {func(*mesh) {}, true},
		"after it is gone":      {func(m *mesh) { m.nothing() }, false},
		"under the next leader": {func(m *mesh) { m.stop(); m.start(soon) }, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, soon)
			var script func(*fakeagent.Agent)
			if test.holds {
				script = blocked(t)
			}
			a := m.agent("a", 5, script)
			m.written(a, "one")
			first, err := m.removeWith(requestID("d1"))
			require.NoError(t, err)
			test.between(m)
			again, err := m.removeWith(requestID("d1"))
			require.NoError(t, err)
			require.Equal(t, first.GetUid(), again.GetUid())
			require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, again.GetStatus().GetPhase())
			_, err = m.removeWith(func(r *sandboxv1.DeleteSandboxRequest) { requestID("d1")(r); r.Name = "two" })
			require.Equal(t, fault.RequestIDReused, fault.ReasonOf(err))
		})
	}
}

// TestRepeatedDeleteSparesLaterSandbox: of the same name, under the same and the next leader, with the API server and without.
func TestRepeatedDeleteSparesLaterSandbox(t *testing.T) {
	for name, down := range map[string]bool{"by the custom resource": false, "by the tombstone": true} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, soon)
			a := m.agent("a", 5, nil)
			uid := m.written(a, "one")
			m.api.down.Store(down)
			_, err := m.removeWith(requestID("d1"))
			require.NoError(t, err)
			m.api.down.Store(false)
			standby := func() bool { d, ok := m.store.DeletedBy(ns, "d1"); return ok && d.UID == uid }
			m.eventually("every replica learns of it", standby)
			m.nothing()
			later := m.written(a, "one")
			again, err := m.removeWith(requestID("d1"))
			require.NoError(t, err)
			require.Equal(t, uid, again.GetUid())
			// The next leader has seen what this one has, and none of its answers.
			next := fastpath.New(m.config)
			resp, err := next.DeleteSandbox(context.Background(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "one", RequestId: "d1"})
			require.NoError(t, err)
			require.Equal(t, uid, resp.GetSandbox().GetUid())
			sb, err := m.get("one")
			require.NoError(t, err)
			require.Equal(t, later, sb.GetUid())
			require.Nil(t, sb.GetDeleteTime())
		})
	}
}

func (m *mesh) update(id string, sb *sandboxv1.Sandbox, paths ...string) (*sandboxv1.Sandbox, error) {
	sb.Namespace, sb.Name = ns, "one"
	out, err := m.sandbox.UpdateSandbox(context.Background(), &sandboxv1.UpdateSandboxRequest{
		Sandbox: sb, RequestId: id, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths},
	})
	return out.GetSandbox(), rpc.FromStatus(err)
}

func TestUpdateRequestID(t *testing.T) {
	label := func(v string) *sandboxv1.Sandbox { return &sandboxv1.Sandbox{Labels: map[string]string{"v": v}} }
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	_, err := m.update("u1", label("1"), "labels")
	require.NoError(t, err)
	_, err = m.update("", label("2"), "labels")
	require.NoError(t, err)
	again, err := m.update("u1", label("1"), "labels")
	require.NoError(t, err)
	require.Equal(t, "2", again.GetLabels()["v"], "a repetition changes nothing")
	_, err = m.update("u1", label("3"), "labels")
	require.Equal(t, fault.RequestIDReused, fault.ReasonOf(err))

	m.stop()
	m.start()
	again, err = m.update("u1", label("1"), "labels")
	require.NoError(t, err)
	require.Equal(t, "2", again.GetLabels()["v"], "under the next leader neither: it was the last with a request_id")
	require.NoError(t, m.remove("one"))
	m.nothing()
	_, err = m.update("u1", label("1"), "labels")
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(err))
}

func TestUpdateGraceAndTTL(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	out, err := m.update("", &sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{
		TerminationGracePeriod: durationpb.New(90 * time.Second), TtlAfterFinished: durationpb.New(time.Minute),
	}}, "spec.termination_grace_period", "spec.ttl_after_finished")
	require.NoError(t, err)
	require.Equal(t, 90*time.Second, out.GetSpec().GetTerminationGracePeriod().AsDuration())
	require.Equal(t, time.Minute, out.GetSpec().GetTtlAfterFinished().AsDuration())
	require.Equal(t, int64(90), *m.resource("one").Spec.TerminationGracePeriodSeconds)
	for path, spec := range map[string]*sandboxv1.SandboxSpec{
		"spec.termination_grace_period": {TerminationGracePeriod: durationpb.New(2 * time.Hour)},
		"spec.ttl_after_finished":       {TtlAfterFinished: durationpb.New(-time.Second)},
	} {
		_, err := m.update("", &sandboxv1.Sandbox{Spec: spec}, path)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err), path)
	}
}

// TestRepeatedUpdateIsNotValidatedAgain: its expire time has passed since.
func TestRepeatedUpdateIsNotValidatedAgain(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	soon := &sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{ExpireTime: timestamppb.New(time.Now().Add(time.Second))}}
	_, err := m.update("u1", soon, "spec.expire_time")
	require.NoError(t, err)
	m.eventually("it has passed", func() bool { return time.Now().After(soon.GetSpec().GetExpireTime().AsTime()) })
	_, err = m.update("u1", soon, "spec.expire_time")
	require.NoError(t, err)
}
