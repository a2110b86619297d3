package store

import (
	"maps"
	"time"

	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// tombstoneTTL is how long the uid of a deleted sandbox is remembered: far longer than any message can be delayed.
const tombstoneTTL = time.Hour

// incarnation is one sandbox of a name. A uid alone does not say which sandbox is meant: a user can write any uid into a custom
// resource, and an agent into a tombstone.
type incarnation struct {
	key Key
	uid string
}

// incarnationOf returns the sandbox that a tombstone is of.
func incarnationOf(t *agentv1.Tombstone) incarnation {
	return incarnation{Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()}
}

// memory is what is known about deletions, so that no delayed message makes a deleted sandbox visible again. The store's
// lock guards it.
type memory struct {
	clock clock.PassiveClock

	deleting   map[incarnation]time.Time                             // accepted deletions of existing sandboxes
	gone       map[incarnation]time.Time                             // deleted sandboxes
	answered   map[requestKey]time.Time                              // create calls whose sandbox was deleted
	removed    map[identity.Fence]time.Time                          // containers that were certainly removed
	tombstones map[incarnation]map[identity.Fence]*agentv1.Tombstone // the tombstones that agents keep
	pruned     time.Time
}

func newMemory(c clock.PassiveClock) *memory {
	return &memory{
		clock: c, deleting: map[incarnation]time.Time{}, gone: map[incarnation]time.Time{}, answered: map[requestKey]time.Time{},
		removed: map[identity.Fence]time.Time{}, tombstones: map[incarnation]map[identity.Fence]*agentv1.Tombstone{},
	}
}

// isGone reports whether a sandbox is known to be deleted.
func (m *memory) isGone(i incarnation) bool {
	_, ok := m.gone[i]
	return ok
}

// isRemoved reports whether a container is known to be removed.
func (m *memory) isRemoved(fence identity.Fence) bool {
	_, ok := m.removed[fence]
	return ok
}

// setDeleting notes the time of the first accepted deletion of a sandbox.
func (m *memory) setDeleting(i incarnation) {
	if _, ok := m.deleting[i]; !ok {
		m.deleting[i] = m.clock.Now()
	}
}

// setGone remembers a sandbox as deleted and, if it was the visible one, its create call.
func (m *memory) setGone(i incarnation, before snapshot) {
	delete(m.deleting, i)
	m.gone[i] = m.clock.Now()
	if id := before.requestID(); id != "" && before.uid() == i.uid && (before.resource == nil || !before.resource.abandoned) {
		m.setAnswered(requestKey{before.key.Namespace, id})
	}
	m.prune()
}

// setAnswered remembers a create call whose sandbox was deleted.
func (m *memory) setAnswered(call requestKey) { m.answered[call] = m.clock.Now() }

// setRemoved remembers a container that was certainly removed.
func (m *memory) setRemoved(fence identity.Fence) {
	m.removed[fence] = m.clock.Now()
	m.prune()
}

// addTombstone adds a tombstone that an agent keeps.
func (m *memory) addTombstone(t *agentv1.Tombstone) {
	i := incarnationOf(t)
	if m.tombstones[i] == nil {
		m.tombstones[i] = map[identity.Fence]*agentv1.Tombstone{}
	}
	m.tombstones[i][identity.FenceOf(t.GetFence())] = t
}

// removeTombstone removes a tombstone, and reports whether it was the last of its sandbox.
func (m *memory) removeTombstone(t *agentv1.Tombstone) (last bool) {
	i := incarnationOf(t)
	delete(m.tombstones[i], identity.FenceOf(t.GetFence()))
	if len(m.tombstones[i]) > 0 {
		return false
	}
	delete(m.tombstones, i)
	return true
}

// prune drops entries that are older than any message.
func (m *memory) prune() {
	now := m.clock.Now()
	if now.Sub(m.pruned) < time.Minute {
		return
	}
	m.pruned = now
	old := func(at time.Time) bool { return now.Sub(at) > tombstoneTTL }
	maps.DeleteFunc(m.gone, func(i incarnation, at time.Time) bool { return old(at) && m.tombstones[i] == nil })
	maps.DeleteFunc(m.answered, func(_ requestKey, at time.Time) bool { return old(at) })
	maps.DeleteFunc(m.removed, func(_ identity.Fence, at time.Time) bool { return old(at) })
}

// showsAlone reports whether a report alone makes a sandbox visible: acknowledged, not persisted, not known to be removed.
func (m *memory) showsAlone(r *agentv1.SandboxReport) bool {
	fence := identity.FenceOf(r.GetRecord().GetFence())
	if m.isGone(incarnation{Key{r.GetRecord().GetNamespace(), r.GetRecord().GetName()}, fence.SandboxUID}) || m.isRemoved(fence) || r.GetPersisted() {
		return false
	}
	return r.GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED
}

// Abandoned reports whether a custom resource is marked as that of a failed create call. nil is not.
func Abandoned(sb *v1alpha1.Sandbox) bool {
	return sb != nil && sb.Annotations[v1alpha1.AnnotationAbandoned] != ""
}
