package observe_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func TestNothingIsJudgedBeforeScanAndSync(t *testing.T) {
	w := newTestEnv(t)
	defer w.end(t)
	w.change(func(w *testEnv) { w.containers[idOne] = one(w) })
	_, err := w.Findings()
	require.True(t, errdefs.IsUnavailable(err))
	require.NoError(t, w.Scan(t.Context()))
	_, err = w.Findings()
	require.True(t, errdefs.IsUnavailable(err), "the caches are not synced")
	_, err = w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.True(t, errdefs.IsUnavailable(err))
	require.False(t, w.Ready())
	require.Empty(t, w.asking("pods", "sandbox"))
	w.clock.Step(time.Hour)
	require.Empty(t, w.reported())
	w.SetSynced()
	require.True(t, w.Ready())
}

func TestHealthyNodeMakesNoRequests(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.write(sandbox(uidOne, agentA, 1))
	w.addContainer(t, one(w))
	for range 5 {
		w.clock.Step(interval)
		require.NoError(t, w.Scan(t.Context()))
	}
	require.Equal(t, verdict.Assigned, w.verdict(t))
	require.Empty(t, w.asking("pods", "sandbox", "runs"))
	require.Empty(t, w.reported())
}

func TestEndOfAnAgentIsObservedAtOnce(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.addContainer(t, one(w))
	w.write(sandbox(uidOne, agentA, 1))
	require.Equal(t, verdict.Assigned, w.verdict(t))
	changed := w.Changed()
	w.change(func(w *testEnv) { delete(w.pods, agentA) })
	w.RemovePod(agentA)
	require.Equal(t, []observe.Key{{ID: idOne}}, w.reported())
	<-changed
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.AgentPodGone, f.Verdict.Reason)
	require.Equal(t, "meta-"+uidOne, f.ResourceUID)
	require.Equal(t, []string{"pods"}, w.asking("pods", "sandbox"), "the Sandbox makes no difference")

	require.NoError(t, w.Scan(t.Context()))
	require.Equal(t, []observe.Key{{ID: idOne}}, w.reported(), "a scan reports it again")
	w.change(func(w *testEnv) { delete(w.containers, idOne) })
	w.Gone(observe.Key{ID: idOne})
	require.Empty(t, w.verdicts(t))
}

func TestEndedPodCountsAsGone(t *testing.T) {
	w := synced(t)
	w.addContainer(t, one(w))
	require.Equal(t, verdict.AgentPodUnknown, w.verdict(t))
	w.SetPod(agentA, true)
	require.Equal(t, verdict.AgentPodGone, w.verdict(t))
}

func TestAgentsThatTheAPIServerNeverHad(t *testing.T) {
	w := synced(t)
	w.change(func(w *testEnv) { w.running[agentA] = true })
	w.addContainer(t, one(w))
	key := observe.Key{ID: idOne}
	for range 3 {
		require.Equal(t, verdict.AnotherCluster, w.verdict(t), "the node runs it")
		f, err := w.Confirm(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, verdict.AnotherCluster, f.Verdict.Reason)
		w.clock.Step(time.Hour)
	}
	w.change(func(w *testEnv) { delete(w.running, agentA) })
	require.Equal(t, verdict.AnotherCluster, w.verdict(t), "no scan yet")
	require.NoError(t, w.Scan(t.Context()))
	require.Equal(t, verdict.AgentPodUnknown, w.verdict(t), "its Pod may be restarting")
	w.clock.Step(grace - 1)
	require.Equal(t, verdict.AgentPodUnknown, w.verdict(t))
	require.Empty(t, w.reported())
	w.clock.Step(1)
	require.Equal(t, verdict.AgentPodGone, w.verdict(t))
	require.Equal(t, []observe.Key{key}, w.reported())

	w.change(func(w *testEnv) { w.running[agentA] = true })
	f, err := w.Confirm(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, verdict.AnotherCluster, f.Verdict.Reason, "it runs again")
}

func TestAbsentSandboxHasAGracePeriod(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.addContainer(t, one(w))
	w.erase(s)
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.clock.Step(grace - 1)
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.write(s)
	require.Equal(t, verdict.Assigned, w.verdict(t))
	w.erase(s)
	w.clock.Step(grace - 1)
	require.Equal(t, verdict.WithinGrace, w.verdict(t), "the grace period restarts")
	w.reported()
	w.clock.Step(1)
	require.Equal(t, verdict.SandboxAbsent, w.verdict(t))
	require.Len(t, w.reported(), 1)
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.SandboxAbsent, f.Verdict.Reason)
	require.Equal(t, []string{"get", "pods", "sandbox"}, w.asking("get", "pods", "sandbox"), "the identity comes first")
}

// TestSandboxOnAnotherNodeNeedsNoGrace: it left the cache of this node, and the API server says where it is.
func TestSandboxOnAnotherNodeNeedsNoGrace(t *testing.T) {
	w := start(t)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.addContainer(t, one(w))
	w.change(func(w *testEnv) { w.sandboxes["ns/one"] = sandbox(uidOne, "agent-elsewhere", 2) })
	w.RemoveSandbox(&s.ObjectMeta)
	require.Eventually(t, func() bool { return slices.Contains(w.reported(), observe.Key{ID: idOne}) }, testkit.Timeout, testkit.Tick)
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.AttemptOver, f.Verdict.Reason)
}

// TestLiveAnswerReplacesTheCache where a cache does not show an existing Sandbox, as on a node whose name is no label value. The
// API server is asked once per interval.
func TestLiveAnswerReplacesTheCache(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.change(func(w *testEnv) { w.sandboxes["ns/one"] = sandbox(uidOne, agentA, 1) })
	w.addContainer(t, one(w))
	w.clock.Step(grace)
	require.Equal(t, verdict.SandboxAbsent, w.verdict(t))
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.Assigned, f.Verdict.Reason)
	w.reported()
	w.clock.Step(interval - 1)
	require.Equal(t, verdict.Assigned, w.verdict(t))
	require.Empty(t, w.reported())
	w.clock.Step(1)
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.clock.Step(grace)
	require.Equal(t, verdict.SandboxAbsent, w.verdict(t))
	require.Len(t, w.reported(), 1, "it is confirmed again")
}

func TestConfirmObservesEverythingAgain(t *testing.T) {
	later := sandbox(uidOne, "agent-b", 2)
	released := sandbox(uidOne, "", 1)
	expired := sandbox(uidOne, "", 0)
	expired.Status.Phase = v1alpha1.PhaseExpired
	garbled := sandbox(uidOne, "", 1)
	garbled.Annotations[v1alpha1.AnnotationAssignment] = "{"
	deleted := sandbox(uidOne, agentA, 1)
	deleted.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	for name, c := range map[string]struct {
		change func(w *testEnv)
		want   verdict.Reason
	}{
		"still absent":          {func(*testEnv) {}, verdict.SandboxAbsent},
		"there":                 {func(w *testEnv) { w.sandboxes["ns/one"] = sandbox(uidOne, agentA, 1) }, verdict.Assigned},
		"being deleted":         {func(w *testEnv) { w.sandboxes["ns/one"] = deleted }, verdict.SandboxTerminating},
		"another sandbox":       {func(w *testEnv) { w.sandboxes["ns/one"] = sandbox("v", agentA, 1) }, verdict.SandboxReplaced},
		"a later attempt":       {func(w *testEnv) { w.sandboxes["ns/one"] = later }, verdict.AttemptOver},
		"its attempt is over":   {func(w *testEnv) { w.sandboxes["ns/one"] = released }, verdict.AttemptOver},
		"expired, not seen yet": {func(w *testEnv) { w.sandboxes["ns/one"] = expired }, verdict.CreateInFlight},
		"garbled":               {func(w *testEnv) { w.sandboxes["ns/one"] = garbled }, verdict.AssignmentUnreadable},
		"the agent is gone":     {func(w *testEnv) { delete(w.pods, agentA) }, verdict.AgentPodGone},
		"it was never written":  {func(w *testEnv) { w.containers[idOne] = one(w, unwritten) }, verdict.NotPersisted},
		"it became a slot":      {func(w *testEnv) { w.containers[idOne] = one(w, toSlot) }, verdict.SlotOfAgent},
		"its labels are broken": {func(w *testEnv) { w.containers[idOne] = one(w, broken) }, verdict.Unidentified},
		"a label names another": {func(w *testEnv) {
			w.containers[idOne] = one(w, func(c *observe.Container) { c.Identity.AgentUID = "agent-b" })
		}, verdict.AgentPodUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			w := synced(t)
			w.alive(agentA)
			w.addContainer(t, one(w))
			w.clock.Step(grace)
			require.Equal(t, verdict.SandboxAbsent, w.verdict(t))
			w.change(c.change)
			f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
			require.NoError(t, err)
			require.Equal(t, c.want.String(), f.Verdict.Reason.String(), marshal(f.Observation))
		})
	}
}

func unwritten(c *observe.Container) { c.Identity.Persisted = false }

func toSlot(c *observe.Container) {
	c.Identity = identity.Identity{AgentUID: agentA, Pool: "p", State: identity.StateSlot}
}

func broken(c *observe.Container) {
	c.Identity, c.Defect = identity.Identity{AgentUID: agentA}, "attempt is missing"
}

func TestErrorIsNoEvidence(t *testing.T) {
	away := errors.New("connection refused")
	for _, what := range []string{"get", "pods", "sandbox", "runs"} {
		t.Run(what, func(t *testing.T) {
			w := synced(t)
			if what != "runs" {
				w.alive(agentA)
			}
			w.addContainer(t, one(w))
			w.clock.Step(grace)
			require.Len(t, w.verdicts(t), 1)
			w.change(func(w *testEnv) { w.fail[what] = away })
			_, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
			require.ErrorIs(t, err, away)
		})
	}
	w := synced(t)
	w.alive(agentA)
	w.addContainer(t, one(w))
	w.change(func(w *testEnv) { w.fail["list"] = away; delete(w.containers, idOne) })
	require.ErrorIs(t, w.Scan(t.Context()), away)
	require.Contains(t, w.verdicts(t), idOne, "an error does not remove it")
}

func TestRemovedContainerIsDropped(t *testing.T) {
	w := synced(t)
	w.addContainer(t, one(w))
	w.change(func(w *testEnv) { delete(w.containers, idOne) })
	_, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.True(t, errdefs.IsNotFound(err))
	require.Empty(t, w.verdicts(t))
	w.addContainer(t, one(w))
	w.change(func(w *testEnv) { w.containers[idOne] = one(w, func(c *observe.Container) { c.Managed = false }) })
	_, err = w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.True(t, errdefs.IsNotFound(err), "it is no longer managed")
	require.Empty(t, w.verdicts(t))
}

func TestConfirmReturnsTheTraceOfTheCreate(t *testing.T) {
	w := synced(t)
	for name, c := range map[string]struct {
		record *anypb.Any
		want   string
	}{
		"whole":   {pack(t, &agentv1.SandboxRecord{Traceparent: "00-1-2-01"}), "00-1-2-01"},
		"another": {pack(t, &agentv1.Fence{}), ""},
		"torn":    {&anypb.Any{TypeUrl: pack(t, &agentv1.SandboxRecord{}).GetTypeUrl(), Value: []byte{0xff}}, ""},
		"none":    {nil, ""},
	} {
		w.addContainer(t, one(w, func(x *observe.Container) { x.Record = c.record }))
		f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
		require.NoError(t, err)
		require.Equal(t, c.want, f.Traceparent, name)
	}
	require.Equal(t, 2, w.logged("record of a container is unreadable", idOne))
}

// TestInconsistentLabels keep their container as long as its agent lives; they are logged once and counted.
func TestInconsistentLabels(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.addContainer(t, one(w, broken))
	for range 3 {
		w.clock.Step(interval)
		require.NoError(t, w.Scan(t.Context()))
	}
	require.Equal(t, verdict.Unidentified, w.verdict(t))
	require.Empty(t, w.reported())
	require.Equal(t, 1, w.logged("container has inconsistent labels", idOne, "attempt is missing"))
	require.InDelta(t, 1, w.gauge(t, "fastsandbox_janitor_unreadable_labels"), 0)
	require.InDelta(t, 1, w.gauge(t, "fastsandbox_janitor_verdicts", "keep", "unidentified"), 0)
	w.change(func(w *testEnv) { delete(w.pods, agentA) })
	w.RemovePod(agentA)
	require.NotEmpty(t, w.reported(), "its agent is known")
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.AgentPodGone, f.Verdict.Reason)
}

// TestFailedScanIsLogged, counted and repeated.
func TestFailedScanIsLogged(t *testing.T) {
	w := start(t)
	w.addContainer(t, one(w))
	w.change(func(w *testEnv) { w.fail["list"] = errors.New("read-only file system") })
	w.stepUntil(t, func() bool { return w.logged("examining the node", "read-only file system") > 0 }, time.Second)
	require.Positive(t, w.gauge(t, "fastsandbox_janitor_scans_total", "error"))
	require.Contains(t, w.verdicts(t), idOne)
	scanned := w.gauge(t, "fastsandbox_janitor_scans_total", "ok")
	w.change(func(w *testEnv) { delete(w.fail, "list") })
	w.stepUntil(t, func() bool { return w.gauge(t, "fastsandbox_janitor_scans_total", "ok") > scanned }, time.Second)
}

// TestRemnantFoundBeforeTheSync is reported once it can be confirmed.
func TestRemnantFoundBeforeTheSync(t *testing.T) {
	w := newTestEnv(t)
	defer w.end(t)
	w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: idOne, Part: ctrd.PartSnapshot}} })
	require.NoError(t, w.Scan(t.Context()))
	w.clock.Step(leftover)
	require.NoError(t, w.Scan(t.Context()))
	require.Empty(t, w.reported())
	w.SetSynced()
	require.Equal(t, []observe.Key{{ID: idOne, Remnant: true, Kind: verdict.Snapshot}}, w.reported())
}
