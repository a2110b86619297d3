package leader_test

import (
	"context"
	"errors"
	"flag"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	coordv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) {
	quiet := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(quiet)
	_ = quiet.Set("logtostderr", "false")
	_ = quiet.Set("stderrthreshold", "FATAL")
	klog.SetOutput(discard{})
	goleak.VerifyTestMain(m)
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

const (
	wait = testkit.Timeout
	tick = testkit.Tick
)

var leases = schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}

// server keeps one Lease as an API server does: with resource versions and conflicts.
type server struct {
	mu      sync.Mutex
	lease   *coordv1.Lease
	version int
	down    bool
}

// view is the server as one client reaches it.
type view struct {
	coordinationv1.LeaseInterface // what is not used is nil
	server                        *server

	mu  sync.Mutex
	cut bool
	// lost has the next write land and its answer be lost.
	lost bool
}

func (v *view) Leases(string) coordinationv1.LeaseInterface { return v }

func (v *view) set(cut bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cut = cut
}

func (v *view) reach() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.server.mu.Lock()
	defer v.server.mu.Unlock()
	if v.cut || v.server.down {
		return errors.New("connection refused")
	}
	return nil
}

func (v *view) Get(_ context.Context, name string, _ metav1.GetOptions) (*coordv1.Lease, error) {
	if err := v.reach(); err != nil {
		return nil, err
	}
	v.server.mu.Lock()
	defer v.server.mu.Unlock()
	if v.server.lease == nil {
		return nil, apierrors.NewNotFound(leases, name)
	}
	return v.server.lease.DeepCopy(), nil
}

func (v *view) Create(_ context.Context, l *coordv1.Lease, _ metav1.CreateOptions) (*coordv1.Lease, error) {
	return v.write(l, func(there *coordv1.Lease) error {
		if there != nil {
			return apierrors.NewAlreadyExists(leases, l.Name)
		}
		return nil
	})
}

func (v *view) Update(_ context.Context, l *coordv1.Lease, _ metav1.UpdateOptions) (*coordv1.Lease, error) {
	return v.write(l, func(there *coordv1.Lease) error {
		switch {
		case there == nil:
			return apierrors.NewNotFound(leases, l.Name)
		case there.ResourceVersion != l.ResourceVersion:
			return apierrors.NewConflict(leases, l.Name, errors.New("it was changed"))
		}
		return nil
	})
}

func (v *view) write(l *coordv1.Lease, check func(there *coordv1.Lease) error) (*coordv1.Lease, error) {
	if err := v.reach(); err != nil {
		return nil, err
	}
	v.server.mu.Lock()
	defer v.server.mu.Unlock()
	if err := check(v.server.lease); err != nil {
		return nil, err
	}
	v.server.version++
	v.server.lease = l.DeepCopy()
	v.server.lease.ResourceVersion = strconv.Itoa(v.server.version)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.lost {
		v.lost = false
		return nil, errors.New("the answer was lost")
	}
	return v.server.lease.DeepCopy(), nil
}

func (s *server) delete() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lease = nil
}

// versions returns the number of writes.
func (s *server) versions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

func (s *server) get() *coordv1.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lease.DeepCopy()
}

// process is one that takes part.
type process struct {
	*leader.Elector
	view  *view
	ended chan error
	stop  context.CancelFunc
}

var timing = leader.Timing{LeaseDuration: time.Second, RenewDeadline: 600 * time.Millisecond, RetryPeriod: 50 * time.Millisecond}

func start(t *testing.T, s *server, identity string) *process {
	t.Helper()
	v := &view{server: s}
	p := &process{view: v, ended: make(chan error, 1), Elector: leader.New(leader.Config{
		Leases: v, Namespace: "ns", Name: "lease", Identity: identity,
		Timing: timing,
	})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.ended <- p.Run(ctx)
	}()
	p.stop = func() { cancel(); <-done }
	t.Cleanup(p.stop)
	return p
}

func (p *process) leads() bool { return p.Term() > 0 }

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, wait, tick, what)
}

func TestTheNextLeaderHasAHigherTerm(t *testing.T) {
	s := &server{}
	a := start(t, s, "a")
	eventually(t, "a leads", a.leads)
	require.EqualValues(t, 1, a.Term())
	b := start(t, s, "b")
	eventually(t, "b knows who leads", func() bool { state, _ := b.State(); return state.Holder == "a" })
	require.Zero(t, b.Term())
	a.stop()
	require.NoError(t, <-a.ended)
	require.Zero(t, a.Term(), "who gave the Lease up carries its term no more")
	eventually(t, "b leads", b.leads)
	require.EqualValues(t, 2, b.Term())
}

func TestALeaderLeadsOnWhileTheAPIServerIsAway(t *testing.T) {
	inBubble(testALeaderLeadsOnWhileTheAPIServerIsAway)(t)
}

func testALeaderLeadsOnWhileTheAPIServerIsAway(t *testing.T) {
	s := &server{}
	a, b := start(t, s, "a"), (*process)(nil)
	eventually(t, "a leads", a.leads)
	b = start(t, s, "b")
	s.mu.Lock()
	s.down = true
	s.mu.Unlock()
	<-time.After(time.Hour) // longer than the Lease lasts
	require.True(t, a.leads())
	require.False(t, b.leads())
	s.mu.Lock()
	s.down = false
	s.mu.Unlock()
	// Either may be first to write it now; there is one leader in the end, and the former one has ended.
	eventually(t, "one leads", func() bool {
		holder := *s.get().Spec.HolderIdentity
		return holder == "a" && a.leads() && !b.leads() || holder == "b" && b.leads() && !a.leads() && len(a.ended) == 1
	})
}

func TestLeaderEndsWhenItLosesLeadership(t *testing.T) {
	s := &server{}
	a := start(t, s, "a")
	eventually(t, "a leads", a.leads)
	b := start(t, s, "b")
	a.view.set(true)
	eventually(t, "b leads", b.leads)
	require.EqualValues(t, 1, a.Term(), "a cannot know")
	require.EqualValues(t, 2, b.Term())
	a.view.set(false)
	require.ErrorIs(t, <-a.ended, leader.ErrLeadershipLost)
	require.Zero(t, a.Term())
	state, _ := a.State()
	require.True(t, state.Lost)
	require.Equal(t, "b", state.Holder)
	require.True(t, b.leads())
}

// TestInherit: a process that is started again releases the Lease of its run before, and of no other. Another process then leads
// long before the Lease would have expired.
func TestInherit(t *testing.T) {
	for name, test := range map[string]struct {
		holder string
		led    bool
	}{"its own": {"a-1", true}, "another's": {"c-1", false}} {
		t.Run(name, inBubble(func(t *testing.T) {
			s := &server{}
			dead := start(t, s, test.holder)
			eventually(t, "it leads", dead.leads)
			b := start(t, s, "b")
			dead.view.set(true) // the process is killed
			again := leader.New(leader.Config{Leases: &view{server: s}, Namespace: "ns", Name: "lease", Identity: "a-2", Timing: timing})
			again.Inherit(t.Context(), func(holder string) bool { return holder == "a-1" })
			<-time.After(timing.LeaseDuration / 2)
			require.Equal(t, test.led, b.leads())
		}))
	}
}

// TestEnded: a standby that knows that the leader has ended leads long before the Lease expires, and then renews as any leader does. A
// leader that still renews keeps the Lease, even if it is reported to have ended.
func TestEnded(t *testing.T) {
	const vacant = time.Second / 4 // a quarter of timing.LeaseDuration
	begin := func(t *testing.T) (s *server, a, b *process) {
		s = &server{}
		a = start(t, s, "a")
		eventually(t, "a leads", a.leads)
		b = start(t, s, "b")
		eventually(t, "b knows who leads", func() bool { state, _ := b.State(); return state.Holder == "a" })
		return s, a, b
	}
	// say repeats the report to the standby for a while.
	say := func(b *process, holder string, d time.Duration) {
		for range d / tick {
			b.Ended(holder)
			<-time.After(tick)
		}
	}
	t.Run("it has", inBubble(func(t *testing.T) {
		s, a, b := begin(t)
		a.view.set(true) // it is killed
		say(b, "a", vacant-tick)
		require.Zero(t, b.Term(), "a may be certain that it leads until now")
		say(b, "a", vacant/2)
		require.EqualValues(t, 2, b.Term())
		version := s.versions()
		<-time.After(time.Second)
		renewed := s.versions() - version
		require.InDelta(t, int(time.Second/timing.RetryPeriod), renewed, 3, "it renews at the usual interval")
	}))
	t.Run("it has not", inBubble(func(t *testing.T) {
		_, a, b := begin(t)
		say(b, "a", 4*time.Second)
		require.True(t, a.leads())
		require.Zero(t, b.Term())
	}))
	t.Run("another has", inBubble(func(t *testing.T) {
		_, a, b := begin(t)
		a.view.set(true)
		say(b, "c", timing.LeaseDuration/2)
		require.Zero(t, b.Term())
	}))
	t.Run("no longer", inBubble(func(t *testing.T) {
		_, a, b := begin(t)
		b.Ended("a")
		<-time.After(2 * vacant)
		a.view.set(true)
		<-time.After(timing.LeaseDuration / 2)
		require.Zero(t, b.Term(), "what was true once is no evidence")
	}))
}

func TestConfirm(t *testing.T) {
	s := &server{}
	a := start(t, s, "a")
	eventually(t, "a leads", a.leads)
	b := start(t, s, "b")
	sure, err := b.Confirm(t.Context())
	require.NoError(t, err)
	require.False(t, sure, "a standby")
	a.view.set(true)
	eventually(t, "b leads", b.leads)
	require.True(t, a.leads(), "a cannot know")
	_, err = a.Confirm(t.Context())
	require.Error(t, err, "its last write of the Lease is too old, and it cannot ask")
	sure, err = leader.Confirm(t.Context(), a.Elector, time.Hour)
	require.NoError(t, err)
	require.True(t, sure, "the API server is not asked while the last write is recent")
	a.view.set(false)
	sure, err = a.Confirm(t.Context())
	require.NoError(t, err)
	require.False(t, sure)
	sure, err = leader.Confirm(t.Context(), b.Elector, 0)
	require.NoError(t, err)
	require.True(t, sure, "it asked")
}

func TestSuperseded(t *testing.T) {
	t.Run("the Lease is still ours", func(t *testing.T) {
		a := start(t, &server{}, "a")
		eventually(t, "a leads", a.leads)
		_, changed := a.State()
		a.Superseded(7)
		require.Zero(t, a.Term(), "it is suspended")
		<-changed
		eventually(t, "it leads under a higher term", a.leads)
		require.EqualValues(t, 8, a.Term())
		a.Superseded(7)
		require.EqualValues(t, 8, a.Term(), "a late answer changes nothing")
	})
	t.Run("the Lease is another's", inBubble(func(t *testing.T) {
		s := &server{}
		a := start(t, s, "a")
		eventually(t, "a leads", a.leads)
		b := start(t, s, "b")
		a.view.set(true)
		eventually(t, "b leads", b.leads)
		a.Superseded(b.Term())
		<-time.After(time.Hour)
		require.False(t, a.leads(), "it cannot ask, and does not lead")
		a.view.set(false)
		require.ErrorIs(t, <-a.ended, leader.ErrLeadershipLost)
	}))
}

// inBubble runs a test on the clock of a synctest bubble: time passes only while everything waits.
func inBubble(test func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) { synctest.Test(t, test) }
}

func TestADeletedLease(t *testing.T) {
	t.Run("the leader writes it again and keeps its term", func(t *testing.T) {
		s := &server{}
		first := start(t, s, "first")
		eventually(t, "first leads", first.leads)
		first.stop()
		a := start(t, s, "a")
		eventually(t, "a leads", a.leads)
		require.EqualValues(t, 2, a.Term())
		s.delete()
		eventually(t, "it is back", func() bool { l := s.get(); return l != nil && *l.Spec.HolderIdentity == "a" })
		eventually(t, "a leads", a.leads)
		require.EqualValues(t, 2, a.Term())
		require.EqualValues(t, 1, *s.get().Spec.LeaseTransitions)
	})
	t.Run("a standby that saw it counts on", func(t *testing.T) {
		s := &server{}
		a := start(t, s, "a")
		eventually(t, "a leads", a.leads)
		a.Superseded(4)
		eventually(t, "a leads again", a.leads)
		b := start(t, s, "b")
		eventually(t, "b knows who leads", func() bool { state, _ := b.State(); return state.Holder == "a" })
		a.view.set(true)
		a.stop()
		s.delete()
		eventually(t, "b leads", b.leads)
		require.EqualValues(t, 6, b.Term())
	})
}

func TestAnElectionWhoseAnswerWasLost(t *testing.T) {
	s := &server{}
	v := &view{server: s, lost: true}
	lock := leader.NewLock(&resourcelock.LeaseLock{
		LeaseMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lease"}, Client: v, LockConfig: resourcelock.ResourceLockConfig{Identity: "a"},
	}, time.Second)
	record := resourcelock.LeaderElectionRecord{HolderIdentity: "a", LeaseDurationSeconds: 1}
	require.Error(t, lock.Create(t.Context(), record))
	require.Zero(t, lock.Term(), "it does not know that it leads")
	got, _, err := lock.Get(t.Context())
	require.NoError(t, err)
	require.Equal(t, "a", got.HolderIdentity)
	require.Zero(t, lock.Term(), "only what it wrote itself, and knows to have written, makes it lead")
	require.NoError(t, lock.Update(t.Context(), *got))
	require.EqualValues(t, 1, lock.Term())
}

func TestTimingNamesEveryProblem(t *testing.T) {
	require.Empty(t, leader.DefaultTiming().Validate())
	require.Len(t, leader.Timing{}.Validate(), 3)
	require.Len(t, leader.Timing{LeaseDuration: 5 * time.Second, RenewDeadline: 4 * time.Second, RetryPeriod: 3500 * time.Millisecond}.Validate(), 1)
}
