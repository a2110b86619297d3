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
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func tombstone(uid string, attempt int64) *agentv1.Tombstone {
	r := record(uid, attempt)
	return &agentv1.Tombstone{
		Fence: r.GetFence(), Namespace: r.GetNamespace(), Name: r.GetName(), RequestId: "create-" + uid, DeleteTime: timestamppb.New(time.Unix(900, 0)),
	}
}

// bury deletes with a tombstone.
func (w *world) bury(ctx context.Context, uid string, attempt int64, grace time.Duration) error {
	t := tombstone(uid, attempt)
	_, err := w.Delete(ctx, &agentv1.DeleteSandboxRequest{Fence: t.GetFence(), GracePeriod: durationpb.New(grace), Tombstone: t}, func(agentv1.DeleteStage) {})
	return err
}

// buried are the tombstones of a new watch.
func (w *world) buried(t *testing.T) []string {
	t.Helper()
	watcher, err := w.Watch()
	require.NoError(t, err)
	defer w.Unwatch(watcher)
	ids := []string{}
	for _, s := range watcher.Snapshot.GetTombstones() {
		want := tombstone(s.GetFence().GetSandboxUid(), s.GetFence().GetAttempt())
		require.True(t, proto.Equal(want, s), "%v", s)
		ids = append(ids, fmt.Sprintf("%s-%d", s.GetFence().GetSandboxUid(), s.GetFence().GetAttempt()))
	}
	return ids
}

func TestATombstoneIsThereBeforeTheContainerIsTouchedAndUntilItIsForgotten(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	w := boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	w.mustCreate(t, record("u", 1))
	watcher, err := w.Watch()
	require.NoError(t, err)
	defer w.Unwatch(watcher)
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
		require.NoError(t, w.bury(t.Context(), "u", 1, 0))
	}
	require.Equal(t, []string{"u-1"}, w.buried(t))
	first := <-watcher.Deltas()
	require.Len(t, first.GetTombstonesAdded(), 1, "it is told before anything else: %v", first)
	for d := range watcher.Deltas() {
		require.Empty(t, d.GetTombstonesAdded())
		if s := d.GetSandboxes(); len(s) == 1 && s[0].GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
			break
		}
	}
	require.NoError(t, w.Close(t.Context()))

	w = boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	require.Equal(t, []string{"u-1"}, w.buried(t))
	_, err = w.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	next, err := w.Watch()
	require.NoError(t, err)
	defer w.Unwatch(next)
	for range 2 {
		require.NoError(t, w.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	}
	d := <-next.Deltas()
	require.True(t, proto.Equal(record("u", 1).GetFence(), d.GetTombstonesRemoved()[0]))
	require.Empty(t, w.buried(t))
	require.NoFileExists(t, file)
	_, err = w.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	require.NoError(t, w.Close(t.Context()))

	w = boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	require.Empty(t, w.buried(t))
}

func TestTombstonesOfWhatIsNotHere(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	w := newWorld(t, func(c *sandbox.Config) { c.Clock = clock })
	require.NoError(t, w.bury(t.Context(), "u", 2, 0))
	require.Equal(t, []string{"u-2"}, w.buried(t))
	clock.Step(24 * time.Hour)
	_, err := w.create(t.Context(), record("u", 2))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	_, err = w.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	w.mustCreate(t, record("u", 3))

	require.NoError(t, w.bury(t.Context(), "u", 1, 0), "an older attempt is gone, and covered")
	require.Equal(t, []string{"u-2"}, w.buried(t))
	require.NoError(t, w.bury(t.Context(), "u", 3, 0), "a later attempt takes the earlier one's place")
	require.Equal(t, []string{"u-3"}, w.buried(t))
	require.NoError(t, w.ForgetTombstone(t.Context(), record("u", 2).GetFence()))
	require.Equal(t, []string{"u-3"}, w.buried(t))
	require.NoError(t, w.ForgetTombstone(t.Context(), record("nobody", 1).GetFence()))
	w.requireNothing(t)
}

func TestTombstonesThatAreRefused(t *testing.T) {
	w := newWorld(t, nil)
	w.mustCreate(t, record("u", 1))
	_, err := w.Delete(t.Context(), &agentv1.DeleteSandboxRequest{Fence: record("u", 1).GetFence(), Tombstone: tombstone("u", 2)}, nil)
	requireFault(t, err, errdefs.ErrInvalidArgument, fault.InvalidField)
	var f *fault.Error
	require.ErrorAs(t, err, &f)
	require.Equal(t, "tombstone.fence", f.Metadata()[fault.FieldKey])
	requireFault(t, w.bury(t.Context(), "u", 2, 0), errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	other := record("u", 1).GetFence()
	other.AgentUid = "other"
	requireFault(t, w.ForgetTombstone(t.Context(), other), errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	require.Empty(t, w.buried(t))
	require.Equal(t, stateRunning, w.state("u"))
}

func TestADeletionWithATombstoneIsCarriedOnAfterARestart(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	w := boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	for _, uid := range []string{"runs", "ended", "stays"} {
		w.mustCreate(t, record(uid, 1))
	}
	rt.Exit("ended-1", runtime.Exit{Code: 3})
	require.Eventually(t, func() bool { return w.state("ended") == stateStopped }, patience, tick)
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpDelete {
			return errors.New("containerd is away")
		}
		return nil
	})
	require.ErrorContains(t, w.bury(t.Context(), "runs", 1, 0), "away")
	require.ErrorContains(t, w.bury(t.Context(), "ended", 1, 0), "away")
	require.NoError(t, w.Close(t.Context()))
	rt.Hook(nil)

	w = boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	require.Equal(t, []string{"ended-1", "runs-1"}, w.buried(t))
	require.Eventually(t, func() bool { return len(w.Reports()) == 1 }, patience, tick)
	require.Equal(t, []string{"stays-1"}, rt.IDs())
	require.Equal(t, []string{"ended-1", "runs-1"}, w.buried(t), "they are kept until they are forgotten")
}

// TestWhatWasForgottenIsKeptUntilTheContainerIsGone: an agent that dies in between must not bring the sandbox back.
func TestWhatWasForgottenIsKeptUntilTheContainerIsGone(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	w := boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	w.mustCreate(t, record("u", 1, command("trap", "linger")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, w.bury(ctx, "u", 1, time.Hour), context.Canceled)
	require.NoError(t, w.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	require.Empty(t, w.buried(t))
	file := filepath.Join(root+".state", "tombstones", "u")
	require.FileExists(t, file)
	require.ErrorIs(t, w.bury(ctx, "u", 1, time.Hour), context.Canceled)
	require.Equal(t, []string{"u-1"}, w.buried(t), "who deletes again has it kept again")
	require.NoError(t, w.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	require.NoError(t, w.Close(t.Context()))

	w = boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	require.Equal(t, []string{"u-1"}, w.buried(t), "reported again, for it was not yet over")
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATING, w.state("u"))
	require.NoError(t, w.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	_, _, err := w.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	require.NoFileExists(t, file)
}

func TestATombstoneThatCannotBeKeptDeletesNothing(t *testing.T) {
	dir, tombstones := openState(t, t.TempDir())
	broken := &brokenStore{Store: tombstones}
	w := newWorld(t, func(c *sandbox.Config) { c.State, c.Tombstones = dir, broken })
	w.mustCreate(t, record("u", 1))
	broken.broken.Store(true)
	requireFault(t, w.bury(t.Context(), "u", 1, 0), errdefs.ErrUnavailable, fault.AgentUnavailable)
	require.Equal(t, stateRunning, w.state("u"))
	require.Empty(t, w.buried(t))
	broken.broken.Store(false)
	require.NoError(t, w.bury(t.Context(), "u", 1, 0))
	broken.broken.Store(true)
	requireFault(t, w.ForgetTombstone(t.Context(), record("u", 1).GetFence()), errdefs.ErrUnavailable, fault.AgentUnavailable)
	broken.broken.Store(false)
	require.NoError(t, w.ForgetTombstone(t.Context(), record("u", 1).GetFence()))
	names, err := tombstones.Names()
	require.NoError(t, err)
	require.Empty(t, names)
}

// memory is a Store for what would take a disk too long.
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
	w := newWorld(t, func(c *sandbox.Config) { c.State, c.Tombstones = store, store })
	w.mustCreate(t, record("u", 1))
	for i := range sandbox.MaxGraves {
		require.NoError(t, w.bury(t.Context(), fmt.Sprintf("t%d", i), 1, 0))
	}
	err := w.bury(t.Context(), "u", 1, 0)
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.Overloaded)
	_, ok := fault.RetryAfter(err)
	require.True(t, ok)
	require.Equal(t, stateRunning, w.state("u"))
	require.NoError(t, w.bury(t.Context(), "t7", 1, 0), "one that is there needs no room")
	_, _, err = w.delete(t.Context(), record("v", 1).GetFence(), 0)
	require.NoError(t, err, "nor does a delete without one")
	require.NoError(t, w.ForgetTombstone(t.Context(), record("t7", 1).GetFence()))
	require.NoError(t, w.bury(t.Context(), "u", 1, 0))
}

func TestDamagedTombstonesAreAnErrorOfTheStart(t *testing.T) {
	good, err := proto.Marshal(&agentv1.DeleteSandboxRequest{Fence: record("u", 1).GetFence(), Tombstone: tombstone("u", 1)})
	require.NoError(t, err)
	for name, raw := range map[string][]byte{"u": good[:len(good)-3], "v": good, "w": {}} {
		dir, tombstones := openState(t, t.TempDir())
		require.NoError(t, tombstones.Write(name, raw))
		_, err := sandbox.New(sandbox.Config{
			Runtime: newRuntime(), Logs: logs.New(logs.Config{Root: t.TempDir(), Owner: me}), Info: &agentv1.AgentInfo{}, State: dir, Tombstones: tombstones,
		})
		require.ErrorContains(t, err, name)
	}
}

// TestTombstonesUnderConcurrency buries and forgets the same few sandboxes at once; at the end memory and disk agree.
func TestTombstonesUnderConcurrency(t *testing.T) {
	dir, tombstones := openState(t, t.TempDir())
	w := newWorld(t, func(c *sandbox.Config) { c.State, c.Tombstones = dir, tombstones })
	w.mustCreate(t, record("u0", 1))
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 12 {
				uid, attempt := fmt.Sprintf("u%d", i%3), int64(1+i%2)
				var err error
				if worker%2 == 0 {
					err = w.bury(context.Background(), uid, attempt, 0)
				} else {
					err = w.ForgetTombstone(context.Background(), record(uid, attempt).GetFence())
				}
				if err != nil && fault.ReasonOf(err) != fault.FenceMismatch { // attempt 2 while attempt 1 is there
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool { return len(w.Reports()) == 0 }, patience, tick)
	names, err := tombstones.Names()
	require.NoError(t, err)
	require.Len(t, w.buried(t), len(names))
}
