package pool

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// pinTimeout bounds a call of SetPinnedImages, which returns before the images are pulled.
	pinTimeout = 2 * time.Second
	// maxImageNodes bounds the nodes that the status lists for one image.
	maxImageNodes = 100
)

// pins remembers the calls of SetPinnedImages, by the uid of the agent Pod. All of it may be lost: an agent whose report differs
// from the pool's images is asked again.
type pins struct {
	clock clock.Clock

	mu    sync.Mutex
	calls map[types.UID]*pinCall
	pods  map[types.NamespacedName]sets.Set[types.UID] // of each pool
}

// pinCall is the last call to an agent.
type pinCall struct {
	images []string
	delays *backoff.Backoff
	// next is when the agent may be asked again.
	next time.Time
	// err is why the call failed.
	err error
}

func newPins(c clock.Clock) *pins {
	return &pins{clock: c, calls: map[types.UID]*pinCall{}, pods: map[types.NamespacedName]sets.Set[types.UID]{}}
}

// due reports whether the agent has to be asked to pin the images now, or else after which time.
func (p *pins) due(pod types.UID, images []string) (bool, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.calls[pod]
	if c == nil || !slices.Equal(c.images, images) {
		c = &pinCall{images: images, delays: backoff.New(p.clock, backoff.Policy{Initial: time.Second, Max: time.Minute})}
		p.calls[pod] = c
	}
	now := p.clock.Now()
	if wait := c.next.Sub(now); wait > 0 {
		return false, wait
	}
	c.next = now.Add(c.delays.Next())
	return true, c.next.Sub(now)
}

// answered records the result of a call.
func (p *pins) answered(pod types.UID, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.calls[pod]; c != nil {
		c.err = err
	}
}

// err returns why the last call to the agent failed, or nil.
func (p *pins) err(pod types.UID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.calls[pod]; c != nil {
		return c.err
	}
	return nil
}

// settled records that the agent reports the pool's images.
func (p *pins) settled(pod types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.calls, pod)
}

// keep forgets the Pods of a pool that do not exist.
func (p *pins) keep(pool types.NamespacedName, existing sets.Set[types.UID]) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid := range p.pods[pool].Difference(existing) {
		delete(p.calls, uid)
	}
	p.pods[pool] = existing
	if existing.Len() == 0 {
		delete(p.pods, pool)
	}
}

// pinner has the agents pull and keep the images of their pool.
type pinner struct {
	config Config
	pins   *pins
}

// pin asks each serving agent whose report differs from the pool's images to pin them. It returns the time after which to
// look again. An agent that does not answer is asked again with backoff; the status shows its error.
func (p *pinner) pin(ctx context.Context, i *inventory) time.Duration {
	if !p.config.Index.Synced() {
		return 0
	}
	var wg sync.WaitGroup
	var requeue time.Duration
	want := slices.Sorted(slices.Values(i.pool.Spec.Images))
	for _, m := range i.sorted() {
		if m.drain != "" || !m.known || !m.agent.GetReady() {
			continue
		}
		if slices.Equal(pinnedImages(m), want) {
			p.pins.settled(m.pod.UID)
			continue
		}
		due, wait := p.pins.due(m.pod.UID, want)
		requeue = sooner(requeue, wait)
		if due {
			wg.Go(func() { p.call(ctx, m, i.pool.Spec.Images) })
		}
	}
	wg.Wait()
	return requeue
}

func (p *pinner) call(ctx context.Context, m *member, images []string) {
	ctx, cancel := context.WithTimeout(ctx, pinTimeout)
	defer cancel()
	client, err := p.config.Agents.Client(m.agent.GetAddress(), string(m.pod.UID))
	if err == nil {
		_, err = client.SetPinnedImages(ctx, &agentv1.SetPinnedImagesRequest{AgentUid: string(m.pod.UID), Images: images})
		err = rpc.FromStatus(err)
	}
	p.pins.answered(m.pod.UID, err)
	if err != nil {
		logr.FromContextOrDiscard(ctx).V(2).Info("images not pinned", obs.KeyAgent, m.pod.Name, obs.KeyError, err.Error())
	}
}

// pinnedImages returns the sorted references that the agent reports as pinned.
func pinnedImages(m *member) []string {
	var out []string
	for _, image := range m.agent.GetPinnedImages() {
		out = append(out, image.GetImage())
	}
	slices.Sort(out)
	return out
}

// imageStatus returns the state of each image on each node of the serving agents. pinErr returns why an agent could not be
// asked to pin its images.
func imageStatus(images []string, members []*member, pinErr func(types.UID) error) []v1alpha1.PoolImageStatus {
	var out []v1alpha1.PoolImageStatus
	for _, image := range images {
		nodes := map[string]v1alpha1.NodeImageStatus{}
		for _, m := range members {
			if m.drain != "" || m.pod.Spec.NodeName == "" {
				continue
			}
			state := nodeImage(m, image, pinErr(m.pod.UID))
			if old, ok := nodes[state.Node]; !ok || better(state, old) {
				nodes[state.Node] = state
			}
		}
		status := v1alpha1.PoolImageStatus{Image: image}
		for _, n := range nodes {
			if n.State == v1alpha1.ImageStateReady {
				status.ReadyNodes++
			}
		}
		status.Nodes = listNodes(slices.Collect(maps.Values(nodes)))
		out = append(out, status)
	}
	return out
}

// nodeImage returns the state of an image as one agent reports it.
func nodeImage(m *member, image string, pinErr error) v1alpha1.NodeImageStatus {
	out := v1alpha1.NodeImageStatus{Node: m.pod.Spec.NodeName, State: v1alpha1.ImageStatePulling}
	for _, pinned := range m.agent.GetPinnedImages() {
		if pinned.GetImage() != image {
			continue
		}
		switch pinned.GetState() {
		case agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY:
			out.State = v1alpha1.ImageStateReady
		case agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED:
			out.State, out.Message = v1alpha1.ImageStateFailed, truncate(pinned.GetMessage())
		case agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING, agentv1.PinnedImageState_PINNED_IMAGE_STATE_UNSPECIFIED:
		}
		return out
	}
	if pinErr != nil {
		out.State, out.Message = v1alpha1.ImageStateFailed, truncate(fmt.Sprintf("asking agent %s to pull the image: %s", m.pod.Name, pinErr))
	}
	return out
}

// better reports whether a is nearer to Ready than b: agents on one node share its images.
func better(a, b v1alpha1.NodeImageStatus) bool { return rank(a.State) < rank(b.State) }

func rank(s v1alpha1.ImageState) int {
	switch s {
	case v1alpha1.ImageStateReady:
		return 0
	case v1alpha1.ImageStatePulling:
		return 1
	case v1alpha1.ImageStateFailed:
		return 2
	}
	return 3
}

// listNodes sorts nodes by name. Of too many, it lists those first that are not ready.
func listNodes(nodes []v1alpha1.NodeImageStatus) []v1alpha1.NodeImageStatus {
	slices.SortFunc(nodes, func(a, b v1alpha1.NodeImageStatus) int {
		return cmp.Or(-cmp.Compare(rank(a.State), rank(b.State)), cmp.Compare(a.Node, b.Node))
	})
	nodes = nodes[:min(len(nodes), maxImageNodes)]
	slices.SortFunc(nodes, func(a, b v1alpha1.NodeImageStatus) int { return cmp.Compare(a.Node, b.Node) })
	return nodes
}

// Reasons of the condition ImagesReady.
const (
	reasonImagesReady     = "ImagesPulled"
	reasonImagesPulling   = "ImagesPulling"
	reasonImagePullFailed = "ImagePullFailed"
	reasonAgentsNotReady  = "AgentsNotReady"
)

// imagesReady summarizes the state of a pool's images as the reason and message of the condition ImagesReady. It names the
// first failure only, so that the message changes rarely.
func imagesReady(images []v1alpha1.PoolImageStatus) (ready bool, reason, message string) {
	pulling := 0
	for _, image := range images {
		if len(image.Nodes) == 0 {
			return false, reasonAgentsNotReady, "no agent is ready"
		}
		for _, n := range image.Nodes {
			switch n.State {
			case v1alpha1.ImageStateFailed:
				return false, reasonImagePullFailed, truncate(fmt.Sprintf("image %s on node %s: %s", image.Image, n.Node, n.Message))
			case v1alpha1.ImageStatePulling:
				pulling++
			case v1alpha1.ImageStateReady:
			}
		}
	}
	if pulling > 0 {
		return false, reasonImagesPulling, "images are being pulled; status.images has the state of each"
	}
	return true, reasonImagesReady, ""
}
