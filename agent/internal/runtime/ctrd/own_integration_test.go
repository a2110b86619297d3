//go:build integration

package ctrd_test

import (
	"context"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/conformance"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// own makes a configuration that of our own shim.
func own(t *testing.T, s *containerd.Server) func(*ctrd.Config) {
	t.Helper()
	dir := t.TempDir()
	for name, command := range map[string]string{"shim": shim.Binary, shim.Member: shim.Member, "init": "sandbox-init", "sandbox-helper": "sandbox-helper"} {
		out, err := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), "../../../cmd/"+command).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	handler, err := shared.ParseHandler("fsb")
	require.NoError(t, err)
	return func(c *ctrd.Config) {
		c.Handler, c.Shim, c.SandboxInit, c.SlotRoot = handler, filepath.Join(dir, "shim"), filepath.Join(dir, "init"), filepath.Join(s.Dir, "slots")
	}
}

// mapped is own with user namespaces.
func mapped(t *testing.T, s *containerd.Server) func(*ctrd.Config) {
	t.Helper()
	change := own(t, s)
	return func(c *ctrd.Config) {
		change(c)
		c.Users, c.IDs = ctrd.UsersRequired, s.Ranges(64)
	}
}

// ownWays are the configurations of our own shim.
func ownWays() map[string]func(*testing.T, *containerd.Server) func(*ctrd.Config) {
	return map[string]func(*testing.T, *containerd.Server) func(*ctrd.Config){"the host's users": own, "user namespaces": mapped}
}

func TestOwnConformance(t *testing.T) {
	for name, way := range ownWays() {
		t.Run(name, func(t *testing.T) { ownConformance(t, way) })
	}
}

func ownConformance(t *testing.T, way func(*testing.T, *containerd.Server) func(*ctrd.Config)) {
	t.Helper()
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("nobodyknows")))
	registry := containerd.NewRegistry(t, "", "", nil)
	broken := registry.Push(t, "broken:1", containerd.Broken(t))
	gone := containerd.NewRegistry(t, "", "", nil)
	gone.Close()
	change := way(t, s)
	conformance.Run(t, func(t *testing.T) conformance.Setup {
		return conformance.Setup{
			Runtime: newRuntime(t, s, change), Image: "busybox:test", MissingImage: registry.Host + "/nope:1", AwayImage: gone.Host + "/nope:1",
			UnknownUserImage: "nouser:test", BrokenImage: broken, LogRoot: s.LogRoot, KeepsAlive: true,
		}
	})
}

func TestOwnSlotConformance(t *testing.T) {
	for name, way := range ownWays() {
		t.Run(name, func(t *testing.T) { ownSlotConformance(t, way) })
	}
}

func ownSlotConformance(t *testing.T, way func(*testing.T, *containerd.Server) func(*ctrd.Config)) {
	t.Helper()
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/other:test", containerd.Image(t, containerd.WithFile("/other", "x", 0o644)))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("nobodyknows")))
	registry := containerd.NewRegistry(t, "", "", nil)
	broken := registry.Push(t, "broken:1", containerd.Broken(t))
	gone := containerd.NewRegistry(t, "", "", nil)
	gone.Close()
	change := way(t, s)
	conformance.RunSlots(t, func(t *testing.T) conformance.Setup {
		return conformance.Setup{
			Runtime: newRuntime(t, s, change), Image: "busybox:test", OtherImage: "other:test", MissingImage: registry.Host + "/nope:1",
			AwayImage: gone.Host + "/nope:1", UnknownUserImage: "nouser:test", BrokenImage: broken, LogRoot: s.LogRoot, KeepsAlive: true,
		}
	})
}

// started starts n sandboxes of our own shim that run until they are killed, every other one from a slot.
func started(t *testing.T, s *containerd.Server, r *ctrd.Runtime, n int) []string {
	t.Helper()
	ids := make([]string, n)
	for i := range ids {
		b := box(t, s, i%2 == 1, containerd.Busybox, "sleep", "1000")
		require.NoError(t, launch(t.Context(), r, b))
		ids[i] = b.ID
	}
	return ids
}

// shimOf returns the anchor of a container, and the pid of its shim.
func shimOf(t *testing.T, s *containerd.Server, id string) (anchor string, pid int) {
	t.Helper()
	info, err := s.Client.ContainerService().Get(t.Context(), id)
	require.NoError(t, err)
	require.True(t, identity.IsShimID(info.SandboxID), info.SandboxID)
	resp, err := s.Client.TaskService().Get(t.Context(), &tasks.GetRequest{ContainerID: info.SandboxID})
	require.NoError(t, err)
	return info.SandboxID, int(resp.GetProcess().GetPid())
}

func states(t *testing.T, r *ctrd.Runtime) map[string]runtime.TaskState {
	t.Helper()
	found, err := r.List(t.Context(), map[string]string{identity.KeyManaged: "true"})
	require.NoError(t, err)
	out := map[string]runtime.TaskState{}
	for _, f := range found {
		out[f.ID] = f.Task
	}
	return out
}

// TestOwnShimsDeathEndsItsGroup kills a shim. containerd reports the end of its containers, and of no others.
func TestOwnShimsDeathEndsItsGroup(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, own(t, s))
	r.SetShimSize(2)
	ids := started(t, s, r, 3)
	anchor, pid := shimOf(t, s, ids[0])
	same, _ := shimOf(t, s, ids[1])
	other, _ := shimOf(t, s, ids[2])
	require.Equal(t, anchor, same)
	require.NotEqual(t, anchor, other)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	for _, id := range ids[:2] {
		exit, err := r.Wait(ctx, id)
		if err == nil { // otherwise containerd has removed the task
			require.EqualValues(t, 137, exit.Code)
		}
	}
	require.Eventually(t, func() bool {
		now := states(t, r)
		return now[ids[0]] == runtime.TaskNone && now[ids[1]] == runtime.TaskNone
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, runtime.TaskRunning, states(t, r)[ids[2]])
	next := started(t, s, r, 1) // a new shim, or the other one
	for _, id := range append(ids, next...) {
		require.NoError(t, r.Delete(t.Context(), id))
	}
}

// TestOwnShimOutlivesContainerd restarts containerd, by force, while a shim has containers.
func TestOwnShimOutlivesContainerd(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, own(t, s))
	ids := started(t, s, r, 2)
	s.Kill(t)
	s.Up(t)
	require.Eventually(t, func() bool {
		_, err := r.List(t.Context(), map[string]string{identity.KeyManaged: "true"})
		return err == nil
	}, testkit.Timeout, testkit.Tick)
	for _, id := range ids {
		require.Equal(t, runtime.TaskRunning, states(t, r)[id])
	}
	require.NoError(t, r.Signal(t.Context(), ids[0], syscall.SIGKILL, false))
	exit, err := r.Wait(t.Context(), ids[0])
	require.NoError(t, err)
	require.EqualValues(t, 137, exit.Code)
	ids = append(ids, started(t, s, r, 1)...)
	for _, id := range ids {
		require.NoError(t, r.Delete(t.Context(), id))
	}
}

// TestOwnShimsAreSwept: an agent that was killed may leave a shim without containers. Its next process ends it, and none that has some.
func TestOwnShimsAreSwept(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	change := own(t, s)
	first := newRuntime(t, s, change)
	first.SetShimSize(1)
	ids := started(t, s, first, 2)
	empty, _ := shimOf(t, s, ids[0])
	used, _ := shimOf(t, s, ids[1])
	// As if the agent had been killed between the record and the shim.
	require.NoError(t, first.Signal(t.Context(), ids[0], syscall.SIGKILL, true))
	_, err := first.Wait(t.Context(), ids[0])
	require.NoError(t, err)
	_, err = s.Client.TaskService().Delete(t.Context(), &tasks.DeleteTaskRequest{ContainerID: ids[0]})
	require.NoError(t, err)
	require.NoError(t, s.Client.ContainerService().Delete(t.Context(), ids[0]))
	next := newRuntime(t, s, change)
	states(t, next)
	_, err = s.Client.ContainerService().Get(t.Context(), empty)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	_, err = s.Client.ContainerService().Get(t.Context(), used)
	require.NoError(t, err)
	require.NoError(t, next.Delete(t.Context(), ids[0]))
	require.NoError(t, next.Delete(t.Context(), ids[1]))
	_, err = s.Client.ContainerService().Get(t.Context(), used)
	require.True(t, errdefs.IsNotFound(err), "the last container takes its shim with it: %v", err)
}

// TestOwnTaskCalls are those that sandboxes do not need, and people with ctr do.
func TestOwnTaskCalls(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, own(t, s))
	id := started(t, s, r, 1)[0]
	service := s.Client.TaskService()
	_, err := service.Pause(t.Context(), &tasks.PauseTaskRequest{ContainerID: id})
	require.NoError(t, err)
	resp, err := service.Get(t.Context(), &tasks.GetRequest{ContainerID: id})
	require.NoError(t, err)
	require.Equal(t, "PAUSED", resp.GetProcess().GetStatus().String())
	_, err = service.Resume(t.Context(), &tasks.ResumeTaskRequest{ContainerID: id})
	require.NoError(t, err)
	metrics, err := service.Metrics(t.Context(), &tasks.MetricsRequest{Filters: []string{"id==" + id}})
	require.NoError(t, err)
	require.Len(t, metrics.GetMetrics(), 1)
	pids, err := service.ListPids(t.Context(), &tasks.ListPidsRequest{ContainerID: id})
	require.NoError(t, err)
	require.Len(t, pids.GetProcesses(), 2, "its supervisor, too")
	limit := int64(33)
	limits, err := json.Marshal(&specs.LinuxResources{Pids: &specs.LinuxPids{Limit: &limit}})
	require.NoError(t, err)
	update := &tasks.UpdateTaskRequest{ContainerID: id, Resources: &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources", Value: limits}}
	_, err = service.Update(t.Context(), update)
	require.NoError(t, err)
	require.Equal(t, "33", cgroupFiles(t, s, id)["pids.max"])
	_, err = service.Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: id})
	require.Error(t, err)
	_, err = service.Pause(t.Context(), &tasks.PauseTaskRequest{ContainerID: id})
	require.NoError(t, err)
	require.NoError(t, r.Delete(t.Context(), id), "a frozen container")
}

// TestOwnRefusesOtherSpecs: a container that no agent has made is refused, and nothing of it is left.
func TestOwnRefusesOtherSpecs(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, own(t, s))
	id := started(t, s, r, 1)[0]
	like, err := s.Client.ContainerService().Get(t.Context(), id)
	require.NoError(t, err)
	for name, change := range map[string]func(*specs.Spec){
		"hooks":   func(s *specs.Spec) { s.Hooks = &specs.Hooks{} },
		"no slot": func(s *specs.Spec) { s.Annotations = nil },
	} {
		var spec specs.Spec
		require.NoError(t, json.Unmarshal(like.Spec.GetValue(), &spec))
		change(&spec)
		spec.Linux.CgroupsPath = s.CgroupParent + "/fsb-other"
		raw, err := json.Marshal(&spec)
		require.NoError(t, err)
		_, err = s.Client.ContainerService().Create(t.Context(), containers.Container{
			ID: "other", Runtime: like.Runtime, SandboxID: like.SandboxID, Spec: &anypb.Any{TypeUrl: like.Spec.GetTypeUrl(), Value: raw},
		})
		require.NoError(t, err)
		_, err = s.Client.TaskService().Create(t.Context(), &tasks.CreateTaskRequest{ContainerID: "other"})
		require.True(t, errdefs.IsInvalidArgument(errgrpc.ToNative(err)), "%s: %v", name, err)
		require.NoError(t, s.Client.ContainerService().Delete(t.Context(), "other"))
	}
	require.NoError(t, r.Delete(t.Context(), id))
}

// TestAppArmorIsAppliedOnlyIfLoaded: the kernel of the tests has no AppArmor. A shim finds that out, and sandboxes run without the profile; with
// one the kernel refuses the process, so that the profile of a spec does reach the kernel, and the next sandbox runs without again.
func TestAppArmorIsAppliedOnlyIfLoaded(t *testing.T) {
	if s := apparmor.Local().Load(t.Context()); s.Profile != "" {
		t.Fatalf("this machine has AppArmor: extend the test for the profile %s", s.Profile)
	}
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, own(t, s))
	require.Empty(t, r.AppArmor())
	kept := started(t, s, r, 2)
	require.Empty(t, r.AppArmor().Profile)
	require.Equal(t, apparmor.Local().Load(t.Context()), r.AppArmor(), "what the shim has found out")
	for _, slot := range []bool{false, true} {
		r.SetAppArmor(apparmor.Status{Profile: apparmor.Name()})
		b := box(t, s, slot, containerd.Busybox, "true")
		require.ErrorContains(t, launch(t.Context(), r, b), "setting the AppArmor profile")
		require.NoError(t, r.Delete(t.Context(), b.ID))
		require.Contains(t, r.AppArmor().Off, "setting the AppArmor profile")
		kept = append(kept, started(t, s, r, 1)...)
	}
	for _, id := range kept {
		require.NoError(t, r.Delete(t.Context(), id))
	}
}

// TestIdleShimIsFoundAndRemoved: what a janitor finds of a shim without containers, and removes with its process, as it does for an agent
// that is gone.
func TestIdleShimIsFoundAndRemoved(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	change := own(t, s)
	owned := func(c *ctrd.Config) {
		change(c)
		c.PodUID, c.NetNSPath = "16fd2706-8baf-433b-82eb-8c7fada847da", "/proc/self/ns/net"
	}
	r := newRuntime(t, s, owned)
	id := started(t, s, r, 1)[0]
	anchor, pid := shimOf(t, s, id)
	remover := &shared.Remover{Client: s.Client, Snapshotter: shared.DefaultSnapshotter, LogRoot: s.LogRoot, ProcRoot: "/proc", CgroupRoot: shared.DefaultCgroupRoot}
	find := func() (found []shared.Piece) {
		pieces, err := remover.Inventory(t.Context())
		require.NoError(t, err)
		for _, p := range pieces {
			if p.Part == shared.PartShim {
				found = append(found, p)
			}
		}
		return found
	}
	require.Empty(t, find(), "a container is in it")
	idle := shared.Piece{ID: anchor, Part: shared.PartShim, Owner: "16fd2706-8baf-433b-82eb-8c7fada847da"}
	require.True(t, errdefs.IsFailedPrecondition(remover.RemovePiece(t.Context(), idle)))
	require.Equal(t, runtime.TaskRunning, states(t, r)[id])

	require.NoError(t, r.Signal(t.Context(), id, syscall.SIGKILL, true))
	_, err := r.Wait(t.Context(), id)
	require.NoError(t, err)
	_, err = s.Client.TaskService().Delete(t.Context(), &tasks.DeleteTaskRequest{ContainerID: id})
	require.NoError(t, err)
	require.NoError(t, s.Client.ContainerService().Delete(t.Context(), id))
	require.Equal(t, []shared.Piece{idle}, find())
	require.NoError(t, remover.RemovePiece(t.Context(), idle))
	require.Empty(t, find())
	require.Eventually(t, func() bool { return syscall.Kill(pid, 0) != nil }, testkit.Timeout, testkit.Tick, "the process of the shim")
	_, err = s.Client.SandboxStore().Get(t.Context(), anchor)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	require.NoError(t, r.Delete(t.Context(), id))
}
