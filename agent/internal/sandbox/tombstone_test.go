package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tombstone"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func tombstoneOf(uid string, attempt int64) *agentv1.Tombstone {
	r := record(uid, attempt)
	return &agentv1.Tombstone{
		Fence: r.GetFence(), Namespace: r.GetNamespace(), Name: r.GetName(), RequestId: "create-" + uid, DeleteTime: timestamppb.New(time.Unix(900, 0)),
	}
}

// deleteWithTombstone deletes a sandbox with a tombstone.
func (env *testEnv) deleteWithTombstone(ctx context.Context, uid string, attempt int64, grace time.Duration) error {
	t := tombstoneOf(uid, attempt)
	_, err := env.Delete(ctx, &agentv1.DeleteSandboxRequest{Fence: t.GetFence(), GracePeriod: durationpb.New(grace), Tombstone: t}, func(agentv1.DeleteStage) {})
	return err
}

// tombstones returns the tombstones of a new watch, without their grace periods.
func (env *testEnv) tombstones(t *testing.T) []string {
	t.Helper()
	watcher, err := env.status.Watch()
	require.NoError(t, err)
	defer env.status.Unwatch(watcher)
	ids := []string{}
	for _, s := range watcher.Snapshot.GetTombstones() {
		want := tombstoneOf(s.GetFence().GetSandboxUid(), s.GetFence().GetAttempt())
		want.GracePeriod = s.GetGracePeriod()
		require.True(t, proto.Equal(want, s), "%v", s)
		ids = append(ids, fmt.Sprintf("%s-%d", s.GetFence().GetSandboxUid(), s.GetFence().GetAttempt()))
	}
	return ids
}

func TestTombstoneIsDurableFromDeleteToForget(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	env := boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("u", 1))
	watcher, err := env.status.Watch()
	require.NoError(t, err)
	defer env.status.Unwatch(watcher)
	file := filepath.Join(root+".state", "tombstones", "u")
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpSignal || op == fake.OpDelete {
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s before the tombstone is durable: %v", op, err)
			}
		}
		return nil
	})
	for range 2 {
		require.NoError(t, env.deleteWithTombstone(t.Context(), "u", 1, 0))
	}
	require.Equal(t, []string{"u-1"}, env.tombstones(t))
	first := <-watcher.Deltas()
	require.Len(t, first.GetTombstonesAdded(), 1, "it is reported before anything else: %v", first)
	for d := range watcher.Deltas() {
		require.Empty(t, d.GetTombstonesAdded())
		if s := d.GetSandboxes(); len(s) == 1 && s[0].GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
			break
		}
	}
	require.NoError(t, env.Close(t.Context()))

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	require.Equal(t, []string{"u-1"}, env.tombstones(t))
	_, err = env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	next, err := env.status.Watch()
	require.NoError(t, err)
	defer env.status.Unwatch(next)
	for range 2 {
		require.NoError(t, env.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	}
	d := <-next.Deltas()
	require.True(t, proto.Equal(record("u", 1).GetFence(), d.GetTombstonesRemoved()[0]))
	require.Empty(t, env.tombstones(t))
	require.NoFileExists(t, file)
	_, err = env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	require.NoError(t, env.Close(t.Context()))

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	require.Empty(t, env.tombstones(t))
}

func TestTombstonesOfUnknownSandboxes(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	env := newEnv(t, func(c *sandbox.Config) { c.Clock = clock })
	require.NoError(t, env.deleteWithTombstone(t.Context(), "u", 2, 0))
	require.Equal(t, []string{"u-2"}, env.tombstones(t))
	clock.Step(24 * time.Hour)
	_, err := env.create(t.Context(), record("u", 2))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	_, err = env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	env.mustCreate(t, record("u", 3))

	require.NoError(t, env.deleteWithTombstone(t.Context(), "u", 1, 0), "the later tombstone covers an older attempt")
	require.Equal(t, []string{"u-2"}, env.tombstones(t))
	require.NoError(t, env.deleteWithTombstone(t.Context(), "u", 3, 0), "a later attempt replaces the earlier one")
	require.Equal(t, []string{"u-3"}, env.tombstones(t))
	require.NoError(t, env.ForgetTombstone(t.Context(), record("u", 2).GetFence()))
	require.Equal(t, []string{"u-3"}, env.tombstones(t))
	require.NoError(t, env.ForgetTombstone(t.Context(), record("unknown", 1).GetFence()))
	env.requireNothing(t)
}

func TestTombstoneRefusals(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1))
	_, err := env.Delete(t.Context(), &agentv1.DeleteSandboxRequest{Fence: record("u", 1).GetFence(), Tombstone: tombstoneOf("u", 2)}, nil)
	requireFault(t, err, errdefs.ErrInvalidArgument, fault.InvalidField)
	var f *fault.Error
	require.ErrorAs(t, err, &f)
	require.Equal(t, "tombstone.fence", f.Metadata()[fault.FieldKey])
	requireFault(t, env.deleteWithTombstone(t.Context(), "u", 2, 0), errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	other := record("u", 1).GetFence()
	other.AgentUid = "other"
	requireFault(t, env.ForgetTombstone(t.Context(), other), errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	require.Empty(t, env.tombstones(t))
	require.Equal(t, stateRunning, env.state("u"))
}

func TestDeleteWithTombstoneResumesAfterRestart(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	env := boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	for _, uid := range []string{"runs", "ended", "stays"} {
		env.mustCreate(t, record(uid, 1))
	}
	rt.Exit("ended-1", runtime.Exit{Code: 3})
	require.Eventually(t, func() bool { return env.state("ended") == stateStopped }, testkit.Timeout, testkit.Tick)
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpDelete {
			return errors.New("containerd is away")
		}
		return nil
	})
	require.ErrorContains(t, env.deleteWithTombstone(t.Context(), "runs", 1, 0), "away")
	require.ErrorContains(t, env.deleteWithTombstone(t.Context(), "ended", 1, 0), "away")
	require.NoError(t, env.Close(t.Context()))
	rt.Hook(nil)

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	require.Equal(t, []string{"ended-1", "runs-1"}, env.tombstones(t))
	require.Eventually(t, func() bool { return len(env.reports()) == 1 }, testkit.Timeout, testkit.Tick)
	require.Equal(t, []string{"stays-1"}, rt.IDs())
	require.Equal(t, []string{"ended-1", "runs-1"}, env.tombstones(t), "tombstones are kept until they are forgotten")
}

// TestForgottenTombstoneIsKeptWhileContainerExists: a crash in between must not bring the sandbox back.
func TestForgottenTombstoneIsKeptWhileContainerExists(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	env := boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("u", 1, command("trap", "linger")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, env.deleteWithTombstone(ctx, "u", 1, time.Hour), context.Canceled)
	require.NoError(t, env.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	require.Empty(t, env.tombstones(t))
	file := filepath.Join(root+".state", "tombstones", "u")
	require.FileExists(t, file)
	require.ErrorIs(t, env.deleteWithTombstone(ctx, "u", 1, time.Hour), context.Canceled)
	require.Equal(t, []string{"u-1"}, env.tombstones(t), "a repeated delete keeps it again")
	require.NoError(t, env.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	require.NoError(t, env.Close(t.Context()))

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	require.Equal(t, []string{"u-1"}, env.tombstones(t), "reported again, because the deletion is not over")
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATING, env.state("u"))
	require.NoError(t, env.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	_, _, err := env.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	require.NoFileExists(t, file)
}

func TestDeleteFailsIfTombstoneCannotBeWritten(t *testing.T) {
	dir, tombstones := openState(t, t.TempDir())
	broken := &brokenStore{Files: tombstones}
	env := newEnv(t, func(c *sandbox.Config) { c.State, c.Tombstones = dir, broken })
	env.mustCreate(t, record("u", 1))
	broken.broken.Store(true)
	requireFault(t, env.deleteWithTombstone(t.Context(), "u", 1, 0), errdefs.ErrUnavailable, fault.AgentUnavailable)
	require.Equal(t, stateRunning, env.state("u"))
	require.Empty(t, env.tombstones(t))
	broken.broken.Store(false)
	require.NoError(t, env.deleteWithTombstone(t.Context(), "u", 1, 0))
	broken.broken.Store(true)
	requireFault(t, env.ForgetTombstone(t.Context(), record("u", 1).GetFence()), errdefs.ErrUnavailable, fault.AgentUnavailable)
	broken.broken.Store(false)
	require.NoError(t, env.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	names, err := tombstones.Names()
	require.NoError(t, err)
	require.Empty(t, names)
}

// memory is a Files in memory, for many files.
type memory struct {
	mu    sync.Mutex
	files map[string][]byte
}

func (s *memory) Names() ([]string, error) { return nil, nil }

func (s *memory) Read(name string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.files[name], nil
}

func (s *memory) Write(name string, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[name] = data
	return nil
}

func (s *memory) Remove(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.files, name)
	return nil
}

func TestTombstonesAreBounded(t *testing.T) {
	store := &memory{files: map[string][]byte{}}
	env := newEnv(t, func(c *sandbox.Config) { c.State, c.Tombstones = store, store })
	env.mustCreate(t, record("u", 1))
	for i := range tombstone.Limit {
		require.NoError(t, env.deleteWithTombstone(t.Context(), fmt.Sprintf("t%d", i), 1, 0))
	}
	err := env.deleteWithTombstone(t.Context(), "u", 1, 0)
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.Overloaded)
	_, ok := fault.RetryAfter(err)
	require.True(t, ok)
	require.Equal(t, stateRunning, env.state("u"))
	require.NoError(t, env.deleteWithTombstone(t.Context(), "t7", 1, 0), "an existing tombstone can be replaced")
	_, _, err = env.delete(t.Context(), record("v", 1).GetFence(), 0)
	require.NoError(t, err, "a delete without a tombstone succeeds")
	require.NoError(t, env.ForgetTombstone(t.Context(), record("t7", 1).GetFence()))
	require.NoError(t, env.deleteWithTombstone(t.Context(), "u", 1, 0))
}

func TestDamagedTombstoneFailsStart(t *testing.T) {
	good, err := proto.Marshal(tombstoneOf("u", 1))
	require.NoError(t, err)
	for name, raw := range map[string][]byte{"u": good[:len(good)-3], "v": good, "w": {}} {
		dir, tombstones := openState(t, t.TempDir())
		require.NoError(t, tombstones.Write(name, raw))
		_, err := sandbox.New(sandbox.Config{
			Runtime: newRuntime(), Logs: logs.New(logs.Config{Root: t.TempDir(), Owner: agentUID}), Info: &agentv1.AgentInfo{}, State: dir, Tombstones: tombstones,
			Status: status.New(nil),
		})
		require.ErrorContains(t, err, name)
	}
}

// TestConcurrentTombstones deletes and forgets the same few sandboxes concurrently; at the end memory and disk agree.
func TestConcurrentTombstones(t *testing.T) {
	dir, tombstones := openState(t, t.TempDir())
	env := newEnv(t, func(c *sandbox.Config) { c.State, c.Tombstones = dir, tombstones })
	env.mustCreate(t, record("u0", 1))
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 12 {
				uid, attempt := fmt.Sprintf("u%d", i%3), int64(1+i%2)
				var err error
				if worker%2 == 0 {
					err = env.deleteWithTombstone(context.Background(), uid, attempt, 0)
				} else {
					err = env.ForgetTombstone(context.Background(), record(uid, attempt).GetFence())
				}
				if err != nil && fault.ReasonOf(err) != fault.FenceMismatch { // attempt 2 while attempt 1 exists
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool { return len(env.reports()) == 0 }, testkit.Timeout, testkit.Tick)
	names, err := tombstones.Names()
	require.NoError(t, err)
	require.Len(t, env.tombstones(t), len(names))
}
