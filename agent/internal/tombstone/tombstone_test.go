package tombstone_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tombstone"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a Store on a real directory, with what it published.
type fixture struct {
	*tombstone.Store

	clock *clocktesting.FakeClock

	mu     sync.Mutex
	deltas []*agentv1.AgentDelta
}

func open(t *testing.T, files tombstone.Files) *fixture {
	t.Helper()
	f := &fixture{clock: clocktesting.NewFakeClock(time.Unix(1000, 0))}
	var err error
	f.Store, err = tombstone.Open(files, f.clock, func(d *agentv1.AgentDelta) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.deltas = append(f.deltas, d)
	})
	require.NoError(t, err)
	return f
}

func directory(t *testing.T, path string) *state.Dir {
	t.Helper()
	d, err := state.Open(path)
	require.NoError(t, err)
	return d
}

// published returns what was published since the last call.
func (f *fixture) published() (added []string, removed []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.deltas {
		for _, t := range d.GetTombstonesAdded() {
			added = append(added, id(t.GetFence()))
		}
		for _, fence := range d.GetTombstonesRemoved() {
			removed = append(removed, id(fence))
		}
	}
	f.deltas = nil
	return added, removed
}

func (f *fixture) reported() []string {
	var ids []string
	for _, t := range f.Reported() {
		ids = append(ids, id(t.GetFence()))
	}
	return ids
}

func id(f *agentv1.Fence) string { return fmt.Sprintf("%s-%d", f.GetSandboxUid(), f.GetAttempt()) }

func fence(uid string, attempt int64) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: "me"}
}

func of(uid string, attempt int64) *agentv1.Tombstone {
	return &agentv1.Tombstone{Fence: fence(uid, attempt), Namespace: "default", Name: uid, RequestId: "r"}
}

func withGrace(t *agentv1.Tombstone, d time.Duration) *agentv1.Tombstone {
	t.GracePeriod = durationpb.New(d)
	return t
}

func never() bool  { return false }
func always() bool { return true }

func TestPutIsDurable(t *testing.T) {
	path := t.TempDir()
	f := open(t, directory(t, path))
	want := of("u", 2)
	require.NoError(t, f.Put(t.Context(), want))
	added, removed := f.published()
	require.Equal(t, []string{"u-2"}, added)
	require.Empty(t, removed)
	f = open(t, directory(t, path))
	added, _ = f.published()
	require.Equal(t, []string{"u-2"}, added, "a new process publishes what it reads")
	require.True(t, proto.Equal(want, f.Lookup("u")))
	require.Equal(t, int64(2), f.Latest("u"))
	require.Nil(t, f.Lookup("v"))
	require.Zero(t, f.Latest("v"))
}

// TestPutReplaces puts a second tombstone after the first, of attempt 2 with a grace period of a minute.
func TestPutReplaces(t *testing.T) {
	minute, hour := durationpb.New(time.Minute), durationpb.New(time.Hour)
	for _, c := range []struct {
		name           string
		second         *agentv1.Tombstone
		want           string
		grace          *durationpb.Duration
		added, removed []string
	}{
		{"the same", withGrace(of("u", 2), time.Minute), "u-2", minute, nil, nil},
		{"without a grace period", of("u", 2), "u-2", minute, nil, nil},
		{"longer grace period", withGrace(of("u", 2), time.Hour), "u-2", hour, []string{"u-2"}, nil},
		{"shorter grace period", withGrace(of("u", 2), 0), "u-2", durationpb.New(0), []string{"u-2"}, nil},
		{"older attempt", withGrace(of("u", 1), time.Hour), "u-2", minute, nil, nil},
		{"later attempt", of("u", 3), "u-3", nil, []string{"u-3"}, []string{"u-2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := t.TempDir()
			f := open(t, directory(t, path))
			require.NoError(t, f.Put(t.Context(), withGrace(of("u", 2), time.Minute)))
			f.published()
			require.NoError(t, f.Put(t.Context(), c.second))
			added, removed := f.published()
			require.Equal(t, c.added, added)
			require.Equal(t, c.removed, removed)
			for _, f := range []*fixture{f, open(t, directory(t, path))} {
				require.Equal(t, []string{c.want}, f.reported())
				require.True(t, proto.Equal(c.grace, f.Lookup("u").GetGracePeriod()), "%v", f.Lookup("u"))
			}
		})
	}
}

func TestForgetRemovesTheFileOnceTheContainerIsGone(t *testing.T) {
	for _, exists := range []bool{false, true} {
		t.Run(fmt.Sprintf("container exists %t", exists), func(t *testing.T) {
			path := t.TempDir()
			f := open(t, directory(t, path))
			require.NoError(t, f.Put(t.Context(), of("u", 1)))
			f.published()
			for range 2 {
				require.NoError(t, f.Forget(t.Context(), fence("u", 1), func() bool { return exists }))
			}
			_, removed := f.published()
			require.Equal(t, []string{"u-1"}, removed, "it is published once")
			require.Empty(t, f.Reported())
			require.Equal(t, int64(1), f.Latest("u"), "a late create is refused")
			next := open(t, directory(t, path))
			if !exists {
				require.Empty(t, next.Reported())
				return
			}
			require.Equal(t, []string{"u-1"}, next.reported(), "the deletion is not over")
			order := []string{}
			require.NoError(t, f.ContainerGone("u", func() { order = append(order, "removed") }))
			require.Equal(t, []string{"removed"}, order)
			require.Empty(t, open(t, directory(t, path)).Reported())
		})
	}
}

func TestForgetLeavesOtherAttempts(t *testing.T) {
	f := open(t, directory(t, t.TempDir()))
	require.NoError(t, f.Put(t.Context(), of("u", 2)))
	for _, other := range []*agentv1.Fence{fence("u", 1), fence("u", 3), fence("v", 2)} {
		require.NoError(t, f.Forget(t.Context(), other, never))
		require.Equal(t, []string{"u-2"}, f.reported())
	}
}

func TestPutRestoresAForgottenTombstone(t *testing.T) {
	f := open(t, directory(t, t.TempDir()))
	require.NoError(t, f.Put(t.Context(), of("u", 1)))
	require.NoError(t, f.Forget(t.Context(), fence("u", 1), always))
	f.published()
	require.NoError(t, f.Put(t.Context(), of("u", 1)))
	added, _ := f.published()
	require.Equal(t, []string{"u-1"}, added)
	require.NoError(t, f.ContainerGone("u", func() {}))
	require.Equal(t, []string{"u-1"}, f.reported(), "its file stays: it is no longer forgotten")
}

func TestRememberExpires(t *testing.T) {
	f := open(t, directory(t, t.TempDir()))
	f.Remember("u", 2)
	f.Remember("u", 1)
	require.Equal(t, int64(2), f.Latest("u"), "the latest attempt counts")
	f.clock.Step(59 * time.Minute)
	require.Equal(t, int64(2), f.Latest("u"))
	f.clock.Step(2 * time.Minute)
	require.Zero(t, f.Latest("u"))
}

func TestRememberIsBounded(t *testing.T) {
	f := open(t, directory(t, t.TempDir()))
	for i := range 10000 {
		f.Remember(fmt.Sprint(i), 1)
	}
	require.Zero(t, f.Latest("0"))
	require.Equal(t, int64(1), f.Latest("9999"))
}

func TestOpenRefusesDamagedFiles(t *testing.T) {
	good, err := proto.Marshal(of("u", 1))
	require.NoError(t, err)
	for name, raw := range map[string][]byte{"u": good[:len(good)-1], "v": good, "w": {}} {
		files := directory(t, t.TempDir())
		require.NoError(t, files.Write(name, raw))
		_, err := tombstone.Open(files, clocktesting.NewFakeClock(time.Now()), func(*agentv1.AgentDelta) {})
		require.ErrorContains(t, err, "sandbox "+name)
	}
}

// memory is a directory whose calls can block and fail.
type memory struct {
	mu    sync.Mutex
	files map[string][]byte
	fail  error
	hook  func(call, name string)
}

func (m *memory) enter(call, name string) error {
	if m.hook != nil {
		m.hook(call, name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fail
}

func (m *memory) Names() ([]string, error) { return nil, m.enter("names", "") }

func (m *memory) Read(name string) ([]byte, error) { return m.files[name], m.enter("read", name) }

func (m *memory) Write(name string, data []byte) error {
	if err := m.enter("write", name); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files[name] = data
	return nil
}

func (m *memory) Remove(name string) error {
	if err := m.enter("remove", name); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.files, name)
	return nil
}

func (m *memory) setError(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = err
}

func TestDiskErrors(t *testing.T) {
	files := &memory{files: map[string][]byte{}}
	f := open(t, files)
	files.setError(errors.New("no space left on device"))
	err := f.Put(t.Context(), of("u", 1))
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
	require.Empty(t, f.Reported())
	files.setError(nil)
	require.NoError(t, f.Put(t.Context(), of("u", 1)))
	files.setError(errors.New("input/output error"))
	require.True(t, errdefs.IsUnavailable(f.Forget(t.Context(), fence("u", 1), never)))
	require.True(t, errdefs.IsUnavailable(f.ContainerGone("u", func() {})))
	files.setError(nil)
	require.NoError(t, f.Forget(t.Context(), fence("u", 1), never))
	require.Empty(t, files.files)
	files.setError(errors.New("input/output error"))
	_, err = tombstone.Open(files, f.clock, func(*agentv1.AgentDelta) {})
	require.Error(t, err)
}

func TestLimit(t *testing.T) {
	f := open(t, &memory{files: map[string][]byte{}})
	for i := range tombstone.Limit {
		require.NoError(t, f.Put(t.Context(), of(fmt.Sprint(i), 1)))
	}
	err := f.Put(t.Context(), of("u", 1))
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
	_, retry := fault.RetryAfter(err)
	require.True(t, retry)
	require.NoError(t, f.Put(t.Context(), of("7", 2)), "a later attempt replaces its own")
	require.NoError(t, f.Forget(t.Context(), fence("7", 2), never))
	require.NoError(t, f.Put(t.Context(), of("u", 1)))
}

// TestCallsOnOneSandboxTakeTurns blocks the disk under one call: calls on the same sandbox wait, those on others do not.
func TestCallsOnOneSandboxTakeTurns(t *testing.T) {
	writing, release := make(chan struct{}), make(chan struct{})
	files := &memory{files: map[string][]byte{}}
	files.hook = func(call, name string) {
		if call == "write" && name == "u" {
			close(writing)
			<-release
		}
	}
	f := open(t, files)
	put := make(chan error, 1)
	go func() { put <- f.Put(context.Background(), of("u", 1)) }()
	<-writing
	require.Empty(t, f.Reported(), "it is not durable yet")
	require.NoError(t, f.Put(t.Context(), of("v", 1)))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, f.Put(ended, of("u", 1)), context.Canceled)
	require.ErrorIs(t, f.Forget(ended, fence("u", 1), never), context.Canceled)
	var order []string
	gone := make(chan error, 1)
	go func() {
		gone <- f.ContainerGone("u", func() {
			order = f.reported()
		})
	}()
	close(release)
	require.NoError(t, <-put)
	require.NoError(t, <-gone)
	require.Equal(t, []string{"u-1", "v-1"}, order, "the tombstone is reported before the container is gone")
}

// TestConcurrentCalls puts and forgets the same few tombstones; at the end memory and disk agree.
func TestConcurrentCalls(t *testing.T) {
	path := t.TempDir()
	f := open(t, directory(t, path))
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 12 {
				uid, attempt := fmt.Sprint("u", i%3), int64(1+i%2)
				var err error
				switch worker % 3 {
				case 0:
					err = f.Put(context.Background(), of(uid, attempt))
				case 1:
					err = f.Forget(context.Background(), fence(uid, attempt), func() bool { return i%4 == 0 })
				default:
					err = f.ContainerGone(uid, func() {})
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for i := range 3 {
		require.NoError(t, f.ContainerGone(fmt.Sprint("u", i), func() {}))
	}
	require.Equal(t, f.reported(), open(t, directory(t, path)).reported())
}
