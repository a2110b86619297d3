package launch_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	cold = sandboxv1.StartPath_START_PATH_COLD
	slot = sandboxv1.StartPath_START_PATH_SLOT

	slotID = "slot.0123456789abcdef0123"
)

var errAway = errors.New("containerd is away")

// fixture is a Launcher above a fake runtime, with at most one free slot.
type fixture struct {
	*launch.Launcher

	runtime *fake.Runtime
	logs    *logs.Store
	root    string
	free    []string
	dropped []string
	images  []string // that slots were taken for
}

// Take implements launch.Slots.
func (f *fixture) Take(image string) (string, bool) {
	f.images = append(f.images, image)
	if len(f.free) == 0 {
		return "", false
	}
	id := f.free[0]
	f.free = f.free[1:]
	return id, true
}

// Drop implements launch.Slots.
func (f *fixture) Drop(ids ...string) { f.dropped = append(f.dropped, ids...) }

// launcher returns a fixture whose agent has slots, and, if free, one that can be claimed.
func launcher(t *testing.T, free bool) *fixture {
	t.Helper()
	f := &fixture{runtime: fake.New(map[string]fake.Image{"docker.io/library/busybox:1": {Local: true}}), root: t.TempDir()}
	f.logs = logs.New(logs.Config{Root: f.root, Owner: "me"})
	f.Launcher = launch.New(launch.Config{
		Runtime: f.runtime, Logs: f.logs, Slots: f, Claimer: f.runtime, Pool: "default", Process: "this",
		MaxLimits: resources.Limits{MemoryBytes: 64 << 20}, Clock: clocktesting.NewFakePassiveClock(time.Unix(1000, 0)),
	})
	if free {
		paths, err := f.logs.Create(slotID, "")
		require.NoError(t, err)
		require.NoError(t, f.runtime.StartSlot(t.Context(), runtime.Slot{
			ID: slotID, LogPath: paths.Output, HostnamePath: paths.Hostname,
			Labels: identity.Identity{AgentUID: "me", Pool: "default", State: identity.StateSlot}.Labels(),
		}))
		f.free = []string{slotID}
	}
	return f
}

func record(change ...func(*agentv1.SandboxRecord)) *agentv1.SandboxRecord {
	r := &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: "u", Attempt: 2, AgentUid: "me"}, Namespace: "default", Name: "box",
		Spec: &sandboxv1.SandboxSpec{Image: "busybox:1", Command: []string{"sleep"}},
	}
	for _, c := range change {
		c(r)
	}
	return r
}

func command(line ...string) func(*agentv1.SandboxRecord) {
	return func(r *agentv1.SandboxRecord) { r.Spec.Command = line }
}

func withoutNetwork(r *agentv1.SandboxRecord) {
	r.Spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE
}

func (f *fixture) launch(ctx context.Context, r *agentv1.SandboxRecord) (launch.Result, []runtime.Stage, error) {
	var stages []runtime.Stage
	result, err := f.Launch(ctx, r, false, func(s runtime.Stage) { stages = append(stages, s) })
	return result, stages, err
}

// requireClean checks that no container and no log is left.
func (f *fixture) requireClean(t *testing.T) {
	t.Helper()
	require.Empty(t, f.runtime.IDs())
	left, err := os.ReadDir(f.root)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestPaths(t *testing.T) {
	claimStages := []runtime.Stage{runtime.StageImage, runtime.StageSnapshot, runtime.StageContainer, runtime.StageClaim}
	coldStages := []runtime.Stage{runtime.StageImage, runtime.StageSnapshot, runtime.StageContainer, runtime.StageTask}
	for _, c := range []struct {
		name    string
		free    bool
		prepare func(*fixture)
		record  *agentv1.SandboxRecord
		path    sandboxv1.StartPath
		id      string
		stages  []runtime.Stage
		dropped []string
	}{
		{name: "a free slot is claimed", free: true, record: record(), path: slot, id: slotID, stages: claimStages},
		{name: "without a free slot", record: record(), path: cold, id: "u-2", stages: coldStages},
		{name: "without a network", free: true, record: record(withoutNetwork), path: cold, id: "u-2", stages: coldStages},
		{name: "a lost slot", free: true, prepare: func(f *fixture) {
			f.runtime.Exit(slotID, runtime.Exit{Code: 137})
		}, record: record(), path: cold, id: "u-2", stages: coldStages, dropped: []string{slotID}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := launcher(t, c.free)
			if c.prepare != nil {
				c.prepare(f)
			}
			result, stages, err := f.launch(t.Context(), c.record)
			require.NoError(t, err)
			require.Equal(t, c.path, result.Path)
			require.Equal(t, c.id, result.ID)
			require.Equal(t, c.stages, stages)
			require.Equal(t, c.dropped, f.dropped)
			require.Equal(t, time.Unix(1000, 0), result.StartTime)
			recorded, ok := f.logs.StartedAt(result.ID)
			require.True(t, ok)
			require.True(t, result.StartTime.Equal(recorded))
			found, ok := f.runtime.Found(result.ID)
			require.True(t, ok)
			require.Equal(t, runtime.TaskRunning, found.Task)
			require.False(t, found.Claiming)
			require.NoError(t, f.Remove(t.Context(), result.ID))
			require.NoError(t, f.Remove(t.Context(), result.ID), "safe to repeat")
		})
	}
}

// TestColdPathWithoutSlots has a launcher whose agent has no slots at all.
func TestColdPathWithoutSlots(t *testing.T) {
	f := launcher(t, false)
	f.Launcher = launch.New(launch.Config{Runtime: f.runtime, Logs: f.logs})
	result, _, err := f.launch(t.Context(), record())
	require.NoError(t, err)
	require.Equal(t, cold, result.Path)
	require.Empty(t, f.images)
	require.WithinDuration(t, time.Now(), result.StartTime, time.Minute)
}

func TestSlotsAreTakenForTheNormalizedImage(t *testing.T) {
	f := launcher(t, false)
	_, _, err := f.launch(t.Context(), record())
	require.NoError(t, err)
	require.Equal(t, []string{"docker.io/library/busybox:1"}, f.images)
}

// TestUndo fails a launch at each step, on both paths. Undo leaves nothing, however often it fails before.
func TestUndo(t *testing.T) {
	for _, c := range []struct {
		name string
		free bool
		fail fake.Op
	}{
		{"cold, before the container", false, fake.OpCreate},
		{"cold, before the task", false, fake.OpTask},
		{"cold, before the start", false, fake.OpStart},
		{"slot, before the claim", true, fake.OpClaim},
		{"slot, after the record", true, fake.OpGo},
		{"slot, at the start", true, fake.OpStart},
		{"slot, before the claim is complete", true, fake.OpClaimed},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := launcher(t, c.free)
			f.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
				if op == c.fail || op == fake.OpDelete {
					return errAway
				}
				return nil
			})
			result, _, err := f.launch(t.Context(), record())
			require.ErrorIs(t, err, errAway)
			require.ErrorIs(t, f.Undo(t.Context(), result), errAway)
			f.runtime.Hook(nil)
			for range 2 {
				require.NoError(t, f.Undo(t.Context(), result))
			}
			f.requireClean(t)
			_, _, err = f.launch(t.Context(), record())
			require.NoError(t, err)
		})
	}
}

// TestFaultsOfTheRequest: a slot that was claimed for it is used up.
func TestFaultsOfTheRequest(t *testing.T) {
	for _, free := range []bool{false, true} {
		f := launcher(t, free)
		result, _, err := f.launch(t.Context(), record(command("nope")))
		require.Equal(t, fault.CommandNotFound, fault.ReasonOf(err), "%v", err)
		require.NoError(t, f.Undo(t.Context(), result))
		f.requireClean(t)
		require.Empty(t, f.dropped)
	}
	f := launcher(t, true)
	_, _, err := f.launch(t.Context(), record(func(r *agentv1.SandboxRecord) { r.Spec.Image = "Not A Reference" }))
	require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
	require.Len(t, f.free, 1, "no slot is taken for it")
}

// TestCanceledLaunch ends the context in each path; the slot is not taken for lost.
func TestCanceledLaunch(t *testing.T) {
	for op, free := range map[fake.Op]bool{fake.OpGo: true, fake.OpTask: false} {
		f := launcher(t, free)
		ctx, cancel := context.WithCancel(t.Context())
		f.runtime.Hook(func(_ context.Context, at fake.Op, _ string) error {
			if at == op {
				cancel()
			}
			return nil
		})
		result, _, err := f.launch(ctx, record())
		require.ErrorIs(t, err, context.Canceled)
		require.Empty(t, f.dropped)
		f.runtime.Hook(nil)
		require.NoError(t, f.Undo(t.Context(), result))
		f.requireClean(t)
	}
}

// TestForeignContainersAreKept: Undo removes neither another agent's container nor its log.
func TestForeignContainersAreKept(t *testing.T) {
	t.Run("container", func(t *testing.T) {
		f := launcher(t, false)
		f.runtime.Put(runtime.Found{ID: "u-2", Task: runtime.TaskRunning}, runtime.Exit{})
		result, _, err := f.launch(t.Context(), record())
		require.True(t, errdefs.IsAlreadyExists(err), "%v", err)
		require.Equal(t, fault.SandboxExists, fault.ReasonOf(err))
		require.NoError(t, f.Undo(t.Context(), result))
		require.Equal(t, []string{"u-2"}, f.runtime.IDs())
		require.NoDirExists(t, filepath.Join(f.root, "u-2"), "the log directory was this launch's")
	})
	t.Run("log", func(t *testing.T) {
		f := launcher(t, false)
		_, err := logs.New(logs.Config{Root: f.root, Owner: "other"}).Create("u-2", "h")
		require.NoError(t, err)
		result, _, err := f.launch(t.Context(), record())
		require.Equal(t, fault.SandboxExists, fault.ReasonOf(err))
		require.NoError(t, f.Undo(t.Context(), result))
		require.DirExists(t, filepath.Join(f.root, "u-2"))
	})
}

// TestContainer checks what the runtime receives.
func TestContainer(t *testing.T) {
	f := launcher(t, false)
	env := map[string]string{"A": "1"}
	r := record(func(r *agentv1.SandboxRecord) { r.Traceparent, r.Spec.Env = "00-trace", env })
	result, err := f.Launch(t.Context(), r, true, func(runtime.Stage) {})
	require.NoError(t, err)
	found, ok := f.runtime.Found(result.ID)
	require.True(t, ok)
	id, err := identity.Parse(found.Labels)
	require.NoError(t, err)
	require.Equal(t, identity.Identity{
		Namespace: "default", Name: "box", SandboxUID: "u", Attempt: 2, AgentUID: "me", AgentProcess: "this", Pool: "default",
		State: identity.StateClaimed, Persisted: true,
	}, id)
	kept := &agentv1.SandboxRecord{}
	require.NoError(t, found.Record.UnmarshalTo(kept))
	require.Equal(t, "00-trace", kept.GetTraceparent())
	require.Equal(t, map[string]string{"A": "1"}, env, "the record is not modified")
	spec, ok := f.runtime.Spec(result.ID)
	require.True(t, ok)
	require.Equal(t, map[string]string{"A": "1", "TRACEPARENT": "00-trace"}, spec.Env)
	require.Equal(t, filepath.Join(f.root, "u-2", "output.log"), spec.LogPath)
}

// TestNoSandboxIsUnlimited: a record without limits, by whichever caller, ran without any.
func TestNoSandboxIsUnlimited(t *testing.T) {
	for _, free := range []bool{false, true} {
		f := launcher(t, free)
		result, _, err := f.launch(t.Context(), record(func(r *agentv1.SandboxRecord) { r.Limits = &sandboxv1.ResourceLimits{CpuMillis: 250} }))
		require.NoError(t, err)
		spec, ok := f.runtime.Spec(result.ID)
		require.True(t, ok)
		require.Equal(t, resources.Limits{CPUMillis: 250, MemoryBytes: 64 << 20, PIDs: 1024}, spec.Limits, "the default of memory is above the pool's maximum")
	}
}

func TestLimitsAndNetwork(t *testing.T) {
	own := &sandboxv1.ResourceLimits{CpuMillis: 1, MemoryBytes: 2, Pids: 3}
	inForce := &sandboxv1.ResourceLimits{CpuMillis: 4, MemoryBytes: 5, Pids: 6}
	require.Equal(t, resources.Limits{}, launch.Limits(record()))
	require.Equal(t, resources.Limits{CPUMillis: 1, MemoryBytes: 2, PIDs: 3}, launch.Limits(record(func(r *agentv1.SandboxRecord) { r.Spec.Resources = own })))
	require.Equal(t, resources.Limits{CPUMillis: 4, MemoryBytes: 5, PIDs: 6}, launch.Limits(record(func(r *agentv1.SandboxRecord) {
		r.Spec.Resources, r.Limits = own, inForce
	})), "those in force take precedence")
	require.Equal(t, runtime.NetworkAgent, launch.Network(record()))
	require.Equal(t, runtime.NetworkNone, launch.Network(record(withoutNetwork)))
}
