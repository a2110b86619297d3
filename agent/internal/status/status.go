// Package status owns what an agent reports of itself: the current snapshot, and the watches that follow it. It never
// decides anything: the packages that own a fact publish it as a delta. A snapshot is built from the deltas that were
// published before it, so the two cannot disagree. All methods of Hub may be called concurrently.
//
// Lock order: a caller may hold its own lock while it calls a Hub; a Hub calls nothing.
package status

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// watcherBuffer is the number of deltas that a watcher may be behind before its watch is ended.
const watcherBuffer = 1024

// Hub holds the snapshot and sends every change of it to all watchers. Make it with New.
type Hub struct {
	mu       sync.Mutex
	refusal  error // why no watch can begin; nil while watches can
	state    agentv1.AgentSnapshot
	sandbox  map[identity.Fence]*agentv1.SandboxReport
	tomb     map[identity.Fence]*agentv1.Tombstone
	watchers map[*Watcher]struct{}
}

// New returns a Hub that refuses watches until Open is called.
func New(info *agentv1.AgentInfo) *Hub {
	h := &Hub{
		refusal: fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is starting"),
		sandbox: map[identity.Fence]*agentv1.SandboxReport{}, tomb: map[identity.Fence]*agentv1.Tombstone{},
		watchers: map[*Watcher]struct{}{},
	}
	h.state.Info = info
	return h
}

// Watcher receives every change that follows its snapshot. Snapshot and deltas are shared with other watchers: they must
// not be modified.
type Watcher struct {
	// Snapshot is the whole state at the beginning of the watch.
	Snapshot *agentv1.AgentSnapshot

	deltas chan *agentv1.AgentDelta
	err    error // valid once deltas is closed
}

// Deltas returns the changes, in order. The channel is closed when the Hub ends the watch; Err then returns the reason.
func (w *Watcher) Deltas() <-chan *agentv1.AgentDelta { return w.deltas }

// Err returns why the watch was ended. It may be called once Deltas is closed.
func (w *Watcher) Err() error { return w.err }

// Open lets watches begin.
func (h *Hub) Open() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refusal = nil
}

// Close ends all watches with err and refuses new ones with it.
func (h *Hub) Close(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refusal = err
	for w := range h.watchers {
		h.end(w, err)
	}
}

// Watch begins a watch: no change is missing between its snapshot and its deltas. Unwatch must be called in the end. The
// error is that of Close, or Unavailable before Open.
func (h *Hub) Watch() (*Watcher, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refusal != nil {
		return nil, h.refusal
	}
	w := &Watcher{deltas: make(chan *agentv1.AgentDelta, watcherBuffer), Snapshot: h.snapshot()}
	h.watchers[w] = struct{}{}
	return w, nil
}

// Unwatch ends a watch.
func (h *Hub) Unwatch(w *Watcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.watchers, w)
}

// Publish applies a change and sends it to all watchers. It never waits for one: a watch whose buffer is full is ended. The
// caller must not modify d afterwards.
func (h *Hub) Publish(d *agentv1.AgentDelta) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.publish(d)
}

// SetImages replaces the images that are on the node. They must be sorted and distinct.
func (h *Hub) SetImages(images []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	added, removed := missing(images, h.state.GetImages()), missing(h.state.GetImages(), images)
	if len(added) == 0 && len(removed) == 0 {
		return
	}
	h.publish(&agentv1.AgentDelta{ImagesAdded: added, ImagesRemoved: removed})
}

// SetSlots replaces the slots' status.
func (h *Hub) SetSlots(s *agentv1.SlotStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !proto.Equal(h.state.GetSlots(), s) {
		h.publish(&agentv1.AgentDelta{Slots: s})
	}
}

// SetAppArmor replaces whether sandboxes have the AppArmor profile, and reports whether that is a change.
func (h *Hub) SetAppArmor(s *agentv1.AppArmorStatus) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if proto.Equal(h.state.GetApparmor(), s) {
		return false
	}
	h.publish(&agentv1.AgentDelta{Apparmor: s})
	return true
}

// SetUserNamespaces replaces whether sandboxes have user namespaces, with why not, and reports whether that is a change.
func (h *Hub) SetUserNamespaces(on bool, offReason string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	info := h.state.GetInfo()
	if info.GetUserNamespaces() == on && info.GetUserNamespacesOffReason() == offReason {
		return false
	}
	next := &agentv1.AgentInfo{}
	proto.Merge(next, info) // snapshots share the former one
	next.UserNamespaces, next.UserNamespacesOffReason = on, offReason
	h.publish(&agentv1.AgentDelta{Info: next})
	return true
}

// SetPinnedImages replaces the pinned images.
func (h *Hub) SetPinnedImages(images []*agentv1.PinnedImage) {
	h.mu.Lock()
	defer h.mu.Unlock()
	same := slices.EqualFunc(h.state.GetPinnedImages(), images, func(a, b *agentv1.PinnedImage) bool { return proto.Equal(a, b) })
	if !same {
		h.publish(&agentv1.AgentDelta{PinnedImages: &agentv1.PinnedImages{Images: images}})
	}
}

// SetAccepting replaces whether the agent accepts new sandboxes, and the reason if it does not.
func (h *Hub) SetAccepting(accepting bool, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state.GetAccepting() != accepting || h.state.GetNotAcceptingReason() != reason {
		h.publish(&agentv1.AgentDelta{Accepting: &accepting, NotAcceptingReason: reason})
	}
}

// Snapshot returns the current state.
func (h *Hub) Snapshot() *agentv1.AgentSnapshot {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.snapshot()
}

// snapshot is called with mu held.
func (h *Hub) snapshot() *agentv1.AgentSnapshot {
	return &agentv1.AgentSnapshot{
		Info: h.state.GetInfo(), Images: h.state.GetImages(), Accepting: h.state.GetAccepting(),
		NotAcceptingReason: h.state.GetNotAcceptingReason(), Slots: h.state.GetSlots(), PinnedImages: h.state.GetPinnedImages(),
		Apparmor: h.state.GetApparmor(),
		Sandboxes: slices.SortedFunc(maps.Values(h.sandbox), func(a, b *agentv1.SandboxReport) int {
			return strings.Compare(a.GetContainerId(), b.GetContainerId())
		}),
		Tombstones: slices.SortedFunc(maps.Values(h.tomb), func(a, b *agentv1.Tombstone) int {
			return strings.Compare(a.GetFence().GetSandboxUid(), b.GetFence().GetSandboxUid())
		}),
	}
}

// publish is called with mu held.
func (h *Hub) publish(d *agentv1.AgentDelta) {
	h.apply(d)
	for w := range h.watchers {
		select {
		case w.deltas <- d:
		default:
			h.end(w, fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the watch is %d changes behind; watch again", watcherBuffer))
		}
	}
}

// apply changes the state as a receiver of the delta does. Slices are replaced, never modified: snapshots share them. mu is
// held.
func (h *Hub) apply(d *agentv1.AgentDelta) {
	for _, r := range d.GetSandboxes() {
		fence := identity.FenceOf(r.GetRecord().GetFence())
		if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
			delete(h.sandbox, fence)
		} else {
			h.sandbox[fence] = r
		}
	}
	if len(d.GetImagesAdded())+len(d.GetImagesRemoved()) > 0 {
		images := append(missing(h.state.GetImages(), d.GetImagesRemoved()), d.GetImagesAdded()...)
		slices.Sort(images)
		h.state.Images = slices.Compact(images)
	}
	if d.Accepting != nil {
		h.state.Accepting, h.state.NotAcceptingReason = d.GetAccepting(), d.GetNotAcceptingReason()
	}
	for _, f := range d.GetTombstonesRemoved() {
		delete(h.tomb, identity.FenceOf(f))
	}
	for _, t := range d.GetTombstonesAdded() {
		h.tomb[identity.FenceOf(t.GetFence())] = t
	}
	if s := d.GetSlots(); s != nil {
		h.state.Slots = s
	}
	if s := d.GetApparmor(); s != nil {
		h.state.Apparmor = s
	}
	if i := d.GetInfo(); i != nil {
		h.state.Info = i
	}
	if p := d.GetPinnedImages(); p != nil {
		h.state.PinnedImages = p.GetImages()
	}
}

// end is called with mu held.
func (h *Hub) end(w *Watcher, err error) {
	delete(h.watchers, w)
	w.err = err
	close(w.deltas)
}

// missing returns the elements of a that are not in b. Both are sorted.
func missing(a, b []string) []string {
	var out []string
	for _, s := range a {
		if _, ok := slices.BinarySearch(b, s); !ok {
			out = append(out, s)
		}
	}
	return out
}
