package persistence_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

// agents is one agent, whose marks fail as scripted.
type agents struct {
	agentv1.AgentServiceClient // what is not used is nil

	mu     sync.Mutex
	script []error
	marks  []*agentv1.Fence
	gone   bool
}

func (a *agents) Client(string) (agentv1.AgentServiceClient, bool) { return a, true }

func (a *agents) Gone(string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gone
}

func (a *agents) marked() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.marks)
}

func (a *agents) MarkPersisted(_ context.Context, req *agentv1.MarkPersistedRequest, _ ...grpc.CallOption) (*agentv1.MarkPersistedResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.marks = append(a.marks, req.GetFence())
	if len(a.script) == 0 {
		return &agentv1.MarkPersistedResponse{}, nil
	}
	err := a.script[0]
	a.script = a.script[1:]
	return nil, rpc.ToStatus(err)
}

type fixture struct {
	tracker  *persistence.Tracker
	config   persistence.Config
	agents   *agents
	store    *store.Store
	api      *fakeapi.Server
	follows  atomic.Bool // another process leads
	rejected chan *agentv1.Fence
}

// start returns a tracker whose creates of custom resources wait for the gate, if there is one.
func start(t *testing.T, gate chan struct{}, marks ...error) *fixture {
	t.Helper()
	f := &fixture{agents: &agents{script: marks}, store: store.New(clock.RealClock{}), api: fakeapi.New(t), rejected: make(chan *agentv1.Fence, 1)}
	f.api.Before(func(verb fakeapi.Verb, _ client.Object) error {
		if verb == fakeapi.Create && gate != nil {
			<-gate
		}
		return nil
	})
	set := tasks.New()
	f.config = persistence.Config{
		API: apiserver.New(f.api, clock.RealClock{}), Agents: f.agents, Store: f.store, Tasks: set, Clock: clock.RealClock{}, Limit: 2,
		Leads: func() bool { return !f.follows.Load() }, Confirm: func(context.Context) (bool, error) { return !f.follows.Load(), nil }, Creating: func() bool { return false }, Rejected: func(fence *agentv1.Fence) { f.rejected <- fence },
	}
	f.tracker = persistence.New(f.config)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return f
}

// useEvents replaces the tracker by one that records Events.
func (f *fixture) useEvents(e persistence.Events) {
	f.config.Events = e
	f.tracker = persistence.New(f.config)
}

// fail has the API server refuse creates.
func (f *fixture) fail(err error) {
	f.api.Before(func(verb fakeapi.Verb, _ client.Object) error {
		if verb == fakeapi.Create {
			return err
		}
		return nil
	})
}

func (f *fixture) persist(t *testing.T) *store.Record { t.Helper(); return f.persistAs(t, true) }

func (f *fixture) persistAs(t *testing.T, ours bool) *store.Record {
	t.Helper()
	r := &store.Record{Record: record(), Report: &agentv1.SandboxReport{}, AgentPod: "pod-a", NodeName: "node"}
	require.NoError(t, f.tracker.Admit())
	f.store.SetRecord(r)
	f.tracker.Persist(r, ours)
	return r
}

func (f *fixture) resource() *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{}
	if err := f.api.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: "one"}, sb); err != nil {
		return nil
	}
	return sb
}

func TestPersistWritesAndMarks(t *testing.T) {
	unavailable := fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "later")
	tests := map[string]struct {
		script []error
		marks  int
	}{
		"at once":            {nil, 1},
		"after a failure":    {[]error{unavailable}, 2},
		"it is gone":         {[]error{fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "gone")}, 1},
		"another's by fence": {[]error{fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "no")}, 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			f := start(t, nil, test.script...)
			f.persist(t)
			require.Eventually(t, func() bool { return f.agents.marked() == test.marks && !f.tracker.Owns("u") }, testkit.Timeout, testkit.Tick)
			require.Equal(t, "u", f.resource().EffectiveUID())
			require.Zero(t, f.tracker.Pending())
			item, ok := f.store.Get(store.Key{Namespace: "ns", Name: "one"})
			require.True(t, ok)
			require.NotNil(t, item.Resource)
		})
	}
}

func TestStoppedWriteIsTheCallers(t *testing.T) {
	gate := make(chan struct{})
	f := start(t, gate)
	f.persist(t)
	job, ok := f.tracker.Writing("u")
	require.True(t, ok)
	require.True(t, job.Ours)
	require.True(t, f.tracker.Owns("u"))
	close(gate) // a call that is under way is awaited
	outcome, there, err := job.Stop(t.Context())
	require.NoError(t, err)
	switch outcome {
	case writer.Landed:
		require.Equal(t, "u", there.EffectiveUID())
	case writer.NotWritten:
		require.Nil(t, f.resource())
	default:
		require.Fail(t, "unexpected outcome", outcome)
	}
}

func TestConflictingNameRejectsTheSandbox(t *testing.T) {
	f := start(t, nil)
	f.createTheirs(t)
	f.persist(t)
	fence := <-f.rejected
	require.Equal(t, "u", fence.GetSandboxUid())
	require.True(t, f.store.Gone(store.Key{Namespace: "ns", Name: "one"}, "u"))
	require.Zero(t, f.agents.marked())
	require.NotEqual(t, "u", f.resource().EffectiveUID())
}

func TestPendingWritesAreBounded(t *testing.T) {
	f := start(t, nil)
	require.NoError(t, f.tracker.Admit())
	require.NoError(t, f.tracker.Admit())
	require.Equal(t, fault.Overloaded, fault.ReasonOf(f.tracker.Admit()))
	f.tracker.AdmitAlways()
	require.EqualValues(t, 3, f.tracker.Pending())
	for range 3 {
		f.tracker.Abandon()
	}
	require.NoError(t, f.tracker.Admit())
}
