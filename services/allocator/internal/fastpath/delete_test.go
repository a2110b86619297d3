package fastpath_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

func TestDeleteUnknown(t *testing.T) {
	m := newMesh(t)
	err := m.remove("unknown")
	require.True(t, errdefs.IsNotFound(err))
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(err))
}

func TestDeleteOvertakesWrite(t *testing.T) {
	tests := map[string]struct {
		before, between func(*mesh)
	}{
		"the API server is away": {
			before: func(m *mesh) { m.api.down.Store(true) },
		},
		"the write's answer was lost": {
			before:  func(m *mesh) { m.api.mute.Store(true) },
			between: func(m *mesh) { m.eventually("it was sent", func() bool { return m.api.creates.Load() > 0 }) },
		},
		"the write's answer was lost, and then the API server went away": {
			before: func(m *mesh) { m.api.mute.Store(true) },
			between: func(m *mesh) {
				m.eventually("it was sent", func() bool { return m.api.creates.Load() > 0 })
				m.api.down.Store(true)
			},
		},
		"the write is under way": {
			before: func(m *mesh) { m.api.onCreate.Store(func(*v1alpha1.Sandbox) { <-time.After(50 * time.Millisecond) }) },
		},
		"it has landed": {
			between: func(m *mesh) { m.eventually("landed", func() bool { return m.resource("one") != nil }) },
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			a := m.agent("a", 5, nil)
			if test.before != nil {
				test.before(m)
			}
			resp, err := m.create(request("one"))
			require.NoError(t, err)
			if test.between != nil {
				test.between(m)
			}
			if err := m.remove("one"); err != nil {
				// A custom resource that may exist cannot be deleted durably without its API server.
				require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
				m.api.down.Store(false)
				require.NoError(t, m.remove("one"))
			}
			m.api.down.Store(false)
			m.api.mute.Store(false)
			m.nothing()
			require.NotEmpty(t, a.Deletes())
			require.Equal(t, resp.GetSandbox().GetUid(), a.Deletes()[0].GetSandboxUid())
			m.eventually("no write can land any longer", func() bool { return m.server.Pending() == 0 })
			require.Zero(t, m.resources()+len(a.Sandboxes()))
		})
	}
}

func TestCreateAndDeleteStorm(t *testing.T) {
	m := newMesh(t)
	for i := range 2 {
		m.agent(fmt.Sprint("a", i), 20, nil)
	}
	var wg sync.WaitGroup
	names := make(chan string, 40)
	for i := range 40 {
		names <- fmt.Sprint("storm-", i)
	}
	close(names)
	var failed atomic.Int64
	for range 8 {
		wg.Go(func() {
			for name := range names {
				if _, err := m.create(request(name)); err != nil {
					failed.Add(1)
				}
				if err := m.remove(name); err != nil {
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, failed.Load())
	m.nothing()
}

func TestDeleteWaitsForCreate(t *testing.T) {
	m := newMesh(t)
	gate := make(chan struct{})
	a := m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error { <-gate; return nil }
	})
	created, deleted := make(chan error, 1), make(chan error, 1)
	go func() { _, err := m.create(request("one")); created <- err }()
	m.eventually("it is under way", func() bool { return a.Creates() == 1 })
	ctx := newWaiting()
	go func() {
		_, err := m.server.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "one"})
		deleted <- err
	}()
	<-ctx.waits // for the lock of the name
	require.Empty(t, deleted)
	close(gate)
	require.NoError(t, <-created)
	require.NoError(t, <-deleted)
	m.nothing()
	resp, err := m.create(request("one"))
	require.NoError(t, err, "the name is free again")
	require.NotEqual(t, a.Deletes()[0].GetSandboxUid(), resp.GetSandbox().GetUid())
}

func TestDeletePreconditionAndRepetition(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnDelete = func(context.Context, *agentv1.Fence) error {
			return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "later")
		}
	})
	resp, err := m.create(request("one"))
	require.NoError(t, err)
	m.eventually("landed", func() bool { return m.resource("one") != nil })
	_, err = m.sandbox.DeleteSandbox(context.Background(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "one", Uid: "other"})
	require.Equal(t, fault.FenceMismatch, fault.ReasonOf(rpc.FromStatus(err)))
	require.NoError(t, m.remove("one"), "the deletion is durable although the agent cannot carry it out now")
	require.NoError(t, m.remove("one"), "and may be repeated")
	sb, err := m.get("one")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, sb.GetStatus().GetPhase())
	require.NotNil(t, sb.GetDeleteTime())
	require.Equal(t, resp.GetSandbox().GetUid(), sb.GetUid())
	_, err = m.create(request("one"))
	require.Equal(t, fault.SandboxExists, fault.ReasonOf(err))
}

func TestAdoptionAfterRestart(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.api.down.Store(true)
	req := request("one")
	req.RequestId = "r1"
	resp, err := m.create(req)
	require.NoError(t, err)
	m.stop() // its memory of what is not written is gone
	m.api.down.Store(false)
	require.Zero(t, m.resources())
	m.start()
	m.eventually("the agent's record tells the request_id", func() bool {
		again, err := m.create(req)
		return err == nil && again.GetReplayed() && again.GetSandbox().GetUid() == resp.GetSandbox().GetUid()
	})
	m.eventually("it is adopted", func() bool { return m.resource("one") != nil })
	cr := m.resource("one")
	require.Equal(t, resp.GetSandbox().GetUid(), cr.EffectiveUID())
	assignment, err := cr.Assignment()
	require.NoError(t, err)
	require.Equal(t, "a", assignment.AgentUID)
	require.Equal(t, "pod-a", assignment.AgentPod)
	m.eventually("the agent has marked it", func() bool { return a.Sandboxes()[0].GetPersisted() })
	require.Equal(t, 1, a.Creates())
	require.NoError(t, m.remove("one"))
	m.nothing()
}

func TestDeletedBeforeAdoption(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.api.down.Store(true)
	_, err := m.create(request("one"))
	require.NoError(t, err)
	m.stop()
	m.api.down.Store(false)
	m.start()
	require.NoError(t, m.remove("one"), "it is known from the agent's report alone")
	m.nothing()
	require.Len(t, a.Deletes(), 1)
}

func TestUpdate(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, nil)
	req := request("one")
	req.Labels = map[string]string{"keep": "no"}
	resp, err := m.create(req)
	require.NoError(t, err)
	update := func(sb *sandboxv1.Sandbox, paths ...string) (*sandboxv1.Sandbox, error) {
		sb.Namespace, sb.Name = ns, "one"
		out, err := m.sandbox.UpdateSandbox(context.Background(), &sandboxv1.UpdateSandboxRequest{Sandbox: sb, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths}})
		return out.GetSandbox(), rpc.FromStatus(err)
	}
	soon := timestamppb.New(time.Now().Add(time.Hour).Truncate(time.Second))
	out, err := update(&sandboxv1.Sandbox{Labels: map[string]string{"new": "yes"}, Spec: &sandboxv1.SandboxSpec{
		ExpireTime: soon, FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE, Image: "ignored",
	}}, "labels", "spec.expire_time", "spec.failure_policy")
	require.NoError(t, err)
	require.Equal(t, soon.AsTime(), out.GetSpec().GetExpireTime().AsTime())
	require.Equal(t, "busybox", out.GetSpec().GetImage())
	cr := m.resource("one")
	require.Equal(t, map[string]string{"new": "yes", v1alpha1.LabelPool: pool, v1alpha1.LabelNode: "node"}, cr.Labels)
	require.Equal(t, v1alpha1.FailurePolicyAutoRecreate, cr.Spec.FailurePolicy)
	out, err = update(&sandboxv1.Sandbox{}, "spec.expire_time")
	require.NoError(t, err)
	require.Nil(t, out.GetSpec().GetExpireTime(), "a named field that is unset is cleared")

	_, err = update(&sandboxv1.Sandbox{}, "spec.image")
	require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
	_, err = update(&sandboxv1.Sandbox{Uid: "other"}, "labels")
	require.Equal(t, fault.FenceMismatch, fault.ReasonOf(err))
	_, err = update(&sandboxv1.Sandbox{Uid: resp.GetSandbox().GetUid()}, "labels")
	require.NoError(t, err)
}

func TestUpdateExpired(t *testing.T) {
	m := newMesh(t)
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "old"}, Spec: v1alpha1.SandboxSpec{Image: "x", PoolRef: pool}}
	require.NoError(t, m.api.Create(context.Background(), sb))
	sb.Status.Phase = v1alpha1.PhaseExpired
	require.NoError(t, m.api.Status().Update(context.Background(), sb))
	m.eventually("it is seen", func() bool {
		sb, err := m.get("old")
		return err == nil && sb.GetStatus().GetPhase() == sandboxv1.Phase_PHASE_EXPIRED
	})
	update := func(paths ...string) error {
		_, err := m.sandbox.UpdateSandbox(context.Background(), &sandboxv1.UpdateSandboxRequest{
			Sandbox: &sandboxv1.Sandbox{Namespace: ns, Name: "old", Labels: map[string]string{"a": "b"}, Spec: &sandboxv1.SandboxSpec{
				ExpireTime: timestamppb.New(time.Now().Add(time.Hour)), ResetRevision: timestamppb.Now(),
			}}, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths},
		})
		return rpc.FromStatus(err)
	}
	for _, path := range []string{"spec.expire_time", "spec.reset_revision", "spec.failure_policy", "spec.recovery_timeout"} {
		err := update("labels", path)
		require.True(t, errdefs.IsFailedPrecondition(err), path)
		require.Equal(t, fault.PhaseConflict, fault.ReasonOf(err), path)
	}
	require.Empty(t, m.resource("old").Labels)
	require.NoError(t, update("labels"))
	require.Equal(t, "b", m.resource("old").Labels["a"])
}

func TestUpdateRetriesOnConflict(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	var once atomic.Bool
	m.api.onUpdate.Store(func() { // between the read and the write of the update
		if !once.CompareAndSwap(false, true) {
			return
		}
		sb := m.resource("one")
		sb.Annotations["theirs"] = "kept"
		sb.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate
		if err := m.api.Update(context.Background(), sb); err != nil {
			t.Error(err)
		}
	})
	_, err := m.sandbox.UpdateSandbox(context.Background(), &sandboxv1.UpdateSandboxRequest{
		Sandbox: &sandboxv1.Sandbox{Namespace: ns, Name: "one", Labels: map[string]string{"a": "b"}}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}},
	})
	require.NoError(t, err)
	require.True(t, once.Load())
	sb := m.resource("one")
	require.Equal(t, "kept", sb.Annotations["theirs"])
	require.Equal(t, v1alpha1.FailurePolicyAutoRecreate, sb.Spec.FailurePolicy)
	require.Equal(t, "b", sb.Labels["a"])
}

func TestUpdateWaitsForWrite(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, nil)
	m.api.down.Store(true)
	_, err := m.create(request("one"))
	require.NoError(t, err)
	done := make(chan error, 1)
	ctx := newWaiting()
	go func() {
		_, err := m.server.UpdateSandbox(ctx, &sandboxv1.UpdateSandboxRequest{
			Sandbox: &sandboxv1.Sandbox{Namespace: ns, Name: "one", Labels: map[string]string{"x": "y"}}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}},
		})
		done <- err
	}()
	<-ctx.waits // for the write
	require.Empty(t, done)
	m.api.down.Store(false)
	require.NoError(t, <-done)
	require.Equal(t, "y", m.resource("one").Labels["x"])
}

func TestLogs(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, nil)
	logs := func(name string) (string, error) {
		stream, err := m.sandbox.StreamLogs(context.Background(), &sandboxv1.StreamLogsRequest{Namespace: ns, Name: name})
		require.NoError(t, err)
		r, err := stream.Recv()
		return string(r.GetData()), rpc.FromStatus(err)
	}
	m.api.down.Store(true)
	resp, err := m.create(request("one"))
	require.NoError(t, err)
	got, err := logs("one")
	require.NoError(t, err)
	require.Equal(t, resp.GetSandbox().GetStatus().GetSandboxId(), got)
	_, err = logs("unknown")
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(err))
	m.api.down.Store(false)
	pending := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "pending"}, Spec: v1alpha1.SandboxSpec{Image: "x", PoolRef: pool}}
	require.NoError(t, m.api.Create(context.Background(), pending))
	m.eventually("it is seen", func() bool { _, err := m.get("pending"); return err == nil })
	_, err = logs("pending")
	require.Equal(t, fault.PhaseConflict, fault.ReasonOf(err))
}

func TestListAndWatch(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 10, nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := m.sandbox.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: ns, LabelSelector: "team=x"})
	require.NoError(t, err)
	next := func() *sandboxv1.WatchSandboxesResponse {
		r, err := stream.Recv()
		require.NoError(t, err)
		return r
	}
	require.Equal(t, sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, next().GetType())
	for _, name := range []string{"c", "a", "b"} {
		req := request(name)
		if name == "b" {
			req.Labels = map[string]string{"team": "x"}
		}
		_, err := m.create(req)
		require.NoError(t, err)
	}
	r := next()
	require.Equal(t, sandboxv1.WatchSandboxesResponse_TYPE_ADDED, r.GetType())
	require.Equal(t, "b", r.GetSandbox().GetName())
	require.NoError(t, m.remove("b"))
	for r.GetType() != sandboxv1.WatchSandboxesResponse_TYPE_DELETED {
		require.Equal(t, "b", r.GetSandbox().GetName())
		r = next()
	}
	var names []string
	for token := ""; ; {
		page, err := m.sandbox.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: ns, PageSize: 1, PageToken: token})
		require.NoError(t, err)
		for _, sb := range page.GetSandboxes() {
			names = append(names, sb.GetName())
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	require.Equal(t, []string{"a", "c"}, names)
	for name, req := range map[string]*sandboxv1.ListSandboxesRequest{
		"label_selector": {LabelSelector: "a in ("}, "page_token": {PageToken: "nonsense"},
	} {
		_, err := m.sandbox.ListSandboxes(ctx, req)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(rpc.FromStatus(err)))
		require.ErrorContains(t, err, name)
	}
	page, err := m.sandbox.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_FAILED}})
	require.NoError(t, err)
	require.Empty(t, page.GetSandboxes())
}
