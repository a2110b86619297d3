package ctrd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// sameNamespace makes a /proc directory that stands for a process in this process's mount namespace.
func sameNamespace(t *testing.T, proc string) {
	t.Helper()
	here, err := os.Readlink("/proc/self/ns/mnt")
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(proc, "ns"), 0o700))
	require.NoError(t, os.Symlink(here, filepath.Join(proc, "ns", "mnt")))
}

func TestPodOf(t *testing.T) {
	for cgroup, want := range map[string]string{
		"/kubepods/burstable/pod" + owner + "/fsb-" + sandboxA:                                              owner,
		"kubepods-besteffort-pod16fd2706_8baf_433b_82eb_8c7fada847da.slice:fsb:" + sandboxA:                 owner,
		"/kubepods.slice/kubepods-pod16fd2706_8baf_433b_82eb_8c7fada847da.slice/fsb-" + sandboxA + ".scope": owner,
		"/kubepods/pod" + owner:  owner,
		"/kubepods/pod1/fsb-u-1": "",
		"/fsb-" + sandboxA:       "",
		"":                       "",
	} {
		require.Equal(t, want, ctrd.PodOf(cgroup), cgroup)
	}
}

// bundles is a node with bundles in containerd's directory, and the working directories that belong to them.
func bundles(t *testing.T, h *host, ids ...string) (r *ctrd.Remover, dir, work string) {
	t.Helper()
	r = h.remover(t)
	root := t.TempDir()
	r.HostProc, r.StateDir = filepath.Join(root, "proc", "1"), filepath.Join(root, "state")
	sameNamespace(t, r.HostProc)
	require.NoError(t, os.WriteFile(filepath.Join(r.HostProc, "mountinfo"), nil, 0o600))
	dir = filepath.Join(r.StateDir, "io.containerd.runtime.v2.task", "k8s.io")
	work = filepath.Join(root, "root", "io.containerd.runtime.v2.task", "k8s.io")
	for _, id := range ids {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, id, "rootfs"), 0o700))
		put(t, filepath.Join(work, id, "state"))
		require.NoError(t, os.Symlink(filepath.Join(work, id), filepath.Join(dir, id, "work")))
		spec := fmt.Sprintf(`{"linux":{"cgroupsPath":"/kubepods/pod%s/fsb-%s"}}`, owner, id)
		require.NoError(t, os.WriteFile(filepath.Join(dir, id, "config.json"), []byte(spec), 0o600))
	}
	return r, dir, work
}

func bundlePieces(t *testing.T, r *ctrd.Remover, known map[string]bool) map[string]string {
	t.Helper()
	found, err := r.InventoryExcept(t.Context(), known)
	require.NoError(t, err)
	out := map[string]string{}
	for _, p := range found {
		if p.Part == ctrd.PartBundle {
			out[p.ID] = p.Owner
		}
	}
	return out
}

func TestBundlesAreFoundAndRemoved(t *testing.T) {
	r, dir, work := bundles(t, &host{}, sandboxA, slotC, sandboxB, "other")
	require.NoError(t, os.Remove(filepath.Join(dir, slotC, "config.json")))
	require.Equal(t, map[string]string{sandboxA: owner, slotC: ""}, bundlePieces(t, r, map[string]bool{sandboxB: true}), "not that of a known container")
	for range 2 { // idempotent
		require.NoError(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: sandboxA, Part: ctrd.PartBundle}))
	}
	require.False(t, exists(filepath.Join(dir, sandboxA)))
	require.False(t, exists(filepath.Join(work, sandboxA)))
	require.Equal(t, map[string]string{slotC: "", sandboxB: owner}, bundlePieces(t, r, nil))
	require.True(t, exists(filepath.Join(dir, "other")))
	require.True(t, exists(filepath.Join(work, sandboxB)))
}

// TestBundleWithContentsIsNotRemoved: what is mounted on a root file system, or was written below its mount point, is not deleted.
func TestBundleWithContentsIsNotRemoved(t *testing.T) {
	r, dir, _ := bundles(t, &host{}, sandboxA)
	put(t, filepath.Join(dir, sandboxA, "rootfs", "etc", "passwd"))
	require.Error(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: sandboxA, Part: ctrd.PartBundle}))
	require.True(t, exists(filepath.Join(dir, sandboxA, "rootfs", "etc", "passwd")))
	require.True(t, exists(filepath.Join(dir, sandboxA, "config.json")))

	// Something that cannot be unmounted: it is in the list of mounts and not there.
	mountinfo := "2 1 0:2 / " + filepath.Join(dir, sandboxA, "rootfs") + " rw - overlay overlay rw\n"
	require.NoError(t, os.RemoveAll(filepath.Join(dir, sandboxA, "rootfs", "etc")))
	require.NoError(t, os.WriteFile(filepath.Join(r.HostProc, "mountinfo"), []byte(mountinfo), 0o600))
	err := r.RemovePiece(t.Context(), ctrd.Piece{ID: sandboxA, Part: ctrd.PartBundle})
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.True(t, exists(filepath.Join(dir, sandboxA, "config.json")))
}

// TestOnlyTheOwnWorkingDirectoryIsRemoved: the link is followed only to a working directory of the same container.
func TestOnlyTheOwnWorkingDirectoryIsRemoved(t *testing.T) {
	for name, target := range map[string]string{
		"another container": filepath.Join("k8s.io", sandboxB), "another namespace": filepath.Join("moby", sandboxA), "a parent": "k8s.io",
	} {
		t.Run(name, func(t *testing.T) {
			r, dir, _ := bundles(t, &host{}, sandboxA)
			elsewhere := filepath.Join(t.TempDir(), target)
			put(t, filepath.Join(elsewhere, "state"))
			require.NoError(t, os.Remove(filepath.Join(dir, sandboxA, "work")))
			require.NoError(t, os.Symlink(elsewhere, filepath.Join(dir, sandboxA, "work")))
			require.NoError(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: sandboxA, Part: ctrd.PartBundle}))
			require.False(t, exists(filepath.Join(dir, sandboxA)))
			require.True(t, exists(filepath.Join(elsewhere, "state")))
		})
	}
}

func TestBundlesAreNotLookedForWithoutContainerdsProcess(t *testing.T) {
	r, dir, _ := bundles(t, &host{}, sandboxA)
	r.HostProc = ""
	require.Empty(t, bundlePieces(t, r, nil))
	require.NoError(t, r.RemovePiece(t.Context(), ctrd.Piece{ID: sandboxA, Part: ctrd.PartBundle}))
	require.True(t, exists(filepath.Join(dir, sandboxA)))
}

// TestOwnersOfRemnants: the agent that left a remnant is named by a label, or by the path of a cgroup.
func TestOwnersOfRemnants(t *testing.T) {
	h := &host{}
	r := newNode(t, h)
	cgroup := filepath.Join(r.CgroupRoot, "pids", "kubepods", "pod"+owner, "fsb-"+slotC)
	require.NoError(t, os.MkdirAll(cgroup, 0o700))
	found, err := r.Inventory(t.Context())
	require.NoError(t, err)
	owners := map[string]string{}
	for _, p := range found {
		owners[string(p.Part)+" "+p.ID] = p.Owner
	}
	require.Equal(t, owner, owners["cgroup "+slotC])
	require.Empty(t, owners["cgroup "+sandboxA], "pod1 is no uid")
	require.Equal(t, owner, owners["snapshot "+sandboxA])
	require.Empty(t, owners["snapshot "+slotC])
}
