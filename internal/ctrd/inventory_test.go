package ctrd_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

const (
	sandboxA = "0f8fad5b-d9cb-469f-a165-70867728950e-1"
	sandboxB = "7c9e6679-7425-40de-944b-e07fc1f90ae7-12"
	slotC    = "slot.0123456789abcdef0123"
	busy     = "slot.ffffffffffffffffffff"
	owner    = "16fd2706-8baf-433b-82eb-8c7fada847da"
)

func TestExpandCgroup(t *testing.T) {
	for spec, want := range map[string]string{
		"/kubepods/pod1/fsb-u-1":                  "/kubepods/pod1/fsb-u-1",
		"kubepods-burstable-pod1_2.slice:fsb:u-1": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/fsb-u-1.scope",
		"a.slice:fsb:u-1":                         "/a.slice/fsb-u-1.scope",
		"a:b:c":                                   "a:b:c",
		"":                                        "",
	} {
		require.Equal(t, want, ctrd.ExpandCgroup(spec), spec)
	}
	for in, want := range map[string]string{`/a\040b`: "/a b", `/a\134`: `/a\`, `/a\04`: `/a\04`, `/a\999`: `/a\999`, "/plain": "/plain"} {
		require.Equal(t, want, ctrd.Unescape(in))
	}
}

func put(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(owner), 0o600))
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

func TestRemoveFIFOs(t *testing.T) {
	root := t.TempDir()
	r := &ctrd.Remover{FIFORoot: root}
	for _, f := range []string{"1/" + sandboxA + "-stdin", "1/" + sandboxA + "-stdout", "2/" + sandboxA + "-stderr", "2/" + sandboxB + "-stdout", "3/" + sandboxA + "0-stdout", "4/other"} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(root, f)), 0o700))
		require.NoError(t, unix.Mkfifo(filepath.Join(root, f), 0o600))
	}
	require.NoError(t, r.RemoveFIFOs(sandboxA))
	require.False(t, exists(filepath.Join(root, "1")))
	for _, f := range []string{"2/" + sandboxB + "-stdout", "3/" + sandboxA + "0-stdout", "4/other"} {
		require.True(t, exists(filepath.Join(root, f)), f)
	}
	require.False(t, exists(filepath.Join(root, "2", sandboxA+"-stderr")))
	require.NoError(t, r.RemoveFIFOs(sandboxA), "again")
	require.NoError(t, (&ctrd.Remover{FIFORoot: filepath.Join(root, "none")}).RemoveFIFOs(sandboxA))
}

func (s snapshotter) Walk(ctx context.Context, fn snapshots.WalkFunc, _ ...string) error {
	for _, info := range []snapshots.Info{
		{Name: sandboxA, Kind: snapshots.KindActive, Labels: map[string]string{"fast-sandbox.io/agent-uid": owner}}, {Name: slotC, Kind: snapshots.KindActive}, {Name: sandboxB, Kind: snapshots.KindCommitted},
		{Name: "sha256:0123", Kind: snapshots.KindCommitted}, {Name: strings.Repeat("4f5e", 16), Kind: snapshots.KindActive},
	} {
		if err := fn(ctx, info); err != nil {
			return err
		}
	}
	return s.h.call("walk")
}

// newNode is a node with every kind of resource, ours and others'.
func newNode(t *testing.T, h *host) *ctrd.Remover {
	t.Helper()
	r := h.remover(t)
	dir := t.TempDir()
	r.FIFORoot, r.LogRoot, r.HostProc = filepath.Join(dir, "fifo"), filepath.Join(dir, "log"), filepath.Join(dir, "proc", "1")
	put(t, filepath.Join(r.FIFORoot, "1", sandboxA+"-stdin"))
	put(t, filepath.Join(r.FIFORoot, "2", "abc-stdin"))
	put(t, filepath.Join(r.LogRoot, sandboxA, "owner"))
	put(t, filepath.Join(r.LogRoot, ".new-"+owner+"-"+sandboxB, "output.log"))
	put(t, filepath.Join(r.LogRoot, ".new-"+owner+"-x", "output.log"))
	put(t, filepath.Join(r.LogRoot, slotC, "output.log")) // without an owner file
	put(t, filepath.Join(r.LogRoot, "lost+found", "owner"))
	put(t, filepath.Join(r.LogRoot, sandboxB)) // not a directory
	r.StateDir, r.CgroupParents = "/run/my containerd", []string{"/kubepods", "a.slice", "fsb-test-1", "none"}
	for _, path := range []string{"pids/kubepods/pod1/fsb-" + sandboxA, "memory/kubepods/pod1/fsb-" + sandboxA, "pids/a.slice/fsb-" + sandboxB + ".scope", "pids/fsb-test-1/cri-2", "pids/fsb-unknown", "pids/docker/x/kubepods/fsb-" + slotC, "pids/kubepods/fsb-" + busy} {
		require.NoError(t, os.MkdirAll(filepath.Join(r.CgroupRoot, path), 0o700))
	}
	// A process that this containerd does not know.
	require.NoError(t, os.WriteFile(filepath.Join(r.CgroupRoot, "pids", "kubepods", "fsb-"+busy, "cgroup.procs"), []byte("4194304\n"), 0o600))
	sameNamespace(t, r.HostProc)
	require.NoError(t, os.WriteFile(filepath.Join(r.HostProc, "mountinfo"), []byte(strings.Join([]string{
		"1 0 0:1 / / rw - ext4 /dev/sda rw",
		`2 1 0:2 / /run/my\040containerd/io.containerd.runtime.v2.task/k8s.io/` + sandboxA + "/rootfs rw - overlay overlay rw",
		`3 1 0:2 / /run/my\040containerd/io.containerd.runtime.v2.task/moby/` + sandboxB + "/rootfs rw - overlay overlay rw",
		"5 1 0:2 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/" + sandboxB + "/rootfs rw - overlay overlay rw",
		`4 1 0:2 / /run/my\040containerd/io.containerd.runtime.v2.task/k8s.io/4f5e/rootfs rw - overlay overlay rw`,
		"torn",
	}, "\n")), 0o600))
	return r
}

func TestInventoryFindsOurs(t *testing.T) {
	h := &host{}
	r := newNode(t, h)
	require.NoError(t, r.MarkDeleted(sandboxA))
	require.NoError(t, r.MarkDeleted("unknown-1"))
	found, err := r.Inventory(t.Context())
	require.NoError(t, err)
	got := map[string]ctrd.Piece{}
	for _, p := range found {
		got[string(p.Part)+" "+p.ID] = p
	}
	want := []string{
		"snapshot " + sandboxA, "snapshot " + slotC, "fifos " + sandboxA, "mount " + sandboxA, "cgroup " + sandboxA, "cgroup " + sandboxB,
		"log " + sandboxA, "log " + sandboxB, "log " + slotC,
	}
	var names []string
	for name := range got {
		names = append(names, name)
	}
	require.ElementsMatch(t, want, names)
	require.Equal(t, "/a.slice/fsb-"+sandboxB+".scope", got["cgroup "+sandboxB].Path)
	a, b, c := got["log "+sandboxA], got["log "+sandboxB], got["log "+slotC]
	require.Equal(t, []string{owner, owner, ""}, []string{a.Owner, b.Owner, c.Owner})
	require.False(t, a.Deleted.IsZero())
	require.True(t, b.Deleted.IsZero() && c.Deleted.IsZero())
	require.False(t, a.Written.IsZero() || b.Written.IsZero() || c.Written.IsZero())

	h.fail = map[string][]error{"walk": {errors.New("read-only")}}
	require.NoError(t, os.RemoveAll(r.HostProc))
	found, err = r.Inventory(t.Context())
	require.ErrorContains(t, err, "read-only")
	require.ErrorContains(t, err, "listing mounts")
	require.NotEmpty(t, found, "what can be read is returned")
}

// TestInventorySkips: nothing of a skipped container is read, neither its tasks nor its log.
func TestInventorySkips(t *testing.T) {
	h := &host{fail: map[string][]error{"list": {errors.New("asked for tasks")}}}
	r := newNode(t, h)
	found, err := r.InventoryExcept(t.Context(), map[string]bool{sandboxA: true, sandboxB: true, slotC: true, busy: true})
	require.NoError(t, err)
	require.Empty(t, found)
	_, err = r.InventoryExcept(t.Context(), map[string]bool{sandboxA: true, slotC: true, busy: true})
	require.ErrorContains(t, err, "asked for tasks", "for there is a cgroup")
	found, err = r.InventoryExcept(t.Context(), map[string]bool{sandboxA: true, slotC: true, busy: true})
	require.NoError(t, err)
	var names []string
	for _, p := range found {
		names = append(names, string(p.Part)+" "+p.ID)
	}
	require.ElementsMatch(t, []string{"cgroup " + sandboxB, "log " + sandboxB}, names)
}

func TestRemovePiece(t *testing.T) {
	r := newNode(t, &host{})
	r.HostProc = "" // no mounts
	found, err := r.Inventory(t.Context())
	require.NoError(t, err)
	for range 2 {
		for _, p := range found {
			require.NoError(t, r.RemovePiece(t.Context(), p), "%+v", p)
		}
	}
	left, err := r.Inventory(t.Context())
	require.NoError(t, err)
	for _, p := range left {
		require.Equal(t, ctrd.PartSnapshot, p.Part, "the fake forgets nothing: %+v", p)
	}
	for _, path := range []string{filepath.Join(r.LogRoot, "lost+found"), filepath.Join(r.FIFORoot, "2"), filepath.Join(r.CgroupRoot, "pids", "fsb-unknown"), filepath.Join(r.CgroupRoot, "pids", "fsb-test-1", "cri-2"),
		filepath.Join(r.CgroupRoot, "pids", "docker", "x", "kubepods", "fsb-"+slotC), filepath.Join(r.CgroupRoot, "pids", "kubepods", "fsb-"+busy)} {
		require.True(t, exists(path), path)
	}
	stays := r.RemovePiece(t.Context(), ctrd.Piece{ID: busy, Part: ctrd.PartCgroup, Path: "/kubepods/fsb-" + busy})
	require.True(t, errdefs.IsUnavailable(stays), "a cgroup that is still there is not said to be removed: %v", stays)
	for _, p := range []ctrd.Piece{
		{ID: "other", Part: ctrd.PartLog, Path: filepath.Join(r.LogRoot, "other")}, {ID: sandboxA, Part: ctrd.PartLog, Path: "/etc"}, {ID: sandboxA, Part: "else"},
	} {
		require.True(t, errdefs.IsInvalidArgument(r.RemovePiece(t.Context(), p)), "%+v", p)
	}
}

func TestKeepLogRemovesDirOfClaim(t *testing.T) {
	r := newNode(t, &host{status: task.Status_STOPPED})
	r.HostProc, r.KeepLog = "", true
	for _, dir := range []string{"claim", "claimed"} {
		put(t, filepath.Join(r.LogRoot, sandboxA, dir, "s"))
	}
	require.NoError(t, r.Remove(t.Context(), sandboxA))
	require.False(t, exists(filepath.Join(r.LogRoot, sandboxA, "claim")))
	require.False(t, exists(filepath.Join(r.LogRoot, sandboxA, "claimed")))
	require.True(t, exists(filepath.Join(r.LogRoot, sandboxA, "owner")))
	require.False(t, exists(filepath.Join(r.FIFORoot, "1")))
}

// TestStepsComeInOrder checks that Remove calls Before for each step.
func TestStepsComeInOrder(t *testing.T) {
	var steps []ctrd.Step
	r := (&host{status: task.Status_RUNNING}).remover(t)
	r.Before = func(s ctrd.Step) { steps = append(steps, s) }
	require.NoError(t, r.Remove(t.Context(), sandboxA))
	require.Equal(t, ctrd.Steps(), steps)
}

// TestRemoveSnapshots removes all snapshots that the record references, except layers of images.
func TestRemoveSnapshots(t *testing.T) {
	h := &host{labels: map[string]string{
		"containerd.io/gc.ref.snapshot.overlayfs": "u-1", "containerd.io/gc.ref.snapshot.overlayfs/data": "u-1-data",
		"containerd.io/gc.ref.snapshot.overlayfs/base": "sha256:1", "containerd.io/gc.ref.content.1": "sha256:2",
	}}
	require.NoError(t, h.remover(t).Remove(t.Context(), "u-1"))
	slices.Sort(h.removed)
	require.Equal(t, []string{"u-1", "u-1-data"}, h.removed)
	require.EqualValues(t, 42, h.remover(t).Measure(t.Context(), "u-1"))
}

func (s snapshotter) Stat(_ context.Context, key string) (snapshots.Info, error) {
	if strings.HasPrefix(key, "sha256:") {
		return snapshots.Info{Name: key, Kind: snapshots.KindCommitted}, nil
	}
	return snapshots.Info{Name: key, Kind: snapshots.KindActive}, nil
}

func (s snapshotter) Usage(_ context.Context, key string) (snapshots.Usage, error) {
	if key == "u-1" {
		return snapshots.Usage{Size: 42}, nil
	}
	return snapshots.Usage{}, errdefs.ErrNotFound
}
