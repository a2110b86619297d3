//go:build integration

package app_test

import (
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	pulling    = agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING
	imageReady = agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY
	pullFailed = agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED
)

func pinned(image string, state agentv1.PinnedImageState, message string) *agentv1.PinnedImage {
	return &agentv1.PinnedImage{Image: image, State: state, Message: message}
}

func (env *testEnv) waitForImages(status metav1.ConditionStatus, reason, message string) {
	env.t.Helper()
	var c metav1.Condition
	env.eventually(func() bool {
		c = poolCondition(env.getPool(), v1alpha1.ConditionImagesReady)
		return c.Status == status && c.Reason == reason && c.Message == message
	}, func() string { return "ImagesReady is " + string(c.Status) + " " + c.Reason + ": " + c.Message })
}

// TestPoolImages: agents pin the pool's images, and the status has the state of each image on each node. A change of the images
// changes the pins of the running agents, and creates no new ones.
func TestPoolImages(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Images = []string{"python", "busybox"} })
	env.waitForImages(metav1.ConditionFalse, "AgentsNotReady", "no agent is ready")
	pod := env.bind(env.waitForAgents(1)[0], "node-1")
	a := env.startAgentIn(pod)
	lastPins := func() []string {
		calls := a.pinCalls()
		if len(calls) == 0 {
			return nil
		}
		return calls[len(calls)-1].GetImages()
	}
	env.eventually(func() bool { return slices.Equal(lastPins(), []string{"python", "busybox"}) }, func() string { return "images are not pinned" })
	require.Equal(t, a.info.GetPodUid(), a.pinCalls()[0].GetAgentUid())
	env.waitForImages(metav1.ConditionFalse, "ImagesPulling", "images are being pulled; status.images has the state of each")

	env.allocator.setPinned(a, pinned("python", imageReady, ""), pinned("busybox", pullFailed, "not found"))
	env.waitForImages(metav1.ConditionFalse, "ImagePullFailed", "image busybox on node node-1: not found")
	env.hasOneEvent("ImagePullFailed", "image busybox on node node-1: not found")
	require.Equal(t, []v1alpha1.PoolImageStatus{
		{Image: "python", ReadyNodes: 1, Nodes: []v1alpha1.NodeImageStatus{{Node: "node-1", State: v1alpha1.ImageStateReady}}},
		{Image: "busybox", Nodes: []v1alpha1.NodeImageStatus{{Node: "node-1", State: v1alpha1.ImageStateFailed, Message: "not found"}}},
	}, env.getPool().Status.Images)
	env.allocator.setPinned(a, pinned("python", imageReady, ""), pinned("busybox", imageReady, ""))
	env.waitForImages(metav1.ConditionTrue, "ImagesPulled", "")
	calls := len(a.pinCalls())

	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Images = []string{"busybox"} })
	env.eventually(func() bool { return slices.Equal(lastPins(), []string{"busybox"}) }, func() string { return "images are not replaced" })
	require.Greater(t, len(a.pinCalls()), calls)
	env.allocator.setPinned(a, pinned("busybox", imageReady, ""))
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Images = nil })
	env.eventually(func() bool { return len(lastPins()) == 0 }, func() string { return "images are not unpinned" })
	env.allocator.setPinned(a)
	env.eventually(func() bool {
		st := env.getPool().Status
		return len(st.Images) == 0 && meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionImagesReady) == nil
	}, func() string { return "the status is not cleared" })
	require.Equal(t, pod.UID, env.waitForAgents(1)[0].UID, "a change of the images replaced the agent")
}

// TestAgentThatCannotPinImages is asked again, and the status has its error.
func TestAgentThatCannotPinImages(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Images = []string{"busybox"} })
	pod := env.bind(env.waitForAgents(1)[0], "node-1")
	a := env.startAgentIn(pod)
	a.set(func(a *agent) {
		a.pinErr = fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd is down")
	})
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Images = []string{"python"} })
	env.eventually(func() bool {
		st := env.getPool().Status
		return len(st.Images) == 1 && len(st.Images[0].Nodes) == 1 && st.Images[0].Nodes[0].State == v1alpha1.ImageStateFailed
	}, func() string { return "the error is not in the status" })
	require.Contains(t, env.getPool().Status.Images[0].Nodes[0].Message, "containerd is down")
	a.set(func(a *agent) { a.pinErr = nil })
	calls := len(a.pinCalls())
	env.eventually(func() bool { return len(a.pinCalls()) > calls }, func() string { return "the agent is not asked again" })
	env.allocator.setPinned(a, pinned("python", pulling, ""))
	env.waitForImages(metav1.ConditionFalse, "ImagesPulling", "images are being pulled; status.images has the state of each")
}
