package ctrd_test

import (
	"errors"
	"testing"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// shims returns the owners of the idle shims, by id.
func shims(t *testing.T, r *ctrd.Remover) (map[string]string, error) {
	t.Helper()
	found, err := r.InventoryExcept(t.Context(), nil)
	out := map[string]string{}
	for _, p := range found {
		if p.Part == ctrd.PartShim {
			out[p.ID] = p.Owner
		}
	}
	return out, err
}

// TestIdleShims: a shim is idle if no container names it, in its record or in its spec. Its owner is that of its label.
func TestIdleShims(t *testing.T) {
	idle, half, bare, named, grouped := identity.ShimID("a"), identity.ShimID("b"), identity.ShimID("c"), identity.ShimID("d"), identity.ShimID("e")
	h := &host{
		anchors: map[string]string{idle: owner, bare: ctrd.NoPod, named: owner, grouped: owner, "no-shim": owner},
		records: map[string]string{idle: owner, half: owner, named: owner},
		// What names a shim need not be a container of ours.
		sandboxOf: map[string]string{"other": named}, groups: map[string]string{sandboxA: grouped},
	}
	r, _, _ := bundles(t, h)
	r.CgroupParents = nil
	found, err := shims(t, r)
	require.NoError(t, err)
	require.Equal(t, map[string]string{idle: owner, half: owner, bare: ""}, found)

	// What could not be read is no evidence.
	h.fail = map[string][]error{"list records": {errdefs.ErrNotImplemented}}
	found, err = shims(t, r)
	require.NoError(t, err)
	require.Equal(t, map[string]string{idle: owner, bare: ""}, found)
	h.fail = map[string][]error{"list containers": {nil, errors.New("broken")}}
	found, err = shims(t, r)
	require.ErrorContains(t, err, "broken")
	require.Empty(t, found)
}

// TestIdleShimIsRemoved: with its task, its anchor and its record, unless a container has joined it.
func TestIdleShimIsRemoved(t *testing.T) {
	id := identity.ShimID("a")
	h := &host{status: task.Status_RUNNING, anchors: map[string]string{id: owner}, records: map[string]string{id: owner}, groups: map[string]string{sandboxA: id}}
	r := h.remover(t)
	err := r.RemovePiece(t.Context(), ctrd.Piece{ID: id, Part: ctrd.PartShim})
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	require.NotContains(t, h.calls, "kill")
	delete(h.groups, sandboxA)
	h.fail = map[string][]error{"list containers": {errors.New("broken")}}
	require.ErrorContains(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: id, Part: ctrd.PartShim}), "broken")
	require.NotContains(t, h.calls, "kill")
	require.NoError(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: id, Part: ctrd.PartShim}))
	require.Equal(t, task.Status_UNKNOWN, h.status)
	require.Empty(t, h.anchors)
	require.Empty(t, h.records)
	require.NoError(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: id, Part: ctrd.PartShim}), "again")
	require.True(t, errdefs.IsInvalidArgument(r.RemovePiece(t.Context(), ctrd.Piece{ID: "other", Part: ctrd.PartShim})))
}
