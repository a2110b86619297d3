package store_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = store.Key{Namespace: "ns", Name: "one"}

func report(uid string, state agentv1.SandboxState) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: state, ContainerId: uid + "-1", Record: &agentv1.SandboxRecord{
		Namespace: "ns", Name: "one", Fence: &agentv1.Fence{SandboxUid: uid, Attempt: 1, AgentUid: "a"}, RequestId: "r-" + uid,
		Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: "p"},
	}}
}

func record(uid string) *store.Record {
	r := report(uid, agentv1.SandboxState_SANDBOX_STATE_RUNNING)
	return &store.Record{Record: r.GetRecord(), Report: r}
}

func resource(uid, version string, phase v1alpha1.Phase) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "one", UID: types.UID("cr-" + uid), ResourceVersion: version,
			Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: uid}},
		Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "p"}, Status: v1alpha1.SandboxStatus{Phase: phase},
	}
	sb.SetAssignment(&v1alpha1.Assignment{AgentPod: "pod", AgentUID: "a", SandboxUID: uid, Attempt: 1})
	return sb
}

func newStore() *store.Store { return store.New(clocktesting.NewFakePassiveClock(time.Unix(1e9, 0))) }

func TestOverlay(t *testing.T) {
	const (
		creating = agentv1.SandboxState_SANDBOX_STATE_CREATING
		running  = agentv1.SandboxState_SANDBOX_STATE_RUNNING
		stopped  = agentv1.SandboxState_SANDBOX_STATE_STOPPED
		failed   = agentv1.SandboxState_SANDBOX_STATE_FAILED
	)
	tests := map[string]struct {
		phase  v1alpha1.Phase
		state  agentv1.SandboxState
		uid    string
		exit   int32
		phases sandboxv1.Phase
	}{
		"the report is ahead":            {v1alpha1.PhaseBound, running, "u", 0, sandboxv1.Phase_PHASE_RUNNING},
		"creating":                       {v1alpha1.PhasePending, creating, "u", 0, sandboxv1.Phase_PHASE_BOUND},
		"creating is older than running": {v1alpha1.PhaseRunning, creating, "u", 0, sandboxv1.Phase_PHASE_RUNNING},
		"ended well":                     {v1alpha1.PhaseRunning, stopped, "u", 0, sandboxv1.Phase_PHASE_RUNNING},
		"ended badly":                    {v1alpha1.PhaseRunning, stopped, "u", 3, sandboxv1.Phase_PHASE_FAILED},
		"failed, perhaps to be retried":  {v1alpha1.PhaseBound, failed, "u", 0, sandboxv1.Phase_PHASE_BOUND},
		"expired stays":                  {v1alpha1.PhaseExpired, running, "u", 0, sandboxv1.Phase_PHASE_EXPIRED},
		"report of another sandbox":      {v1alpha1.PhaseBound, running, "other", 0, sandboxv1.Phase_PHASE_BOUND},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			s.SetResource(resource("u", "5", test.phase))
			r := report(test.uid, test.state)
			if test.state == stopped {
				r.ExitCode = &test.exit
			}
			s.AgentSandboxes("a", []*agentv1.SandboxReport{r})
			item, ok := s.Get(key)
			require.True(t, ok)
			require.Equal(t, test.phases, item.Sandbox.GetStatus().GetPhase())
		})
	}
}

// A report without a start path leaves that of the resource.
func TestStartPathOfTheLatestReport(t *testing.T) {
	s := newStore()
	cr := resource("u", "5", v1alpha1.PhaseRunning)
	cr.Status.StartPath = v1alpha1.StartPathCold
	s.SetResource(cr)
	path := func() sandboxv1.StartPath {
		item, ok := s.Get(key)
		require.True(t, ok)
		return item.Sandbox.GetStatus().GetStartPath()
	}
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, path())
	r := report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)
	s.AgentSandboxes("a", []*agentv1.SandboxReport{r})
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, path())
	r = proto.CloneOf(r)
	r.StartPath = sandboxv1.StartPath_START_PATH_SLOT
	s.AgentSandboxes("a", []*agentv1.SandboxReport{r})
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, path())
}

func TestFastCreateLifecycle(t *testing.T) {
	s := newStore()
	s.AgentChanges("a", []*agentv1.SandboxReport{report("u", agentv1.SandboxState_SANDBOX_STATE_CREATING)})
	_, ok := s.Get(key)
	require.False(t, ok, "a create that is not acknowledged is not visible")
	item := s.SetRecord(record("u"))
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, item.Sandbox.GetStatus().GetPhase(), "the answer is newer than CREATING")
	s.SetResource(resource("u", "5", ""))
	item, _ = s.Get(key)
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, item.Sandbox.GetStatus().GetPhase())
	require.True(t, item.Sandbox.GetStatus().GetPersisted())
	s.SetResource(resource("u", "7", v1alpha1.PhaseRunning))
	s.SetResource(resource("u", "6", v1alpha1.PhaseBound))
	item, _ = s.Get(key)
	require.Equal(t, "7", item.Resource.ResourceVersion, "an older event changes nothing")
	s.MarkDeleting(key, "u")
	item, _ = s.Get(key)
	require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, item.Sandbox.GetStatus().GetPhase())
	s.RemoveResource(resource("u", "8", ""))
	_, ok = s.Get(key)
	require.False(t, ok)
	s.SetResource(resource("u", "7", v1alpha1.PhaseRunning))
	s.AgentChanges("a", []*agentv1.SandboxReport{report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)})
	_, ok = s.Get(key)
	require.False(t, ok, "a delayed report does not make it visible again")
	require.True(t, s.Gone(key, "u"))
}

func TestReportAloneAfterRestart(t *testing.T) {
	s := newStore()
	s.AgentSandboxes("a", []*agentv1.SandboxReport{report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)})
	item, ok := s.ByRequest("ns", "r-u")
	require.True(t, ok)
	require.Equal(t, "u", item.Sandbox.GetUid())
	persisted := report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)
	persisted.Persisted = true
	s.AgentChanges("a", []*agentv1.SandboxReport{persisted})
	_, ok = s.Get(key)
	require.False(t, ok, "a persisted one without its resource was deleted")
	s.AgentChanges("a", []*agentv1.SandboxReport{report("v", agentv1.SandboxState_SANDBOX_STATE_STOPPED)})
	require.Equal(t, 1, s.Len())
	s.AgentGone("a")
	require.Zero(t, s.Len())
	_, ok = s.ByRequest("ns", "r-v")
	require.False(t, ok)
}

func TestDelayedReportOfRemovedContainer(t *testing.T) {
	s := newStore()
	running := report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING)
	s.AgentChanges("a", []*agentv1.SandboxReport{running})
	require.Equal(t, 1, s.Len())
	s.SetContainerRemoved(running.GetRecord().GetFence())
	require.Zero(t, s.Len())
	s.AgentChanges("a", []*agentv1.SandboxReport{running})
	_, ok := s.ByRequest("ns", "r-u")
	require.False(t, ok)
	next := proto.CloneOf(running)
	next.Record.Fence.Attempt = 2
	s.AgentChanges("a", []*agentv1.SandboxReport{next})
	require.Equal(t, 1, s.Len(), "another attempt of the same sandbox")
}

func TestRequestTombstone(t *testing.T) {
	s := newStore()
	s.SetRecord(record("u"))
	require.False(t, s.RequestGone("ns", "r-u"))
	s.MarkGone(key, "u")
	require.True(t, s.RequestGone("ns", "r-u"))
	require.Zero(t, s.Len())
}

func TestWatchSlowAndFiltered(t *testing.T) {
	s := newStore()
	initial, w := s.Watch(store.Filter{Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_RUNNING}})
	require.Empty(t, initial)
	s.SetRecord(record("u"))
	require.Equal(t, sandboxv1.WatchSandboxesResponse_TYPE_ADDED, (<-w.Events()).GetType())
	s.MarkDeleting(key, "u")
	e := <-w.Events()
	require.Equal(t, sandboxv1.WatchSandboxesResponse_TYPE_DELETED, e.GetType(), "it left the phases")
	require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, e.GetSandbox().GetStatus().GetPhase())
	for i := range 3000 {
		r := record(fmt.Sprint("u", i))
		r.Record.Name = fmt.Sprint("n", i)
		s.SetRecord(r)
	}
	n := 0
	for range w.Events() {
		n++
	}
	require.Less(t, n, 3000, "a watcher that does not read is ended")
	w.Close()
}

func TestListPages(t *testing.T) {
	s := newStore()
	for _, n := range []string{"b", "a-b", "a", "c"} {
		for _, ns := range []string{"x", "x-y"} {
			r := record(ns + n)
			r.Record.Namespace, r.Record.Name = ns, n
			s.SetRecord(r)
		}
	}
	var got []string
	for token := ""; ; {
		page, next, err := s.List(store.Filter{}, 3, token)
		require.NoError(t, err)
		require.LessOrEqual(t, len(page), 3)
		for _, sb := range page {
			got = append(got, sb.GetNamespace()+"/"+sb.GetName())
		}
		if token = next; token == "" {
			break
		}
		s.MarkGone(store.Key{Namespace: "x", Name: "a"}, "xa") // what goes between pages shifts nothing
	}
	require.Equal(t, []string{"x/a", "x/a-b", "x/b", "x/c", "x-y/a", "x-y/a-b", "x-y/b", "x-y/c"}, got)
}

// A token that was cut off or changed on its way is refused, and not taken for another one.
func TestDamagedPageTokens(t *testing.T) {
	s := newStore()
	for _, n := range []string{"a-b", "b"} {
		r := record(n)
		r.Record.Name = n
		s.SetRecord(r)
	}
	_, token, err := s.List(store.Filter{}, 1, "")
	require.NoError(t, err)
	_, _, err = s.List(store.Filter{}, 1, token)
	require.NoError(t, err)
	for _, damaged := range []string{token[:len(token)-1], token + "\n", token[:3] + "\r\n" + token[3:], token + "=", "x"} {
		_, _, err := s.List(store.Filter{}, 1, damaged)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err), "%q", damaged)
	}
}

// A list examines many sandboxes between two that match, and ends with its namespace.
func TestListOfRareSandboxes(t *testing.T) {
	s := newStore()
	const n = 2500
	for i := range n {
		r := record(fmt.Sprintf("u%04d", i))
		r.Record.Name = fmt.Sprintf("n%04d", i)
		if i%1000 == 0 {
			r.Record.Spec.Pool = "rare"
		}
		s.SetRecord(r)
	}
	other := record("elsewhere")
	other.Record.Namespace = "zz"
	s.SetRecord(other)
	for size, pages := range map[int]int{1: 3, 2: 2, 3: 1, 100: 1} {
		var got []string
		token, count := "", 0
		for ; count == 0 || token != ""; count++ {
			page, next, err := s.List(store.Filter{Namespace: "ns", Pool: "rare"}, size, token)
			require.NoError(t, err)
			for _, sb := range page {
				got = append(got, sb.GetName())
			}
			token = next
		}
		require.Equal(t, []string{"n0000", "n1000", "n2000"}, got)
		require.Equal(t, pages, count, "pages of %d", size)
	}
	all, next, err := s.List(store.Filter{Namespace: "ns", Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_RUNNING}}, n, "")
	require.NoError(t, err)
	require.Len(t, all, n)
	require.Empty(t, next)
}
