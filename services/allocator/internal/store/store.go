// Package store is the one view of sandboxes behind Get, List and Watch. It lays over each other what three sources tell:
// the custom resources of the informer, the records of fast creates that are not written yet, and the agents' reports. It
// does no I/O. All methods may be called concurrently. What it returns is shared and must not be changed.
//
// Of one name, a custom resource comes before a record, and a record before a report that nobody else knows (after a
// restart of the allocator). A report counts only if its fence is the one in force.
package store

import (
	"cmp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/btree"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
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
	item     *Item // nil while nothing is to be seen
}

// Store is the view.
type Store struct {
	clock clock.PassiveClock

	mu       sync.Mutex
	entries  map[Key]*entry
	sorted   *btree.BTreeG[Key]           // of the entries with an item
	byAgent  map[string]map[fleet.Key]Key // where reports of an agent are
	requests map[requestKey]Key
	deleting map[string]time.Time                        // by uid: accepted deletions of what is still there
	gone     map[string]time.Time                        // by uid: tombstones
	answered map[requestKey]time.Time                    // create calls whose sandbox is gone
	graves   map[string]map[fleet.Key]*agentv1.Tombstone // by uid: what agents keep
	pruned   time.Time
	watchers map[*Watch]struct{}
}

// New returns an empty store.
func New(c clock.PassiveClock) *Store {
	return &Store{
		clock: c, entries: map[Key]*entry{}, byAgent: map[string]map[fleet.Key]Key{}, requests: map[requestKey]Key{},
		deleting: map[string]time.Time{}, gone: map[string]time.Time{}, answered: map[requestKey]time.Time{}, watchers: map[*Watch]struct{}{},
		graves: map[string]map[fleet.Key]*agentv1.Tombstone{},
		sorted: btree.NewG(32, func(a, b Key) bool { return a.Compare(b) < 0 }),
	}
}

func (s *Store) entry(key Key) *entry {
	e, ok := s.entries[key]
	if !ok {
		e = &entry{key: key}
		s.entries[key] = e
	}
	return e
}

// Get returns one sandbox; false if there is none.
func (s *Store) Get(key Key) (Item, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.entries[key]; ok && e.item != nil {
		return *e.item, true
	}
	return Item{}, false
}

// ByRequest returns the sandbox that a create call made; false if there is none.
func (s *Store) ByRequest(namespace, requestID string) (Item, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key, ok := s.requests[requestKey{namespace, requestID}]
	if !ok {
		return Item{}, false
	}
	return *s.entries[key].item, true
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
	key := Key{r.Record.GetNamespace(), r.Record.GetName()}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entry(key)
	e.record = r
	item := s.recordView(e, r)
	s.refresh(e)
	return *item
}

// MarkDeleting shows a sandbox as being deleted from now on.
func (s *Store) MarkDeleting(key Key, uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.deleting[uid]; !ok {
		s.deleting[uid] = s.clock.Now()
	}
	if e, ok := s.entries[key]; ok {
		s.refresh(e)
	}
}

// Bury forgets a sandbox that is gone and remembers its uid, so that no late word brings it back. It returns false, and
// does nothing, if its custom resource is there.
func (s *Store) Bury(key Key, uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e != nil && e.resource != nil && e.resource.EffectiveUID() == uid {
		return false
	}
	s.bury(uid, e)
	if e == nil {
		return true
	}
	if e.record != nil && e.record.Record.GetFence().GetSandboxUid() == uid {
		e.record = nil
	}
	s.refresh(e)
	return true
}

// bury sets the tombstones of a uid and, if e shows its sandbox, of the create call. The lock is held.
func (s *Store) bury(uid string, e *entry) {
	now := s.clock.Now()
	delete(s.deleting, uid)
	s.gone[uid] = now
	if e != nil && e.item != nil && e.item.RequestID != "" && e.item.Sandbox.GetUid() == uid && !Abandoned(e.item.Resource) {
		s.answered[requestKey{e.key.Namespace, e.item.RequestID}] = now
	}
	if now.Sub(s.pruned) < time.Minute {
		return
	}
	s.pruned = now
	for uid, at := range s.gone {
		if now.Sub(at) > tombstoneTTL && s.graves[uid] == nil {
			delete(s.gone, uid)
		}
	}
	for rk, at := range s.answered {
		if now.Sub(at) > tombstoneTTL {
			delete(s.answered, rk)
		}
	}
}

// Abandoned tells whether a custom resource is marked as that of a create call that failed; nil is not.
func Abandoned(sb *v1alpha1.Sandbox) bool {
	return sb != nil && sb.Annotations[v1alpha1.AnnotationAbandoned] != ""
}

// SetResource takes a custom resource from the informer, or from the answer to a write. One that is older than what is
// known, or whose sandbox is gone, is ignored.
func (s *Store) SetResource(sb *v1alpha1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.gone[sb.EffectiveUID()]; ok {
		return
	}
	e := s.entry(Key{sb.Namespace, sb.Name})
	if e.resource != nil && older(sb.ResourceVersion, e.resource.ResourceVersion) {
		return
	}
	e.resource = sb
	s.refresh(e)
}

// older compares resource versions, which the API server documents as growing numbers for one kind of resource.
func older(a, b string) bool {
	x, errA := strconv.ParseUint(a, 10, 64)
	y, errB := strconv.ParseUint(b, 10, 64)
	return errA == nil && errB == nil && x < y
}

// RemoveResource tells that a custom resource is gone.
func (s *Store) RemoveResource(sb *v1alpha1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[Key{sb.Namespace, sb.Name}]
	s.bury(sb.EffectiveUID(), e)
	if e == nil {
		return
	}
	if e.resource != nil && e.resource.UID == sb.UID {
		e.resource = nil
	}
	if e.record != nil && e.record.Record.GetFence().GetSandboxUid() == sb.EffectiveUID() {
		e.record = nil
	}
	s.refresh(e)
}

// refresh computes what is to be seen of an entry, tells watchers if it changed, and drops an entry that is empty. The
// lock is held.
func (s *Store) refresh(e *entry) {
	if e.resource != nil && e.record != nil {
		same := e.resource.EffectiveUID() == e.record.Record.GetFence().GetSandboxUid()
		if !same || e.resource.Status.Phase != "" { // until then the record knows more of the status
			e.record = nil
		}
	}
	old := e.item
	e.item = s.view(e)
	s.index(e, old)
	if len(e.reports) == 0 && e.resource == nil && e.record == nil {
		delete(s.entries, e.key)
	}
	var before, after *sandboxv1.Sandbox
	if old != nil {
		before = old.Sandbox
	}
	if e.item != nil {
		after = e.item.Sandbox
	}
	if before != nil && after != nil && before.GetUid() != after.GetUid() {
		s.publish(before, nil)
		before = nil
	}
	if before == after || (before != nil && after != nil && proto.Equal(before, after)) {
		return
	}
	s.publish(before, after)
}

func (s *Store) index(e *entry, old *Item) {
	if old != nil && old.RequestID != "" {
		rk := requestKey{e.key.Namespace, old.RequestID}
		if s.requests[rk] == e.key {
			delete(s.requests, rk)
		}
	}
	if e.item != nil && e.item.RequestID != "" {
		s.requests[requestKey{e.key.Namespace, e.item.RequestID}] = e.key
	}
	switch {
	case e.item != nil && old == nil:
		s.sorted.ReplaceOrInsert(e.key)
	case e.item == nil && old != nil:
		s.sorted.Delete(e.key)
	}
}

// view is what is to be seen of an entry, nil for nothing. The lock is held.
func (s *Store) view(e *entry) *Item {
	switch {
	case e.resource != nil:
		return s.resourceView(e)
	case e.record != nil:
		return s.recordView(e, e.record)
	}
	var best *agentv1.SandboxReport
	for _, r := range e.reports.sorted() {
		switch {
		case !s.orphaned(r):
		case best == nil, sameSandbox(best, r) && r.GetRecord().GetFence().GetAttempt() > best.GetRecord().GetFence().GetAttempt():
			best = r
		}
	}
	if best == nil {
		return nil
	}
	return s.recordView(e, &Record{Record: best.GetRecord(), Report: best})
}

// sameSandbox tells whether two containers are attempts of one sandbox. Only the last can have been acknowledged: a create
// goes on to the next agent when it does not know what became of it on the one before.
func sameSandbox(a, b *agentv1.SandboxReport) bool {
	return a.GetRecord().GetFence().GetSandboxUid() == b.GetRecord().GetFence().GetSandboxUid()
}

// orphaned tells whether a report alone makes a sandbox to be seen: acknowledged, not written, not known to be gone.
func (s *Store) orphaned(r *agentv1.SandboxReport) bool {
	_, gone := s.gone[r.GetRecord().GetFence().GetSandboxUid()]
	if gone || r.GetPersisted() {
		return false
	}
	return r.GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED
}

func (s *Store) resourceView(e *entry) *Item {
	sb := convert.ToProto(e.resource)
	item := &Item{Key: e.key, Sandbox: sb, Resource: e.resource, RequestID: e.resource.Annotations[v1alpha1.AnnotationRequestID]}
	if a, err := e.resource.Assignment(); err == nil && a != nil {
		item.Fence = &agentv1.Fence{SandboxUid: a.SandboxUID, Attempt: a.Attempt, AgentUid: a.AgentUID}
		setAssigned(sb.GetStatus(), a.AgentPod, a.NodeName, a.Attempt)
	}
	overlay(sb.GetStatus(), e.latest(item.Fence, e.record))
	s.overlayDeletion(sb)
	return item
}
