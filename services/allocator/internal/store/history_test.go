package store_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/labels"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// follower applies the events of a watch to what the watch began with.
type follower struct {
	filter store.Filter
	watch  *store.Watch
	seen   map[string]*sandboxv1.Sandbox
}

func follow(s *store.Store, f store.Filter) *follower {
	initial, w := s.Watch(f)
	return &follower{filter: f, watch: w, seen: byName(initial)}
}

func byName(all []*sandboxv1.Sandbox) map[string]*sandboxv1.Sandbox {
	named := map[string]*sandboxv1.Sandbox{}
	for _, sb := range all {
		named[sb.GetNamespace()+"/"+sb.GetName()] = sb
	}
	return named
}

// check applies the events that have arrived, each of which must make sense, and compares the result with a list.
func (f *follower) check(t *rapid.T, s *store.Store) {
	for len(f.watch.Events()) > 0 {
		e := <-f.watch.Events()
		key := e.GetSandbox().GetNamespace() + "/" + e.GetSandbox().GetName()
		before, known := f.seen[key]
		switch e.GetType() {
		case sandboxv1.WatchSandboxesResponse_TYPE_ADDED:
			require.False(t, known, "%s was added twice", key)
			f.seen[key] = e.GetSandbox()
		case sandboxv1.WatchSandboxesResponse_TYPE_MODIFIED:
			require.True(t, known, "%s was not added", key)
			require.Equal(t, before.GetUid(), e.GetSandbox().GetUid(), "another sandbox of the name is added after the first is deleted")
			require.False(t, proto.Equal(before, e.GetSandbox()), "an event changes something")
			f.seen[key] = e.GetSandbox()
		default:
			require.True(t, known, "%s was not added", key)
			delete(f.seen, key)
		}
	}
	want, next, err := s.List(f.filter, 1000, "")
	require.NoError(t, err)
	require.Empty(t, next)
	require.Len(t, f.seen, len(want))
	for key, sb := range byName(want) {
		require.True(t, proto.Equal(sb, f.seen[key]), "%s is %v, and was watched as %v", key, sb, f.seen[key])
	}
}

// counter is a store.Counter.
type counter map[string][]string // uids in the order in which they were shown, by namespace

func (c counter) Shown(namespace, uid string) { c[namespace] = append(c[namespace], uid) }

func (c counter) Hidden(namespace string) {
	c["hidden in "+namespace] = append(c["hidden in "+namespace], "")
}

// visible returns how many are.
func (c counter) visible(namespace string) int {
	return len(c[namespace]) - len(c["hidden in "+namespace])
}

// history draws what sources of a store send, with few names and uids, so that they collide.
type history struct {
	store   *store.Store
	version int
	gone    map[string]bool // uids that were deleted
}

func (h *history) uid(t *rapid.T) string {
	return rapid.SampledFrom([]string{"u1", "u2", "u3"}).Draw(t, "uid")
}

// key returns the name of a uid: two of them share one.
func (h *history) key(uid string) store.Key {
	return store.Key{Namespace: "ns", Name: map[string]string{"u1": "one", "u2": "one", "u3": "two"}[uid]}
}

func (h *history) report(t *rapid.T) *agentv1.SandboxReport {
	uid := h.uid(t)
	r := report(uid, rapid.SampledFrom([]agentv1.SandboxState{
		agentv1.SandboxState_SANDBOX_STATE_CREATING, agentv1.SandboxState_SANDBOX_STATE_RUNNING, agentv1.SandboxState_SANDBOX_STATE_STOPPED,
		agentv1.SandboxState_SANDBOX_STATE_FAILED, agentv1.SandboxState_SANDBOX_STATE_TERMINATED,
	}).Draw(t, "state"))
	r.Record.Name = h.key(uid).Name
	r.Record.Fence.Attempt = rapid.Int64Range(1, 2).Draw(t, "attempt")
	r.Persisted = rapid.Bool().Draw(t, "persisted")
	return r
}

func (h *history) resource(t *rapid.T) *v1alpha1.Sandbox {
	uid := h.uid(t)
	h.version++
	version := h.version
	if rapid.IntRange(0, 3).Draw(t, "stale") == 0 {
		version = rapid.IntRange(1, h.version).Draw(t, "version")
	}
	sb := resource(uid, fmt.Sprint(version), rapid.SampledFrom([]v1alpha1.Phase{"", v1alpha1.PhaseBound, v1alpha1.PhaseRunning, v1alpha1.PhaseFailed}).Draw(t, "phase"))
	sb.Name = h.key(uid).Name
	sb.Annotations[v1alpha1.AnnotationRequestID] = "r-" + uid
	return sb
}

func (h *history) tombstone(t *rapid.T) *agentv1.Tombstone {
	uid := h.uid(t)
	return &agentv1.Tombstone{Namespace: "ns", Name: h.key(uid).Name, RequestId: "r-" + uid, DeleteRequestId: "d-" + uid, Fence: &agentv1.Fence{
		SandboxUid: uid, Attempt: rapid.Int64Range(1, 2).Draw(t, "attempt"), AgentUid: "a",
	}}
}

// TestHistories: after every history of what the informer, creates, deletes and agents send, the ways to read a store agree, a
// watch adds up to a list, and a deleted sandbox never comes back.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newStore()
		h := &history{store: s, gone: map[string]bool{}}
		counted := counter{}
		s.CountIn(counted)
		watches := []*follower{
			follow(s, store.Filter{}), follow(s, store.Filter{Namespace: "ns", Name: "one"}),
			follow(s, store.Filter{Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_RUNNING}}), follow(s, store.Filter{Pool: "other"}),
		}
		t.Repeat(map[string]func(*rapid.T){
			"resource": func(t *rapid.T) { s.SetResource(h.resource(t)) },
			"resource removed": func(t *rapid.T) {
				sb := h.resource(t)
				s.RemoveResource(sb)
				h.gone[sb.EffectiveUID()] = true
			},
			"record": func(t *rapid.T) {
				uid := h.uid(t)
				if s.Gone(h.key(uid), uid) {
					return // no create is acknowledged under the uid of a deleted sandbox
				}
				r := record(uid)
				r.Record.Name = h.key(uid).Name
				require.Equal(t, uid, s.SetRecord(r).Sandbox.GetUid())
			},
			"deleting": func(t *rapid.T) { uid := h.uid(t); s.MarkDeleting(h.key(uid), uid) },
			"gone": func(t *rapid.T) {
				uid := h.uid(t)
				item, visible := s.Get(h.key(uid))
				written := visible && item.Sandbox.GetUid() == uid && item.Resource != nil
				require.Equal(t, !written, s.MarkGone(h.key(uid), uid))
				h.gone[uid] = h.gone[uid] || !written
			},
			"report":     func(t *rapid.T) { s.AgentChanges("a", []*agentv1.SandboxReport{h.report(t)}) },
			"reports":    func(t *rapid.T) { s.AgentSandboxes("a", []*agentv1.SandboxReport{h.report(t), h.report(t)}) },
			"agent gone": func(*rapid.T) { s.AgentGone("a") },
			"container":  func(t *rapid.T) { s.SetContainerRemoved(h.report(t).GetRecord().GetFence()) },
			"tombstone":  func(t *rapid.T) { s.AgentTombstones([]*agentv1.Tombstone{h.tombstone(t)}, nil) },
			"dropped":    func(t *rapid.T) { s.AgentTombstones(nil, []*agentv1.Tombstone{h.tombstone(t)}) },
			"": func(t *rapid.T) {
				for _, w := range watches {
					w.check(t, s)
				}
				h.check(t)
				require.Equal(t, s.Len(), counted.visible("ns"))
			},
		})
	})
}

// check compares Get, ByRequest, List, Len and Gone.
func (h *history) check(t *rapid.T) {
	all, _, err := h.store.List(store.Filter{}, 10, "")
	require.NoError(t, err)
	require.Equal(t, len(all), h.store.Len())
	listed := byName(all)
	for _, uid := range []string{"u1", "u2", "u3"} {
		key := h.key(uid)
		item, visible := h.store.Get(key)
		require.Equal(t, listed[key.String()] != nil, visible)
		found, ok := h.store.ByRequest("ns", "r-"+uid)
		require.Equal(t, visible && item.Sandbox.GetUid() == uid, ok)
		if ok {
			require.Equal(t, uid, found.Sandbox.GetUid())
			require.Equal(t, h.store.Deleting(key, uid), item.Sandbox.GetStatus().GetPhase() == sandboxv1.Phase_PHASE_TERMINATING)
		}
		if h.gone[uid] {
			require.True(t, h.store.Gone(key, uid))
		}
		if h.store.Gone(key, uid) {
			require.False(t, ok, "%s is deleted", uid)
			require.True(t, h.store.Deleting(key, uid))
		}
	}
}

// TestVisibleSandboxesAreCounted: one of another uid under the same name is another one.
func TestVisibleSandboxesAreCounted(t *testing.T) {
	s, counted := newStore(), counter{}
	s.CountIn(counted)
	s.SetRecord(record("u"))
	s.SetResource(resource("u", "1", ""))
	s.SetResource(resource("u", "2", v1alpha1.PhaseFailed))
	require.Equal(t, counter{"ns": {"u"}}, counted)
	s.SetResource(resource("v", "3", ""))
	require.Equal(t, counter{"ns": {"u", "v"}, "hidden in ns": {""}}, counted)
	s.RemoveResource(resource("v", "4", ""))
	require.Zero(t, counted.visible("ns"))
}

// TestLastAttemptIsVisible: of several reports alone, the last attempt of the sandbox that was created first counts.
func TestLastAttemptIsVisible(t *testing.T) {
	at := func(r *agentv1.SandboxReport, attempt int64, seconds int64) *agentv1.SandboxReport {
		r.Record.Fence.Attempt, r.Record.CreateTime = attempt, &timestamppb.Timestamp{Seconds: seconds}
		return r
	}
	const running, failed = agentv1.SandboxState_SANDBOX_STATE_RUNNING, agentv1.SandboxState_SANDBOX_STATE_FAILED
	for name, test := range map[string]struct {
		reports []*agentv1.SandboxReport
		uid     string
		attempt int64
	}{
		"one":                    {[]*agentv1.SandboxReport{at(report("u", running), 1, 5)}, "u", 1},
		"the later attempt":      {[]*agentv1.SandboxReport{at(report("u", running), 2, 5), at(report("u", running), 1, 5)}, "u", 2},
		"the older sandbox":      {[]*agentv1.SandboxReport{at(report("v", running), 7, 6), at(report("u", running), 1, 5)}, "u", 1},
		"what has not failed":    {[]*agentv1.SandboxReport{at(report("u", failed), 2, 5), at(report("u", running), 1, 5)}, "u", 1},
		"nothing that is needed": {[]*agentv1.SandboxReport{at(report("u", failed), 2, 5)}, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			s.AgentSandboxes("a", test.reports)
			item, ok := s.Get(key)
			require.Equal(t, test.uid != "", ok)
			require.Equal(t, test.uid, item.Sandbox.GetUid())
			require.Equal(t, test.attempt, item.Fence.GetAttempt())
		})
	}
}

func TestTombstones(t *testing.T) {
	tombstone := func(agent string) *agentv1.Tombstone {
		return &agentv1.Tombstone{Namespace: "ns", Name: "one", RequestId: "r-u", DeleteRequestId: "d", Fence: &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: agent}}
	}
	both := []*agentv1.Tombstone{tombstone("a"), tombstone("b")}
	t.Run("of a visible sandbox", func(t *testing.T) {
		s := newStore()
		s.SetResource(resource("u", "1", v1alpha1.PhaseRunning))
		s.AgentTombstones(both, nil)
		item, ok := s.Get(key)
		require.True(t, ok)
		require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, item.Sandbox.GetStatus().GetPhase())
		require.NotNil(t, item.Sandbox.GetDeleteTime())
		require.False(t, s.Gone(key, "u"))
		s.AgentTombstones(nil, both)
		require.False(t, s.Gone(key, "u"), "its custom resource is still there")
		s.RemoveResource(resource("u", "2", ""))
		require.True(t, s.Gone(key, "u"))
	})
	t.Run("of an unknown sandbox", func(t *testing.T) {
		s := newStore()
		s.AgentTombstones(both[:1], nil)
		require.True(t, s.Gone(key, "u"))
		require.True(t, s.RequestGone("ns", "r-u"), "its create is not repeated")
		require.False(t, s.RequestGone("other", "r-u"))
		s.SetResource(resource("u", "1", v1alpha1.PhaseRunning))
		require.Zero(t, s.Len(), "a write that lands late")
		deleted, ok := s.DeletedBy("ns", "d")
		require.True(t, ok)
		require.Equal(t, store.Deleted{Key: key, UID: "u"}, deleted)
	})
	t.Run("of an agent that is gone", func(t *testing.T) {
		s := newStore()
		s.SetRecord(record("u"))
		s.AgentTombstones(both, nil)
		s.MarkGone(key, "u")
		s.AgentTombstones(nil, both)
		require.True(t, s.Gone(key, "u"))
		require.True(t, s.RequestGone("ns", "r-u"))
	})
}

// TestDeletionsAreRememberedForAnHour, and as long as an agent keeps a tombstone.
func TestDeletionsAreRememberedForAnHour(t *testing.T) {
	c := clocktesting.NewFakePassiveClock(time.Unix(1e9, 0))
	s := store.New(c)
	pass := func(d time.Duration) {
		c.SetTime(c.Now().Add(d))
		s.MarkGone(store.Key{Namespace: "ns", Name: "other"}, "other") // memory is pruned now and then
	}
	kept := &agentv1.Tombstone{Namespace: "ns", Name: "kept", Fence: &agentv1.Fence{SandboxUid: "kept", Attempt: 1, AgentUid: "a"}}
	s.SetRecord(record("u"))
	s.MarkGone(key, "u")
	s.AgentTombstones([]*agentv1.Tombstone{kept}, nil)
	removed := report("u", agentv1.SandboxState_SANDBOX_STATE_RUNNING).GetRecord().GetFence()
	s.SetContainerRemoved(removed)
	deleting := resource("v", "1", "")
	deleting.Annotations[v1alpha1.AnnotationDeleteRequestID] = "d"
	s.RemoveResource(deleting)
	pass(59 * time.Minute)
	require.True(t, s.Gone(key, "u") && s.Gone(store.Key{Namespace: "ns", Name: "kept"}, "kept") && s.RequestGone("ns", "r-u") && s.ContainerRemoved(identity.FenceOf(removed)))
	_, ok := s.DeletedBy("ns", "d")
	require.True(t, ok)
	pass(2 * time.Minute)
	require.False(t, s.Gone(key, "u") || s.RequestGone("ns", "r-u") || s.ContainerRemoved(identity.FenceOf(removed)))
	require.True(t, s.Gone(store.Key{Namespace: "ns", Name: "kept"}, "kept"))
	_, ok = s.DeletedBy("ns", "d")
	require.False(t, ok)
	s.AgentTombstones(nil, []*agentv1.Tombstone{kept})
	pass(2 * time.Hour)
	require.False(t, s.Gone(store.Key{Namespace: "ns", Name: "kept"}, "kept"))
}

// TestAbandonedCreateMayBeRepeated: the custom resource of a failed create answers no repetition.
func TestAbandonedCreateMayBeRepeated(t *testing.T) {
	for name, abandoned := range map[string]bool{"deleted by a user": false, "abandoned": true} {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			sb := resource("u", "1", "")
			sb.Annotations[v1alpha1.AnnotationRequestID] = "r-u"
			if abandoned {
				sb.Annotations[v1alpha1.AnnotationAbandoned] = "true"
			}
			require.Equal(t, abandoned, store.Abandoned(sb))
			s.SetResource(sb)
			s.RemoveResource(sb)
			require.Equal(t, !abandoned, s.RequestGone("ns", "r-u"))
		})
	}
	require.False(t, store.Abandoned(nil))
}

// TestEndIsReported: what the agent says of the end of a process is shown before the controller has written it.
func TestEndIsReported(t *testing.T) {
	s := newStore()
	s.SetResource(resource("u", "1", v1alpha1.PhaseRunning))
	r := report("u", agentv1.SandboxState_SANDBOX_STATE_STOPPED)
	r.ExitCode, r.Reason, r.Message, r.FinishTime = proto.Int32(137), "OOMKilled", "memory", &timestamppb.Timestamp{Seconds: 7}
	r.StartTime, r.Endpoints = &timestamppb.Timestamp{Seconds: 3}, []string{"10.0.0.1:80"}
	s.AgentSandboxes("a", []*agentv1.SandboxReport{r})
	item, _ := s.Get(key)
	st := item.Sandbox.GetStatus()
	require.EqualValues(t, 137, st.GetExitCode())
	require.Equal(t, []string{"OOMKilled", "memory", "u-1", "pod", "10.0.0.1:80"},
		[]string{st.GetReason(), st.GetMessage(), st.GetSandboxId(), st.GetAssignedPod(), st.GetEndpoints()[0]})
	require.EqualValues(t, 7, st.GetFinishTime().GetSeconds())
	require.EqualValues(t, 3, st.GetStartTime().GetSeconds())
	require.EqualValues(t, 1, st.GetAttempt())
}

func TestFilters(t *testing.T) {
	s := newStore()
	for i, pool := range []string{"p", "p", "q"} {
		r := record(fmt.Sprint("u", i))
		r.Record.Name, r.Record.Spec.Pool, r.Record.Labels = fmt.Sprint("n", i), pool, map[string]string{"n": fmt.Sprint(i)}
		s.SetRecord(r)
	}
	s.MarkDeleting(store.Key{Namespace: "ns", Name: "n1"}, "u1")
	sb := resource("u3", "1", v1alpha1.PhaseFailed)
	sb.Name, sb.Spec.PoolRef, sb.Labels = "n3", "q", map[string]string{"n": "3"}
	s.SetResource(sb)
	selector := func(text string) labels.Selector {
		parsed, err := store.ParseSelector(text)
		require.NoError(t, err)
		return parsed
	}
	for name, test := range map[string]struct {
		filter store.Filter
		want   string
	}{
		"all":          {store.Filter{}, "n0 n1 n2 n3"},
		"namespace":    {store.Filter{Namespace: "other"}, ""},
		"name":         {store.Filter{Name: "n1"}, "n1"},
		"pool":         {store.Filter{Pool: "q"}, "n2 n3"},
		"no selector":  {store.Filter{Selector: selector("")}, "n0 n1 n2 n3"},
		"selector":     {store.Filter{Selector: selector("n in (0,3)")}, "n0 n3"},
		"terminating":  {store.Filter{Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_TERMINATING}}, "n1"},
		"failed":       {store.Filter{Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_FAILED}}, "n3"},
		"two phases":   {store.Filter{Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_RUNNING, sandboxv1.Phase_PHASE_FAILED}}, "n0 n2 n3"},
		"all together": {store.Filter{Namespace: "ns", Pool: "q", Selector: selector("n!=3")}, "n2"},
	} {
		t.Run(name, func(t *testing.T) {
			all, _, err := s.List(test.filter, 0, "")
			require.NoError(t, err)
			var got []string
			for _, sb := range all {
				got = append(got, sb.GetName())
			}
			require.True(t, slices.IsSorted(got))
			require.Equal(t, test.want, strings.Join(got, " "))
		})
	}
	_, err := store.ParseSelector("a in (")
	require.ErrorContains(t, err, "label_selector")
	for _, token := range []string{"!", "bm90IG91cnM", "MQBvbmU"} {
		_, _, err := s.List(store.Filter{}, 1, token)
		require.ErrorContains(t, err, "page_token")
	}
}
