//go:build integration

package ctrd_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/conformance"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// withSlots returns a runtime that keeps its slots' root beside the test's containerd.
func withSlots(t *testing.T, s *containerd.Server) *ctrd.Runtime {
	t.Helper()
	return newRuntime(t, s, slotsOfRunc(s))
}

func slotsOfRunc(s *containerd.Server) func(*ctrd.Config) {
	return func(c *ctrd.Config) {
		c.SlotRoot, c.SandboxInit = filepath.Join(s.Dir, "slots"), filepath.Join(config.Env("FSB_BIN"), "sandbox-init")
	}
}

func TestSlotConformance(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/other:test", containerd.Image(t, containerd.WithFile("/other", "x", 0o644)))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("nobodyknows")))
	registry := containerd.NewRegistry(t, "", "", nil)
	broken := registry.Push(t, "broken:1", containerd.Broken(t))
	gone := containerd.NewRegistry(t, "", "", nil)
	gone.Close()
	conformance.RunSlots(t, func(t *testing.T) conformance.Setup {
		return conformance.Setup{
			Runtime: withSlots(t, s), Image: "busybox:test", OtherImage: "other:test", MissingImage: registry.Host + "/nope:1",
			AwayImage: gone.Host + "/nope:1", UnknownUserImage: "nouser:test", BrokenImage: broken, LogRoot: s.LogRoot,
		}
	})
}

// box returns a container, to be claimed or to be created.
func box(t *testing.T, s *containerd.Server, slot bool, image string, command ...string) runtime.Container {
	t.Helper()
	id := uuid.NewString() + "-1"
	if slot {
		id = identity.SlotID(strings.ReplaceAll(uuid.NewString(), "-", "")[:20])
	}
	dir := filepath.Join(s.LogRoot, id)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "output.log"), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "hostname"), []byte("box\n"), 0o644))
	record, err := anypb.New(durationpb.New(1))
	require.NoError(t, err)
	return runtime.Container{
		ID: id, Image: image, Command: command, Record: record, Hostname: "box", Network: runtime.NetworkAgent,
		LogPath: filepath.Join(dir, "output.log"), HostnamePath: filepath.Join(dir, "hostname"),
		Labels: identity.Identity{
			Namespace: "default", Name: "box", SandboxUID: uuid.NewString(), Attempt: 1, AgentUID: "agent", State: identity.StateClaimed,
		}.Labels(),
	}
}

func launch(ctx context.Context, r *ctrd.Runtime, c runtime.Container) error {
	none := func(runtime.Stage) {}
	if !identity.IsSlotID(c.ID) {
		if err := r.Create(ctx, c, none); err != nil {
			return err
		}
		return r.Start(ctx, c.ID)
	}
	err := startSlot(ctx, r, c)
	if err == nil {
		err = r.Claim(ctx, c, none)
	}
	if err == nil {
		err = r.SlotClaimed(c.ID)
	}
	return err
}

// startSlot starts the slot that c may claim.
func startSlot(ctx context.Context, r *ctrd.Runtime, c runtime.Container) error {
	labels := identity.Identity{AgentUID: "agent", State: identity.StateSlot}.Labels()
	return r.StartSlot(ctx, runtime.Slot{ID: c.ID, Labels: labels, Group: c.ID, LogPath: c.LogPath, HostnamePath: c.HostnamePath})
}

// TestMovedTagIsClaimedAsItIsNow moves a tag between two claims: nothing is run of the image that it had, and the next claim has the other one.
func TestMovedTagIsClaimedAsItIsNow(t *testing.T) {
	s := containerd.Start(t)
	r := withSlots(t, s)
	const name = "docker.io/library/moves:test"
	claim := func(command string) error {
		b := box(t, s, true, "moves:test", command)
		err := launch(t.Context(), r, b)
		require.NoError(t, r.Delete(t.Context(), b.ID))
		return err
	}
	s.Import(t, name, containerd.Image(t, containerd.WithFile("/first", "#!/bin/sh\n", 0o755)))
	require.NoError(t, claim("/first"))
	s.Import(t, name, containerd.Image(t, containerd.WithFile("/second", "#!/bin/sh\n", 0o755))) // which the one before does not have
	require.ErrorIs(t, claim("/second"), runtime.ErrSlotLost)
	require.NoError(t, claim("/second"))
	s.Import(t, name, containerd.Image(t, containerd.WithUser("missing")))
	require.ErrorIs(t, claim("true"), runtime.ErrSlotLost)
	require.Equal(t, fault.UserNotFound, fault.ReasonOf(claim("true")))
	s.Import(t, name, containerd.Image(t))
	require.ErrorIs(t, claim("true"), runtime.ErrSlotLost, "not the fault of the image that it had")
	require.NoError(t, claim("true"))
	require.NoError(t, s.Client.ImageService().Delete(t.Context(), name))
	require.ErrorIs(t, claim("true"), runtime.ErrSlotLost, "removed")
}

// TestClaimLeavesNoTraceOfSlot searches, from inside a claimed slot, for everything that a slot has and a sandbox must not
// have.
func TestClaimLeavesNoTraceOfSlot(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := withSlots(t, s)
	// Another slot waits beside it.
	beside := box(t, s, true, "busybox:test")
	require.NoError(t, r.StartSlot(t.Context(), runtime.Slot{
		ID: beside.ID, Labels: identity.Identity{AgentUID: "agent", State: identity.StateSlot}.Labels(), Group: beside.ID,
		LogPath: beside.LogPath, HostnamePath: beside.HostnamePath,
	}))
	c := box(t, s, true, "busybox:test", "sh", "-c", `
		for path in /fs[b] /fsb-et[c] /ne[w] /sandbox-ini[t]; do [ -e $path ] && echo FOUN""D $path; done
		find / -xdev -name claim.soc[k] -exec echo FOUN""D {} \; ; tr "\000" "\n" </proc/1/environ
		ls -l /proc/1/fd /proc/1/exe; cat /proc/mounts /proc/1/maps`)
	require.NoError(t, launch(t.Context(), r, c))
	_, err := r.Wait(t.Context(), c.ID)
	require.NoError(t, err)
	require.NoError(t, r.Finish(t.Context(), c.ID, c.Record))
	raw, err := os.ReadFile(c.LogPath)
	require.NoError(t, err)
	out := string(raw)
	for _, trace := range []string{"-> /sandbox-init", "GOGC=", "GODEBUG=", beside.ID, "socket:[", "anon_inode", "FOUND", " /fsb "} {
		require.NotContains(t, out, trace)
	}
	require.Contains(t, out, "/bin/busybox")
	require.NoError(t, r.Delete(t.Context(), c.ID))
	require.NoError(t, r.Delete(t.Context(), beside.ID))
}

// TestDeletedContainerFreesItsSnapshot deletes a claimed slot's container record as another component may.
func TestDeletedContainerFreesItsSnapshot(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := withSlots(t, s)
	c := box(t, s, true, "busybox:test", "true")
	require.NoError(t, launch(t.Context(), r, c))
	_, err := r.Wait(t.Context(), c.ID)
	require.NoError(t, err)
	require.NoError(t, r.Finish(t.Context(), c.ID, c.Record))
	snapshots := s.Client.SnapshotService("overlayfs")
	_, err = snapshots.Stat(t.Context(), c.ID)
	require.NoError(t, err, "the record keeps it")
	require.NoError(t, s.Client.ContainerService().Delete(t.Context(), c.ID))
	require.Eventually(t, func() bool {
		_, err := snapshots.Stat(t.Context(), c.ID)
		return errdefs.IsNotFound(err)
	}, testkit.Timeout, testkit.Tick)
	require.NoError(t, r.Delete(t.Context(), c.ID))
}

// TestSlotsEndWithTheirAgent closes the runtime's connections, as the end of its process would.
func TestSlotsEndWithTheirAgent(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	first, second := withSlots(t, s), withSlots(t, s)
	c := box(t, s, true, "busybox:test")
	require.NoError(t, first.StartSlot(t.Context(), runtime.Slot{
		ID: c.ID, Labels: identity.Identity{AgentUID: "agent", State: identity.StateSlot}.Labels(), Group: c.ID,
		LogPath: c.LogPath, HostnamePath: c.HostnamePath,
	}))
	claimed := box(t, s, true, "busybox:test", "sleep", "1000")
	require.NoError(t, launch(t.Context(), first, claimed))
	first.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	_, err := second.Wait(ctx, c.ID)
	require.NoError(t, err)
	list, err := second.List(t.Context(), map[string]string{identity.KeyManaged: "true"})
	require.NoError(t, err)
	require.Len(t, list, 2)
	for _, f := range list {
		require.Equal(t, f.ID == claimed.ID, f.Task == runtime.TaskRunning, f.ID)
		require.NoError(t, second.Delete(t.Context(), f.ID))
	}
}

// TestImagesInUseArePinned pins the image of a container and no other.
func TestImagesInUseArePinned(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/other:test", containerd.Image(t, containerd.WithFile("/other", "x", 0o644)))
	r := withSlots(t, s)
	pinned := func(name string) bool {
		img, err := s.Client.ImageService().Get(t.Context(), name)
		require.NoError(t, err)
		return img.Labels["io.cri-containerd.pinned"] == "pinned"
	}
	for _, slot := range []bool{false, true} {
		c := box(t, s, slot, "busybox:test", "sleep", "1000")
		require.NoError(t, launch(t.Context(), r, c))
		for range 2 {
			require.NoError(t, r.PinImages(t.Context(), nil))
			require.True(t, pinned(containerd.Busybox))
			require.False(t, pinned("docker.io/library/other:test"))
		}
		require.NoError(t, r.Delete(t.Context(), c.ID))
		require.NoError(t, r.PinImages(t.Context(), nil))
		require.False(t, pinned(containerd.Busybox))
	}
	// An image that another component has pinned stays pinned.
	theirs := images.Image{Name: containerd.Busybox, Labels: map[string]string{"io.cri-containerd.pinned": "pinned"}}
	_, err := s.Client.ImageService().Update(t.Context(), theirs, "labels.io.cri-containerd.pinned")
	require.NoError(t, err)
	require.NoError(t, r.PinImages(t.Context(), nil))
	require.True(t, pinned(containerd.Busybox))
}

// TestListedImagesArePinned pins images that no container uses, for two agents with different lists.
func TestListedImagesArePinned(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	clock := clocktesting.NewFakeClock(time.Now())
	agents := map[string]*ctrd.Runtime{}
	for _, uid := range []string{"one", "two"} {
		agents[uid] = newRuntime(t, s, func(c *ctrd.Config) { c.PodUID, c.Clock = uid, clock })
	}
	requirePinned := func(want bool) {
		t.Helper()
		img, err := s.Client.ImageService().Get(t.Context(), containerd.Busybox)
		require.NoError(t, err)
		require.Equal(t, want, img.Labels["io.cri-containerd.pinned"] == "pinned", "%v", img.Labels)
	}
	pin := func(uid string, listed ...string) {
		t.Helper()
		require.NoError(t, agents[uid].PinImages(t.Context(), listed))
	}
	pin("one", containerd.Busybox, "docker.io/library/missing:1")
	requirePinned(true)
	pin("two")
	requirePinned(true)
	pin("two", containerd.Busybox)
	pin("one")
	requirePinned(true)
	pin("two")
	requirePinned(false)

	pin("one", containerd.Busybox)
	for range 40 { // twenty minutes
		clock.Step(30 * time.Second)
		pin("one", containerd.Busybox)
	}
	pin("two")
	requirePinned(true)
	clock.Step(11 * time.Minute) // the agent is gone
	pin("two")
	requirePinned(false)
	img, err := s.Client.ImageService().Get(t.Context(), containerd.Busybox)
	require.NoError(t, err)
	for key := range img.Labels {
		require.NotContains(t, key, "fast-sandbox.io/", "no label of ours is left")
	}
}

// groupMember returns a slot to start in a group; in one of its own if group is empty.
func groupMember(t *testing.T, s *containerd.Server, group string) runtime.Slot {
	t.Helper()
	b := box(t, s, true, "")
	if group == "" {
		group = b.ID
	}
	return runtime.Slot{
		ID: b.ID, Labels: identity.Identity{AgentUID: "agent", State: identity.StateSlot}.Labels(), Group: group, LogPath: b.LogPath, HostnamePath: b.HostnamePath,
	}
}

// shims returns the shims that were started with a container.
func shims(t *testing.T, id string) []containerd.Shim {
	t.Helper()
	return slices.DeleteFunc(containerd.Shims(), func(s containerd.Shim) bool { return !s.Of(id) })
}

// cancelCreate creates a slot's task in its group, and cancels the call when the OCI runtime has ended and the shim does not know the
// task yet: containerd has it deleted, the shim answers that it does not know it, and keeps it from then on.
func cancelCreate(t *testing.T, s *containerd.Server, slot runtime.Slot) {
	t.Helper()
	dir := t.TempDir()
	runc := filepath.Join(dir, "runc")
	script := fmt.Sprintf(`#!/bin/sh
cd %s
case " $* " in
*" create "*)
	runc "$@" || exit
	while [ $1 != --pid-file ]; do shift; done
	mv $2 pid && mkfifo $2 && ln -s $2 fifo
	exit;;
*" delete "*)
	touch deleting
	while [ ! -e known ]; do sleep 0.01; done;;
esac
exec runc "$@"
`, dir)
	require.NoError(t, os.WriteFile(runc, []byte(script), 0o700))
	handler, err := anypb.New(&runcoptions.Options{BinaryName: runc})
	require.NoError(t, err)
	handler.TypeUrl = strings.TrimPrefix(handler.GetTypeUrl(), "type.googleapis.com/")
	first, err := s.Client.ContainerService().Get(t.Context(), slot.Group)
	require.NoError(t, err)
	var spec specs.Spec
	require.NoError(t, json.Unmarshal(first.Spec.GetValue(), &spec))
	spec.Linux.CgroupsPath = filepath.Join(s.CgroupParent, shared.CgroupPrefix+slot.ID)
	raw, err := json.Marshal(spec)
	require.NoError(t, err)
	_, err = s.Client.ContainerService().Create(t.Context(), containers.Container{
		ID: slot.ID, Labels: slot.Labels, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2", Options: handler},
		Spec: &anypb.Any{TypeUrl: first.Spec.GetTypeUrl(), Value: raw},
	})
	require.NoError(t, err)
	followed, stop := context.WithCancel(t.Context())
	defer stop()
	created, failed := s.Client.EventService().Subscribe(followed, fmt.Sprintf(`topic=="/tasks/create",event.container_id==%q`, slot.ID))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := s.Client.TaskService().Create(ctx, &tasks.CreateTaskRequest{ContainerID: slot.ID, Options: handler})
		ended <- err
	}()
	await := func(name string) {
		require.Eventually(t, func() bool { _, err := os.Lstat(filepath.Join(dir, name)); return err == nil }, testkit.Timeout, testkit.Tick, name)
	}
	await("fifo") // the shim reads the pid from it
	cancel()
	require.ErrorContains(t, <-ended, "canceled")
	await("deleting")
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "fifo"), pid, 0o600))
	select {
	case <-created:
	case err := <-failed:
		require.NoError(t, err)
	case <-time.After(20 * time.Second):
		t.Fatal("the shim did not create the task")
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "known"), nil, 0o600))
}

// TestCanceledCreateLeavesNoShim: a create that was canceled in a group must not keep the group's shim after its last slot. This
// happened when an agent was killed while it started a slot.
func TestCanceledCreateLeavesNoShim(t *testing.T) {
	for name, canceledLast := range map[string]bool{"canceled slot first": false, "canceled slot last": true} {
		t.Run(name, func(t *testing.T) {
			s := containerd.Start(t)
			first, next := withSlots(t, s), withSlots(t, s)
			slot := groupMember(t, s, "")
			require.NoError(t, first.StartSlot(t.Context(), slot))
			canceled := groupMember(t, s, slot.ID)
			cancelCreate(t, s, canceled)
			first.Close() // the agent was killed

			order := []string{canceled.ID, slot.ID}
			if canceledLast {
				slices.Reverse(order)
			}
			require.NoError(t, next.Delete(t.Context(), order[0]))
			require.NotEmpty(t, shims(t, slot.ID))
			require.NoError(t, next.Delete(t.Context(), order[1]))
			require.Empty(t, shims(t, slot.ID))
		})
	}
}
