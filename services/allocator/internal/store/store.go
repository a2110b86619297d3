// Package store owns the one view of sandboxes behind Get, List and Watch. It merges three sources: the custom resources of the
// informer, the records of fast creates that are not persisted yet, and the agents' reports. It keeps the sources, and builds
// the view of a sandbox only on request: there may be 100,000. It does no I/O. All methods may be called concurrently. What
// they return must not be changed.
//
// For one name, a custom resource takes precedence over a record, and a record over a report without either (after a restart
// of the allocator). A report counts only if its fence is the one in force.
package store

import (
	"cmp"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// tombstoneTTL is how long the uid of a deleted sandbox is remembered: far longer than any message can be delayed.
const tombstoneTTL = time.Hour

// Key names a sandbox.
type Key struct {
	Namespace, Name string
}

// Compare orders keys by namespace and name.
func (k Key) Compare(o Key) int {
	return cmp.Or(strings.Compare(k.Namespace, o.Namespace), strings.Compare(k.Name, o.Name))
}

// String returns namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Record is a fast-created sandbox that its agent has started.
type Record struct {
	// Record is the record that was sent to the agent.
	Record *agentv1.SandboxRecord
	// Report is the agent's report with STARTED.
	Report *agentv1.SandboxReport
	// AgentPod, NodeName and AgentAddress say where it runs.
	AgentPod, NodeName, AgentAddress string
}

// Item is one sandbox.
type Item struct {
	Key Key
	// Sandbox is the API's view.
	Sandbox *sandboxv1.Sandbox
	// Fence is the one in force; nil while no agent is assigned.
	Fence *agentv1.Fence
	// Resource is the custom resource; nil while none is known.
	Resource *v1alpha1.Sandbox
	// RequestID of the create call; empty if it had none.
	RequestID string
}

// requestKey names a create call.
type requestKey struct{ namespace, id string }

type entry struct {
	key      Key
	resource *v1alpha1.Sandbox
	record   *Record
	reports  reports
	alone    *Record // the report that makes a sandbox visible without a resource or a record; nil if none does
}

// Store is the view.
type Store struct {
	clock clock.PassiveClock

	mu         sync.Mutex
	entries    map[Key]*entry
	sorted     *btree.BTreeG[Key]                // of the visible entries
	byAgent    map[string]map[identity.Fence]Key // the entries that an agent reports on
	requests   map[requestKey]Key
	deleting   map[string]time.Time                             // by uid: accepted deletions of existing sandboxes
	gone       map[string]time.Time                             // by uid: deleted sandboxes
	answered   map[requestKey]time.Time                         // create calls whose sandbox was deleted
	removed    map[identity.Fence]time.Time                     // containers that were certainly removed
	tombstones map[string]map[identity.Fence]*agentv1.Tombstone // by uid: the tombstones that agents keep
	pruned     time.Time
	deletes    *cache.LRUExpireCache // requestKey -> Deleted; has a lock of its own
	watchers   map[*Watch]struct{}
}

// New returns an empty store.
func New(c clock.PassiveClock) *Store {
	return &Store{
		deletes: cache.NewLRUExpireCacheWithClock(deletesLimit, c),
		clock:   c, entries: map[Key]*entry{}, byAgent: map[string]map[identity.Fence]Key{}, requests: map[requestKey]Key{},
		deleting: map[string]time.Time{}, gone: map[string]time.Time{}, answered: map[requestKey]time.Time{}, watchers: map[*Watch]struct{}{},
		tombstones: map[string]map[identity.Fence]*agentv1.Tombstone{}, removed: map[identity.Fence]time.Time{},
		sorted: btree.NewG(32, func(a, b Key) bool { return a.Compare(b) < 0 }),
	}
}

// snapshot returns what is known about a name. mu is held.
func (s *Store) snapshot(key Key) snapshot {
	e := s.entries[key]
	if e == nil {
		return snapshot{key: key}
	}
	n := snapshot{key: key, resource: e.resource, record: cmp.Or(e.record, e.alone), reports: e.reports}
	if n.seen() {
		n.deleting = s.deleting[n.uid()]
	}
	return n
}

// change calls do, which changes an entry given the snapshot before, and then updates the indexes and notifies watchers. mu is
// held.
func (s *Store) change(key Key, do func(e *entry, before snapshot)) {
	e := s.entries[key]
	if e == nil {
		e = &entry{key: key}
		s.entries[key] = e
	}
	before := s.snapshot(key)
	do(e, before)
	s.resolve(e)
	if len(e.reports) == 0 && e.resource == nil && e.record == nil {
		delete(s.entries, key)
	}
	after := s.snapshot(key)
	s.index(&before, &after)
	if before.seen() && after.seen() && before.uid() != after.uid() {
		s.publish(before, snapshot{key: key})
		before = snapshot{key: key}
	}
	s.publish(before, after)
}

// resolve drops a record that the custom resource replaces, and selects the report that counts if there is neither.
func (s *Store) resolve(e *entry) {
	if e.resource != nil && e.record != nil {
		same := e.resource.EffectiveUID() == e.record.Record.GetFence().GetSandboxUid()
		if !same || e.resource.Status.Phase != "" { // until then the record has more of the status
			e.record = nil
		}
	}
	e.alone = nil
	if e.resource != nil || e.record != nil {
		return
	}
	var best *agentv1.SandboxReport
	for _, r := range e.reports.sorted() {
		switch {
		case !s.orphaned(r):
		case best == nil, sameSandbox(best, r) && r.GetRecord().GetFence().GetAttempt() > best.GetRecord().GetFence().GetAttempt():
			best = r
		}
	}
	if best != nil {
		e.alone = &Record{Record: best.GetRecord(), Report: best}
	}
}

// index updates the indexes of names.
func (s *Store) index(before, after *snapshot) {
	if id := before.requestID(); id != "" {
		if rk := (requestKey{before.key.Namespace, id}); s.requests[rk] == before.key {
			delete(s.requests, rk)
		}
	}
	if id := after.requestID(); id != "" {
		s.requests[requestKey{after.key.Namespace, id}] = after.key
	}
	switch {
	case after.seen() && !before.seen():
		s.sorted.ReplaceOrInsert(after.key)
	case before.seen() && !after.seen():
		s.sorted.Delete(before.key)
	}
}

// Get returns one sandbox, and whether it exists.
func (s *Store) Get(key Key) (Item, bool) {
	s.mu.Lock()
	n := s.snapshot(key)
	s.mu.Unlock()
	if !n.seen() {
		return Item{}, false
	}
	return n.item(), true
}

// ByRequest returns the sandbox of a create call, and whether it exists.
func (s *Store) ByRequest(namespace, requestID string) (Item, bool) {
	s.mu.Lock()
	key, ok := s.requests[requestKey{namespace, requestID}]
	n := s.snapshot(key)
	s.mu.Unlock()
	if !ok {
		return Item{}, false
	}
	return n.item(), true
}

// RequestGone reports whether the sandbox of a create call was deleted.
func (s *Store) RequestGone(namespace, requestID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.answered[requestKey{namespace, requestID}]
	return ok
}

// Gone reports whether the sandbox of a uid is known to be deleted. Uids are never reused.
func (s *Store) Gone(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.gone[uid]
	return ok
}

// Deleting reports whether the deletion of a uid was accepted or has finished.
func (s *Store) Deleting(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, deleting := s.deleting[uid]
	_, gone := s.gone[uid]
	return deleting || gone
}

// Len returns the number of sandboxes.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sorted.Len()
}

// SetRecord makes a sandbox visible whose custom resource is not written yet, and returns it as the record describes it.
func (s *Store) SetRecord(r *Record) Item {
	recorded := snapshot{key: Key{r.Record.GetNamespace(), r.Record.GetName()}, record: r}
	s.mu.Lock()
	s.change(recorded.key, func(e *entry, _ snapshot) {
		e.record = r
		recorded.reports, recorded.deleting = e.reports, s.deleting[recorded.uid()]
	})
	s.mu.Unlock()
	return recorded.item()
}

// MarkDeleting marks a sandbox as being deleted.
func (s *Store) MarkDeleting(key Key, uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.markDeleting(key, uid)
}

func (s *Store) markDeleting(key Key, uid string) {
	s.change(key, func(*entry, snapshot) {
		if _, ok := s.deleting[uid]; !ok {
			s.deleting[uid] = s.clock.Now()
		}
	})
}

// shows reports whether the visible sandbox of a name has the uid. mu is held.
func (s *Store) shows(key Key, uid string) bool {
	n := s.snapshot(key)
	return n.seen() && n.uid() == uid
}

// MarkGone removes a deleted sandbox and remembers its uid, so that no delayed message makes it visible again. It returns
// false, and does nothing, if its custom resource exists.
func (s *Store) MarkGone(key Key, uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil && e.resource != nil && e.resource.EffectiveUID() == uid {
		return false
	}
	s.change(key, func(e *entry, before snapshot) {
		s.markGone(uid, before)
		e.dropRecord(uid)
	})
	return true
}

// dropRecord drops the record if it is that of a uid.
func (e *entry) dropRecord(uid string) {
	if e.record != nil && e.record.Record.GetFence().GetSandboxUid() == uid {
		e.record = nil
	}
}

// markGone remembers a uid as deleted and, if it was the visible one, its create call. mu is held.
func (s *Store) markGone(uid string, before snapshot) {
	now := s.clock.Now()
	delete(s.deleting, uid)
	s.gone[uid] = now
	if id := before.requestID(); id != "" && before.uid() == uid && !Abandoned(before.resource) {
		s.answered[requestKey{before.key.Namespace, id}] = now
	}
	s.prune(now)
}

// prune drops entries that are older than any message.
func (s *Store) prune(now time.Time) {
	if now.Sub(s.pruned) < time.Minute {
		return
	}
	s.pruned = now
	old := func(at time.Time) bool { return now.Sub(at) > tombstoneTTL }
	maps.DeleteFunc(s.gone, func(uid string, at time.Time) bool { return old(at) && s.tombstones[uid] == nil })
	maps.DeleteFunc(s.answered, func(_ requestKey, at time.Time) bool { return old(at) })
	maps.DeleteFunc(s.removed, func(_ identity.Fence, at time.Time) bool { return old(at) })
}

// Abandoned reports whether a custom resource is marked as that of a failed create call. nil is not.
func Abandoned(sb *v1alpha1.Sandbox) bool {
	return sb != nil && sb.Annotations[v1alpha1.AnnotationAbandoned] != ""
}

// SetResource sets a custom resource from the informer, or from the answer to a write. It is ignored if it is older than the
// known one, or its sandbox was deleted.
func (s *Store) SetResource(sb *v1alpha1.Sandbox) {
	if sb.DeletionTimestamp != nil {
		s.rememberDelete(sb)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.gone[sb.EffectiveUID()]; ok {
		return
	}
	key := Key{sb.Namespace, sb.Name}
	if e := s.entries[key]; e != nil && e.resource != nil && older(sb.ResourceVersion, e.resource.ResourceVersion) {
		return
	}
	s.change(key, func(e *entry, _ snapshot) { e.resource = sb })
}

// older compares resource versions, which are increasing numbers for one kind of resource.
func older(a, b string) bool {
	x, errA := strconv.ParseUint(a, 10, 64)
	y, errB := strconv.ParseUint(b, 10, 64)
	return errA == nil && errB == nil && x < y
}

// RemoveResource removes a custom resource that was deleted in the API server.
func (s *Store) RemoveResource(sb *v1alpha1.Sandbox) {
	s.rememberDelete(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.change(Key{sb.Namespace, sb.Name}, func(e *entry, before snapshot) {
		s.markGone(sb.EffectiveUID(), before)
		if e.resource != nil && e.resource.UID == sb.UID {
			e.resource = nil
		}
		e.dropRecord(sb.EffectiveUID())
	})
}

// sameSandbox reports whether two containers are attempts of one sandbox. Only the last one can have been acknowledged: a create
// continues on the next agent when its outcome on the agent before is unknown.
func sameSandbox(a, b *agentv1.SandboxReport) bool {
	return a.GetRecord().GetFence().GetSandboxUid() == b.GetRecord().GetFence().GetSandboxUid()
}

// orphaned reports whether a report alone makes a sandbox visible: acknowledged, not persisted, not known to be removed.
func (s *Store) orphaned(r *agentv1.SandboxReport) bool {
	_, gone := s.gone[r.GetRecord().GetFence().GetSandboxUid()]
	_, removed := s.removed[identity.FenceOf(r.GetRecord().GetFence())]
	if gone || removed || r.GetPersisted() {
		return false
	}
	return r.GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED
}
