package fastpath_test

import (
	"context"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// outlined returns an allocator that has started and knows by its metadata alone what a former one has written, and the uid of that.
func outlined(t *testing.T) (m *mesh, a *fakeagent.Agent, uid string) {
	t.Helper()
	m = newMesh(t, soon)
	a = m.agent("a", 5, nil)
	req := request("one")
	req.RequestId = "r"
	resp, err := m.create(req)
	require.NoError(t, err)
	m.eventually("it is marked as persisted", func() bool {
		all := a.Sandboxes()
		return len(all) == 1 && all[0].GetPersisted()
	})
	m.stop()
	m.outlined.Store(true)
	m.start(soon)
	item, ok := m.store.Get(store.Key{Namespace: ns, Name: "one"})
	require.True(t, ok)
	require.True(t, item.Outline)
	return m, a, resp.GetSandbox().GetUid()
}

func (m *mesh) list() ([]*sandboxv1.Sandbox, error) {
	resp, err := m.sandbox.ListSandboxes(context.Background(), &sandboxv1.ListSandboxesRequest{Namespace: ns})
	return resp.GetSandboxes(), rpc.FromStatus(err)
}

func (m *mesh) repeat() (*sandboxv1.CreateSandboxResponse, error) {
	req := request("one")
	req.RequestId = "r"
	return m.create(req)
}

// TestOutlineIsRead: what is asked for by its name is read from the API server; lists wait until all is.
func TestOutlineIsRead(t *testing.T) {
	for name, ask := range map[string]func(m *mesh) (*sandboxv1.Sandbox, error){
		"get": func(m *mesh) (*sandboxv1.Sandbox, error) { return m.get("one") },
		"a repeated create": func(m *mesh) (*sandboxv1.Sandbox, error) {
			resp, err := m.repeat()
			require.True(m.t, err != nil || resp.GetReplayed())
			return resp.GetSandbox(), err
		},
		"update": func(m *mesh) (*sandboxv1.Sandbox, error) {
			resp, err := m.sandbox.UpdateSandbox(context.Background(), &sandboxv1.UpdateSandboxRequest{
				Sandbox:    &sandboxv1.Sandbox{Namespace: ns, Name: "one", Labels: map[string]string{"l": "1"}},
				UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}},
			})
			return resp.GetSandbox(), rpc.FromStatus(err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, _, uid := outlined(t)
			_, err := m.list()
			require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "%v", err)
			stream, err := m.sandbox.WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{Namespace: ns})
			require.NoError(t, err)
			_, err = stream.Recv()
			require.Equal(t, fault.APIUnavailable, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)

			m.api.down.Store(true)
			_, err = ask(m)
			require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "an outline is not shown: %v", err)
			m.api.down.Store(false)
			sb, err := ask(m)
			require.NoError(t, err)
			require.Equal(t, uid, sb.GetUid())
			require.Equal(t, "busybox", sb.GetSpec().GetImage())
			require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, sb.GetStatus().GetPhase())
			all, err := m.list()
			require.NoError(t, err)
			require.Len(t, all, 1)
		})
	}
}

// TestOutlineIsEnough: creates and deletes need no more than an outline.
func TestOutlineIsEnough(t *testing.T) {
	m, a, uid := outlined(t)
	m.api.down.Store(true)
	_, err := m.create(request("one"))
	require.Equal(t, fault.SandboxExists, fault.ReasonOf(err), "%v", err)
	_, err = m.create(request("two"))
	require.NoError(t, err)
	require.NoError(t, m.remove("one"))
	require.Len(t, a.Tombstones(), 1)
	require.Equal(t, uid, a.Tombstones()[0].GetFence().GetSandboxUid())
	m.api.down.Store(false)
	m.eventually("the custom resource is gone", func() bool { return m.resource("one") == nil })
	require.NoError(t, m.remove("two"))
	m.nothing()
}

func TestOutlineIsDeleted(t *testing.T) {
	m, _, uid := outlined(t)
	resp, err := m.sandbox.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "one"})
	require.NoError(t, err)
	require.Equal(t, uid, resp.GetSandbox().GetUid())
	require.Equal(t, "busybox", resp.GetSandbox().GetSpec().GetImage())
	m.nothing()
}

// TestOutlineOfThePast: between the list and a call the sandbox may have been deleted, and another one created, without the informer having
// said so.
func TestOutlineOfThePast(t *testing.T) {
	m, _, uid := outlined(t)
	m.blind.Store(true)
	sb := m.resource("one")
	sb.Finalizers = nil
	require.NoError(t, m.api.Update(t.Context(), sb))
	require.NoError(t, m.api.Delete(t.Context(), sb))
	_, err := m.get("one")
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	_, err = m.repeat()
	require.Equal(t, fault.SandboxTerminating, fault.ReasonOf(err), "%v", err)

	sb.ResourceVersion, sb.UID = "", ""
	sb.Annotations = nil
	sb.Spec.Image = "another"
	require.NoError(t, m.api.Create(t.Context(), sb))
	shown, err := m.get("one")
	require.NoError(t, err)
	require.NotEqual(t, uid, shown.GetUid())
	require.Equal(t, "another", shown.GetSpec().GetImage())
}

// TestOutlineIsFilled: a list is answered as soon as all is known.
func TestOutlineIsFilled(t *testing.T) {
	m, _, uid := outlined(t)
	m.store.Fill(m.resource("one"))
	all, err := m.list()
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, uid, all[0].GetUid())
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	stream, err := m.sandbox.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: ns})
	require.NoError(t, err)
	event, err := stream.Recv()
	require.NoError(t, err)
	require.Equal(t, uid, event.GetSandbox().GetUid())
}
