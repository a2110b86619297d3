// Package store is the one view of sandboxes behind Get, List and Watch. It lays over each other what three sources tell:
// the custom resources of the informer, the records of fast creates that are not written yet, and the agents' reports. It
// holds what they told, and makes the view of a sandbox when somebody asks: there may be 100,000 that nobody does. It does
// no I/O. All methods may be called concurrently. What it returns must not be changed.
//
// Of one name, a custom resource comes before a record, and a record before a report that nobody else knows (after a
// restart of the allocator). A report counts only if its fence is the one in force.
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

// tombstoneTTL is how long the uid of a sandbox that is gone is remembered: far longer than any message is late.
const tombstoneTTL = time.Hour

// Key names a sandbox.
type Key struct {
	Namespace, Name string
}

// Compare orders keys by namespace and name.
func (k Key) Compare(o Key) int {
	return cmp.Or(strings.Compare(k.Namespace, o.Namespace), strings.Compare(k.Name, o.Name))
}

// String is namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Record is a fast-created sandbox of which the agent said that it runs.
type Record struct {
	// Record is what the agent was told.
	Record *agentv1.SandboxRecord
	// Report is the agent's word with STARTED.
	Report *agentv1.SandboxReport
	// AgentPod, NodeName and AgentAddress say where it runs.
	AgentPod, NodeName, AgentAddress string
}

// Item is one sandbox.
type Item struct {
	Key Key
	// Sandbox is the API's view.
	Sandbox *sandboxv1.Sandbox
	// Fence is the one in force; nil while the sandbox is assigned to no agent.
	Fence *agentv1.Fence
	// Resource is the custom resource; nil while none was seen.
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
	alone    *Record // the report that makes a sandbox to be seen without a resource or a record; nil if none does
}

// Store is the view.
type Store struct {
	clock clock.PassiveClock

	mu       sync.Mutex
	entries  map[Key]*entry
	sorted   *btree.BTreeG[Key]                // of the entries of which there is something to be seen
	byAgent  map[string]map[identity.Fence]Key // where reports of an agent are
	requests map[requestKey]Key
	deleting map[string]time.Time                             // by uid: accepted deletions of what is still there
	gone     map[string]time.Time                             // by uid: tombstones
	answered map[requestKey]time.Time                         // create calls whose sandbox is gone
	removed  map[identity.Fence]time.Time                     // containers that are certainly gone
	graves   map[string]map[identity.Fence]*agentv1.Tombstone // by uid: what agents keep
	pruned   time.Time
	deletes  *cache.LRUExpireCache // requestKey -> Deleted; has a lock of its own
	watchers map[*Watch]struct{}
}

// New returns an empty store.
func New(c clock.PassiveClock) *Store {
	return &Store{
		deletes: cache.NewLRUExpireCacheWithClock(deletesLimit, c),
		clock:   c, entries: map[Key]*entry{}, byAgent: map[string]map[identity.Fence]Key{}, requests: map[requestKey]Key{},
		deleting: map[string]time.Time{}, gone: map[string]time.Time{}, answered: map[requestKey]time.Time{}, watchers: map[*Watch]struct{}{},
		graves: map[string]map[identity.Fence]*agentv1.Tombstone{}, removed: map[identity.Fence]time.Time{},
		sorted: btree.NewG(32, func(a, b Key) bool { return a.Compare(b) < 0 }),
	}
}

// snapshot is what is known of a name now. The lock is held.
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

// change does what changes what is known of a name, given what was known before, and then brings the indexes up to date
// and tells watchers. The lock is held.
func (s *Store) change(key Key, do func(e *entry, before snapshot)) {
	e := s.entries[key]
	if e == nil {
		e = &entry{key: key}
		s.entries[key] = e
	}
	before := s.snapshot(key)
	do(e, before)
	s.settle(e)
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

// settle drops a record that has done its service, and looks for the report that counts where nothing else is known.
func (s *Store) settle(e *entry) {
	if e.resource != nil && e.record != nil {
		same := e.resource.EffectiveUID() == e.record.Record.GetFence().GetSandboxUid()
		if !same || e.resource.Status.Phase != "" { // until then the record knows more of the status
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

// index keeps what finds names in step with what is to be seen of one.
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

// Get returns one sandbox; false if there is none.
func (s *Store) Get(key Key) (Item, bool) {
	s.mu.Lock()
	n := s.snapshot(key)
	s.mu.Unlock()
	if !n.seen() {
		return Item{}, false
	}
	return n.item(), true
}

// ByRequest returns the sandbox that a create call made; false if there is none.
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

// RequestGone tells whether a create call made a sandbox that is gone.
func (s *Store) RequestGone(namespace, requestID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.answered[requestKey{namespace, requestID}]
	return ok
}

// Gone tells whether the sandbox of a uid is known to be gone. A uid is never used again.
func (s *Store) Gone(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.gone[uid]
	return ok
}

// Deleting tells whether the deletion of a uid was accepted, or it is gone already.
func (s *Store) Deleting(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, deleting := s.deleting[uid]
	_, gone := s.gone[uid]
	return deleting || gone
}

// Len is the number of sandboxes.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sorted.Len()
}

// SetRecord shows a sandbox whose custom resource is not written yet, and returns it as the record tells it.
func (s *Store) SetRecord(r *Record) Item {
	told := snapshot{key: Key{r.Record.GetNamespace(), r.Record.GetName()}, record: r}
	s.mu.Lock()
	s.change(told.key, func(e *entry, _ snapshot) {
		e.record = r
		told.reports, told.deleting = e.reports, s.deleting[told.uid()]
	})
	s.mu.Unlock()
	return told.item()
}

// MarkDeleting shows a sandbox as being deleted from now on.
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

// shows tells whether the sandbox of a uid is what is to be seen of a name. The lock is held.
func (s *Store) shows(key Key, uid string) bool {
	n := s.snapshot(key)
	return n.seen() && n.uid() == uid
}

// Bury forgets a sandbox that is gone and remembers its uid, so that no late word brings it back. It returns false, and
// does nothing, if its custom resource is there.
func (s *Store) MarkGone(key Key, uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil && e.resource != nil && e.resource.EffectiveUID() == uid {
		return false
	}
	s.change(key, func(e *entry, before snapshot) {
		s.bury(uid, before)
		e.forgetRecord(uid)
	})
	return true
}

// forgetRecord drops the record if it is that of a uid.
func (e *entry) forgetRecord(uid string) {
	if e.record != nil && e.record.Record.GetFence().GetSandboxUid() == uid {
		e.record = nil
	}
}

// bury sets the tombstones of a uid and, if it was the one to be seen, of its create call. The lock is held.
func (s *Store) bury(uid string, before snapshot) {
	now := s.clock.Now()
	delete(s.deleting, uid)
	s.gone[uid] = now
	if id := before.requestID(); id != "" && before.uid() == uid && !Abandoned(before.resource) {
		s.answered[requestKey{before.key.Namespace, id}] = now
	}
	s.prune(now)
}

// prune forgets tombstones that are older than any message.
func (s *Store) prune(now time.Time) {
	if now.Sub(s.pruned) < time.Minute {
		return
	}
	s.pruned = now
	old := func(at time.Time) bool { return now.Sub(at) > tombstoneTTL }
	maps.DeleteFunc(s.gone, func(uid string, at time.Time) bool { return old(at) && s.graves[uid] == nil })
	maps.DeleteFunc(s.answered, func(_ requestKey, at time.Time) bool { return old(at) })
	maps.DeleteFunc(s.removed, func(_ identity.Fence, at time.Time) bool { return old(at) })
}

// Abandoned tells whether a custom resource is marked as that of a create call that failed; nil is not.
func Abandoned(sb *v1alpha1.Sandbox) bool {
	return sb != nil && sb.Annotations[v1alpha1.AnnotationAbandoned] != ""
}

// SetResource takes a custom resource from the informer, or from the answer to a write. One that is older than what is
// known, or whose sandbox is gone, is ignored.
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

// older compares resource versions, which the API server documents as growing numbers for one kind of resource.
func older(a, b string) bool {
	x, errA := strconv.ParseUint(a, 10, 64)
	y, errB := strconv.ParseUint(b, 10, 64)
	return errA == nil && errB == nil && x < y
}

// RemoveResource tells that a custom resource is gone.
func (s *Store) RemoveResource(sb *v1alpha1.Sandbox) {
	s.rememberDelete(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.change(Key{sb.Namespace, sb.Name}, func(e *entry, before snapshot) {
		s.bury(sb.EffectiveUID(), before)
		if e.resource != nil && e.resource.UID == sb.UID {
			e.resource = nil
		}
		e.forgetRecord(sb.EffectiveUID())
	})
}

// sameSandbox tells whether two containers are attempts of one sandbox. Only the last can have been acknowledged: a create
// goes on to the next agent when it does not know what became of it on the one before.
func sameSandbox(a, b *agentv1.SandboxReport) bool {
	return a.GetRecord().GetFence().GetSandboxUid() == b.GetRecord().GetFence().GetSandboxUid()
}

// orphaned tells whether a report alone makes a sandbox to be seen: acknowledged, not written, not known to be gone.
func (s *Store) orphaned(r *agentv1.SandboxReport) bool {
	_, gone := s.gone[r.GetRecord().GetFence().GetSandboxUid()]
	_, removed := s.removed[identity.FenceOf(r.GetRecord().GetFence())]
	if gone || removed || r.GetPersisted() {
		return false
	}
	return r.GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED
}
