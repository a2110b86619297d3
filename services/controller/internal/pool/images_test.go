package pool

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const (
	ready       = agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY
	pulling     = agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING
	failed      = agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED
	unspecified = agentv1.PinnedImageState_PINNED_IMAGE_STATE_UNSPECIFIED
)

func pinned(image string, state agentv1.PinnedImageState) *agentv1.PinnedImage {
	return &agentv1.PinnedImage{Image: image, State: state, Message: "of " + image}
}

func withPinned(images ...*agentv1.PinnedImage) func(*allocatorv1.Agent) {
	return func(a *allocatorv1.Agent) { a.PinnedImages = images }
}

// TestAgentsThatAreAskedToPin: only a serving agent whose report differs from the pool's images is asked.
func TestAgentsThatAreAskedToPin(t *testing.T) {
	for name, tc := range map[string]struct {
		pod   *corev1.Pod
		agent func(*allocatorv1.Agent)
		asked bool
	}{
		"reports nothing":           {agentPod("a"), withPinned(), true},
		"reports another image":     {agentPod("a"), withPinned(pinned("x", ready), pinned("z", ready)), true},
		"reports one too many":      {agentPod("a"), withPinned(pinned("x", ready), pinned("y", ready), pinned("z", ready)), true},
		"reports all, in any order": {agentPod("a"), withPinned(pinned("y", pulling), pinned("x", failed)), false},
		"draining":                  {agentPod("a", drainedFor("maintenance")), withPinned(), false},
		"not ready in the Registry": {agentPod("a"), func(a *allocatorv1.Agent) { a.Ready = false }, false},
		"not a member":              {agentPod("a", inPhase(corev1.PodFailed)), withPinned(), false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, testPool(withImages("y", "x")), tc.pod)
			f.agents.sandboxes["a"] = 1
			f.index.agents["a"] = registered("a", tc.agent)
			f.reconcile()
			if !tc.asked {
				require.Empty(t, f.agents.pins)
				return
			}
			require.Len(t, f.agents.pins, 1)
			require.Equal(t, "a", f.agents.pins[0].GetAgentUid())
			require.Equal(t, []string{"y", "x"}, f.agents.pins[0].GetImages())
		})
	}
	t.Run("missing in the Registry", func(t *testing.T) {
		f := newFixture(t, testPool(withImages("x")), agentPod("a"))
		f.reconcile()
		require.Empty(t, f.agents.pins)
	})
	t.Run("the Registry is unknown", func(t *testing.T) {
		f := newFixture(t, testPool(withImages("x")), agentPod("a"))
		f.serve("a")
		f.index.synced = false
		f.reconcile()
		require.Empty(t, f.agents.pins)
	})
}

// An agent that fails to answer is asked again with backoff, and the status has its error until it answers.
func TestPinIsRetried(t *testing.T) {
	f := newFixture(t, testPool(withImages("x")), agentPod("a"))
	f.serve("a")
	f.agents.errs["a"] = errRefused
	after := f.reconcile().RequeueAfter
	require.Positive(t, after)
	require.LessOrEqual(t, after, 2*time.Second)
	status := f.pool().Status
	require.Equal(t, v1alpha1.ImageStateFailed, status.Images[0].Nodes[0].State)
	require.Contains(t, status.Images[0].Nodes[0].Message, "asking agent a to pull the image: ")
	require.Equal(t, reasonImagePullFailed, meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionImagesReady).Reason)
	require.Contains(t, f.recorder.take(), "Warning ImagePullFailed "+meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionImagesReady).Message)

	f.reconcile()
	require.Len(t, f.agents.pins, 1, "asked before the delay was over")
	f.clock.Step(after)
	delete(f.agents.errs, "a")
	f.reconcile()
	require.Len(t, f.agents.pins, 2)
	require.Equal(t, v1alpha1.ImageStatePulling, f.pool().Status.Images[0].Nodes[0].State)

	f.index.agents["a"] = registered("a", withPinned(pinned("x", ready)))
	require.Zero(t, f.reconcile().RequeueAfter)
	require.Empty(t, f.pins.calls)
	require.Equal(t, metav1.ConditionTrue, meta.FindStatusCondition(f.pool().Status.Conditions, v1alpha1.ConditionImagesReady).Status)
}

func TestPinWithoutConnection(t *testing.T) {
	f := newFixture(t, testPool(withImages("x")), agentPod("a"))
	f.serve("a")
	f.agents.dialErr = errRefused
	f.reconcile()
	require.Empty(t, f.agents.pins)
	require.ErrorIs(t, f.pins.err("a"), errRefused)
}

func TestPinBackoff(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	p := newPins(clock)
	images := []string{"x"}
	var last time.Duration
	for range 10 {
		due, wait := p.due("a", images)
		require.True(t, due)
		require.Positive(t, wait)
		due, left := p.due("a", images)
		require.False(t, due)
		require.Equal(t, wait, left)
		clock.Step(wait)
		last = wait
	}
	require.Greater(t, last, 20*time.Second, "the delay does not grow")
	require.LessOrEqual(t, last, 90*time.Second, "the delay is not bounded")

	p.answered("a", errRefused)
	_, _ = p.due("a", images)
	require.ErrorIs(t, p.err("a"), errRefused)
	due, wait := p.due("a", []string{"x", "y"})
	require.True(t, due, "other images have to wait")
	require.Less(t, wait, 3*time.Second)
	require.NoError(t, p.err("a"), "the error of other images")
	p.answered("gone", errRefused)
	require.NoError(t, p.err("gone"))
}

func TestPinsForgetMissingPods(t *testing.T) {
	p := newPins(clocktesting.NewFakeClock(start))
	p.keep(poolID, sets.New[types.UID]("a", "b"))
	p.due("a", nil)
	p.due("b", nil)
	p.keep(poolID, sets.New[types.UID]("b"))
	require.NotContains(t, p.calls, types.UID("a"))
	require.Contains(t, p.calls, types.UID("b"))
	p.settled("b")
	require.Empty(t, p.calls)
	p.keep(poolID, nil)
	require.Empty(t, p.pods)
}

func TestImageStatus(t *testing.T) {
	on := func(node string, images ...*agentv1.PinnedImage) *member {
		m := &member{pod: agentPod("on-" + node), known: true, agent: registered("x", withPinned(images...))}
		m.pod.Spec.NodeName = node
		return m
	}
	none := func(types.UID) error { return nil }
	node := func(name string, s v1alpha1.ImageState, message string) v1alpha1.NodeImageStatus {
		return v1alpha1.NodeImageStatus{Node: name, State: s, Message: message}
	}
	draining := on("n", pinned("x", ready))
	draining.drain = "x"
	for name, tc := range map[string]struct {
		members []*member
		pinErr  func(types.UID) error
		ready   int32
		want    []v1alpha1.NodeImageStatus
	}{
		"no agents":             {nil, none, 0, []v1alpha1.NodeImageStatus{}},
		"ready":                 {[]*member{on("n", pinned("x", ready))}, none, 1, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStateReady, "")}},
		"pulling":               {[]*member{on("n", pinned("x", pulling))}, none, 0, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStatePulling, "")}},
		"of a newer version":    {[]*member{on("n", pinned("x", unspecified))}, none, 0, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStatePulling, "")}},
		"failed":                {[]*member{on("n", pinned("x", failed))}, none, 0, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStateFailed, "of x")}},
		"not reported":          {[]*member{on("n", pinned("y", ready))}, none, 0, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStatePulling, "")}},
		"not asked":             {[]*member{on("n")}, func(types.UID) error { return errors.New("refused") }, 0, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStateFailed, "asking agent on-n to pull the image: refused")}},
		"not asked, but ready":  {[]*member{on("n", pinned("x", ready))}, func(types.UID) error { return errors.New("refused") }, 1, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStateReady, "")}},
		"two agents of a node":  {[]*member{on("n", pinned("x", failed)), on("n", pinned("x", ready)), on("n", pinned("x", pulling))}, none, 1, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStateReady, "")}},
		"pulling beside failed": {[]*member{on("n", pinned("x", pulling)), on("n", pinned("x", failed))}, none, 0, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStatePulling, "")}},
		"two nodes":             {[]*member{on("o", pinned("x", ready)), on("n", pinned("x", pulling))}, none, 1, []v1alpha1.NodeImageStatus{node("n", v1alpha1.ImageStatePulling, ""), node("o", v1alpha1.ImageStateReady, "")}},
		"draining":              {[]*member{draining}, none, 0, []v1alpha1.NodeImageStatus{}},
		"not scheduled":         {[]*member{on("", pinned("x", ready))}, none, 0, []v1alpha1.NodeImageStatus{}},
	} {
		t.Run(name, func(t *testing.T) {
			got := imageStatus([]string{"x"}, tc.members, tc.pinErr)
			require.Len(t, got, 1)
			require.Equal(t, "x", got[0].Image)
			require.Equal(t, tc.ready, got[0].ReadyNodes)
			require.ElementsMatch(t, tc.want, got[0].Nodes)
		})
	}
}

// Of more nodes than the status lists, it lists the failed ones, then the pulling ones.
func TestListedNodesAreThoseWithProblems(t *testing.T) {
	var nodes []v1alpha1.NodeImageStatus
	for i := range maxImageNodes {
		nodes = append(nodes, v1alpha1.NodeImageStatus{Node: fmt.Sprintf("a%03d", i), State: v1alpha1.ImageStateReady})
	}
	nodes = append(nodes, v1alpha1.NodeImageStatus{Node: "y", State: v1alpha1.ImageStatePulling}, v1alpha1.NodeImageStatus{Node: "z", State: v1alpha1.ImageStateFailed})
	got := listNodes(nodes)
	require.Len(t, got, maxImageNodes)
	require.Equal(t, "a097", got[maxImageNodes-3].Node)
	require.Equal(t, "y", got[maxImageNodes-2].Node)
	require.Equal(t, "z", got[maxImageNodes-1].Node)
}

func TestImagesReady(t *testing.T) {
	image := func(name string, nodes ...v1alpha1.NodeImageStatus) v1alpha1.PoolImageStatus {
		return v1alpha1.PoolImageStatus{Image: name, Nodes: nodes}
	}
	ok, waits := v1alpha1.NodeImageStatus{Node: "n", State: v1alpha1.ImageStateReady}, v1alpha1.NodeImageStatus{Node: "n", State: v1alpha1.ImageStatePulling}
	broken := v1alpha1.NodeImageStatus{Node: "m", State: v1alpha1.ImageStateFailed, Message: "no such image"}
	for name, tc := range map[string]struct {
		images  []v1alpha1.PoolImageStatus
		ready   bool
		reason  string
		message string
	}{
		"all ready":         {[]v1alpha1.PoolImageStatus{image("x", ok), image("y", ok)}, true, "ImagesPulled", ""},
		"one is pulled":     {[]v1alpha1.PoolImageStatus{image("x", ok), image("y", ok, waits)}, false, "ImagesPulling", "images are being pulled; status.images has the state of each"},
		"one has failed":    {[]v1alpha1.PoolImageStatus{image("x", waits), image("y", ok, broken)}, false, "ImagePullFailed", "image y on node m: no such image"},
		"no agent is ready": {[]v1alpha1.PoolImageStatus{image("x")}, false, "AgentsNotReady", "no agent is ready"},
	} {
		t.Run(name, func(t *testing.T) {
			ready, reason, message := imagesReady(tc.images)
			require.Equal(t, tc.ready, ready)
			require.Equal(t, tc.reason, reason)
			require.Equal(t, tc.message, message)
		})
	}
}
