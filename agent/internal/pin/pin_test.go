package pin_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/pin"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	pulling = agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING
	ready   = agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY
	failed  = agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED

	local  = "docker.io/library/local:1"
	remote = "docker.io/library/remote:1"
	other  = "docker.io/library/other:1"
)

// fixture is a Keeper above a fake runtime, with the last state that it published.
type fixture struct {
	*pin.Keeper

	runtime *fake.Runtime
	clock   *clocktesting.FakeClock
	files   *files
	stop    func()

	mu    sync.Mutex
	state []*agentv1.PinnedImage
}

// files fails writes while broken.
type files struct {
	*state.Dir

	broken atomic.Bool
}

func (f *files) Write(name string, data []byte) error {
	if f.broken.Load() {
		return errors.New("no space left on device")
	}
	return f.Dir.Write(name, data)
}

func newRuntime() *fake.Runtime {
	return fake.New(map[string]fake.Image{local: {Local: true}, remote: {}, other: {}})
}

// start runs a Keeper until the test ends or stop is called.
func start(t *testing.T, rt *fake.Runtime, path string) *fixture {
	t.Helper()
	dir, err := state.Open(path)
	require.NoError(t, err)
	f := &fixture{runtime: rt, clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), files: &files{Dir: dir}}
	f.Keeper, err = pin.Open(pin.Config{Runtime: rt, Files: f.files, Clock: f.clock, Publish: func(s []*agentv1.PinnedImage) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.state = s
	}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(f.stop)
	return f
}

func (f *fixture) images() []*agentv1.PinnedImage {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

func (f *fixture) states() []agentv1.PinnedImageState {
	var out []agentv1.PinnedImageState
	for _, i := range f.images() {
		out = append(out, i.GetState())
	}
	return out
}

func (f *fixture) requireStates(t *testing.T, want ...agentv1.PinnedImageState) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) { assert.Equal(c, want, f.states()) }, testkit.Timeout, testkit.Tick)
}

func TestListedImagesArePulledAndProtected(t *testing.T) {
	f := start(t, newRuntime(), t.TempDir())
	require.NoError(t, f.Set([]string{"remote:1", "local:1", "remote:1"}))
	f.requireStates(t, ready, ready)
	require.Equal(t, "remote:1", f.images()[0].GetImage(), "as listed, in the order of the list")
	require.Equal(t, []string{remote, local}, f.runtime.Pinned())
	require.NoError(t, f.Set([]string{"local:1"}))
	f.requireStates(t, ready)
	require.Eventually(t, func() bool { return len(f.runtime.Pinned()) == 1 }, testkit.Timeout, testkit.Tick)
	require.NoError(t, f.Set(nil))
	f.requireStates(t)
	require.Eventually(t, func() bool { return len(f.runtime.Pinned()) == 0 }, testkit.Timeout, testkit.Tick)
}

func TestListSurvivesRestart(t *testing.T) {
	rt, path := newRuntime(), t.TempDir()
	f := start(t, rt, path)
	require.NoError(t, f.Set([]string{"remote:1", "other:1"}))
	f.requireStates(t, ready, ready)
	f.stop()
	f = start(t, rt, path)
	f.requireStates(t, ready, ready)
	require.Equal(t, []string{remote, other}, rt.Pinned())
}

// TestSetDoesNotWaitForPulls holds the pull of one image up; others are pulled, and the list can be replaced.
func TestSetDoesNotWaitForPulls(t *testing.T) {
	rt := newRuntime()
	held, canceled := make(chan struct{}), make(chan struct{})
	rt.Hook(func(ctx context.Context, op fake.Op, id string) error {
		if op == fake.OpImage && id == remote {
			close(held)
			<-ctx.Done()
			close(canceled)
			return ctx.Err()
		}
		return nil
	})
	f := start(t, rt, t.TempDir())
	require.NoError(t, f.Set([]string{"remote:1", "other:1"}))
	<-held
	f.requireStates(t, pulling, ready)
	require.NoError(t, f.Set([]string{"other:1"}))
	<-canceled
	f.requireStates(t, ready)
}

func TestFailedPullIsRetriedWithBackoff(t *testing.T) {
	rt := newRuntime()
	rt.SetImage(remote, fake.Image{Away: true})
	var pulls atomic.Int32
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpImage {
			pulls.Add(1)
		}
		return nil
	})
	f := start(t, rt, t.TempDir())
	require.NoError(t, f.Set([]string{"remote:1", "not a reference"}))
	f.requireStates(t, failed, failed)
	require.Contains(t, f.images()[0].GetMessage(), "could not be pulled")
	require.NotEmpty(t, f.images()[1].GetMessage())
	require.Eventually(t, f.clock.HasWaiters, testkit.Timeout, testkit.Tick)
	require.Equal(t, int32(1), pulls.Load(), "it waits before it pulls again")
	for n := range int32(3) {
		require.Eventually(t, func() bool {
			f.clock.Step(100 * time.Millisecond)
			return pulls.Load() == n+2
		}, testkit.Timeout, testkit.Tick)
	}
	rt.SetImage(remote, fake.Image{})
	require.Eventually(t, func() bool {
		f.clock.Step(time.Second)
		return f.states()[0] == ready
	}, testkit.Timeout, testkit.Tick)
	require.Empty(t, f.images()[0].GetMessage())
	require.Equal(t, failed, f.states()[1], "an invalid reference stays failed")
}

func TestImageThatIsGoneIsPulledAgain(t *testing.T) {
	rt := newRuntime()
	f := start(t, rt, t.TempDir())
	require.NoError(t, f.Set([]string{"local:1"}))
	f.requireStates(t, ready)
	held, release := make(chan struct{}), make(chan struct{})
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpImage {
			close(held)
			<-release
		}
		return nil
	})
	rt.SetImage(local, fake.Image{})
	require.Eventually(t, f.clock.HasWaiters, testkit.Timeout, testkit.Tick)
	f.clock.Step(30 * time.Second)
	<-held
	f.requireStates(t, pulling)
	close(release)
	f.requireStates(t, ready)
}

func TestRuntimeOutageIsWaitedOut(t *testing.T) {
	rt := newRuntime()
	var away atomic.Bool
	away.Store(true)
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpPin && away.Load() {
			return errors.New("containerd is away")
		}
		return nil
	})
	f := start(t, rt, t.TempDir())
	require.NoError(t, f.Set([]string{"local:1"}))
	require.Eventually(t, f.clock.HasWaiters, testkit.Timeout, testkit.Tick)
	f.requireStates(t, pulling)
	away.Store(false)
	require.Eventually(t, func() bool { f.clock.Step(time.Second); return f.states()[0] == ready }, testkit.Timeout, testkit.Tick)
}

func TestListThatCannotBeWrittenIsNotInForce(t *testing.T) {
	f := start(t, newRuntime(), t.TempDir())
	require.NoError(t, f.Set([]string{"local:1"}))
	f.files.broken.Store(true)
	err := f.Set([]string{"remote:1"})
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
	require.Equal(t, "local:1", f.images()[0].GetImage())
}

func TestDamagedListFailsStart(t *testing.T) {
	dir, err := state.Open(t.TempDir())
	require.NoError(t, err)
	require.NoError(t, dir.Write("pinned-images", []byte("[\"half")))
	_, err = pin.Open(pin.Config{Runtime: newRuntime(), Files: dir})
	require.ErrorContains(t, err, "pinned images")
}

// TestPullsAreBounded lists five images whose pulls block: two pulls run at a time, and the others follow.
func TestPullsAreBounded(t *testing.T) {
	images := map[string]fake.Image{}
	var refs []string
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		images["docker.io/library/"+name+":1"] = fake.Image{}
		refs = append(refs, name+":1")
	}
	rt := fake.New(images)
	begun, release := make(chan struct{}, len(refs)), make(chan struct{})
	var running, most atomic.Int32
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op != fake.OpImage {
			return nil
		}
		n := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		begun <- struct{}{}
		<-release
		return nil
	})
	f := start(t, rt, t.TempDir())
	require.NoError(t, f.Set(refs))
	<-begun
	<-begun
	close(release)
	f.requireStates(t, ready, ready, ready, ready, ready)
	require.Equal(t, int32(2), most.Load())
}

// TestReplacedListKeepsStates replaces a list by one that shares an image with it, in another order.
func TestReplacedListKeepsStates(t *testing.T) {
	rt := newRuntime()
	f := start(t, rt, t.TempDir())
	require.NoError(t, f.Set([]string{"local:1", "remote:1"}))
	f.requireStates(t, ready, ready)
	held := make(chan struct{})
	rt.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op == fake.OpImage {
			close(held)
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	require.NoError(t, f.Set([]string{"other:1", "local:1"}))
	<-held
	require.Equal(t, []agentv1.PinnedImageState{pulling, ready}, f.states())
	f.stop() // ends the pull that is blocked
	require.Equal(t, pulling, f.states()[0], "a stopped pull is not a failed one")
}
