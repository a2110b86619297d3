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
	"strconv"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Key names a sandbox.
type Key struct {
	Namespace, Name string
}

// KeyOf returns the name of a custom resource.
func KeyOf(sb *v1alpha1.Sandbox) Key { return Key{sb.Namespace, sb.Name} }

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
	// Failure is why it is about to be deleted; nil while it is not.
	Failure *Failure
}

// Failure is why a sandbox without a custom resource fails.
type Failure struct{ Reason, Message string }

// Item is one sandbox.
type Item struct {
	Key Key
	// Sandbox is the API's view.
	Sandbox *sandboxv1.Sandbox
	// Fence is the one in force; nil while no agent is assigned, or if the custom resource names a container that is not this
	// sandbox's.
	Fence *agentv1.Fence
	// Resource is the custom resource; nil while none is known.
	Resource *v1alpha1.Sandbox
	// Outline says that only the metadata of Resource are known: neither its spec and status nor those of Sandbox count.
	Outline bool
	// RequestID of the create call; empty if it had none.
	RequestID string
	// Superseded are the earlier attempts under the name whose outcome was not known when it was created.
	Superseded []*agentv1.SupersededAttempt
}

// Counter counts the visible sandboxes of each namespace. It is called with the store's lock held, and must not block.
type Counter interface {
	// Shown is called when a sandbox becomes visible, and Hidden when it no longer is.
	Shown(namespace, uid string)
	Hidden(namespace string)
}

// Store is the view. It is a lock around its parts.
type Store struct {
	deletes deletes // has a lock of its own

	mu     sync.Mutex
	memory *memory
	table  *table
}

// New returns an empty store.
func New(c clock.PassiveClock) *Store {
	m := newMemory(c)
	return &Store{deletes: newDeletes(c), memory: m, table: newTable(m)}
}

// CountIn has the visible sandboxes counted. It is called before any other method.
func (s *Store) CountIn(c Counter) { s.table.counter = c }

// Get returns one sandbox, and whether it exists.
func (s *Store) Get(key Key) (Item, bool) {
	s.mu.Lock()
	n := s.table.snapshot(key)
	s.mu.Unlock()
	if !n.seen() {
		return Item{}, false
	}
	return s.verified(n.item()), true
}

// verified returns an item without its fence if that is another sandbox's: what a custom resource says of its container counts
// only as far as no agent contradicts it.
func (s *Store) verified(item Item) Item {
	if item.Fence == nil || item.Resource == nil {
		return item
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if fence := identity.FenceOf(item.Fence); fence.SandboxUID != item.Resource.EffectiveUID() || !s.table.mayBeOf(item.Key, fence) {
		item.Fence, item.Superseded = nil, nil
	}
	return item
}

// ByRequest returns the sandbox of a create call, and whether it exists.
func (s *Store) ByRequest(namespace, requestID string) (Item, bool) {
	s.mu.Lock()
	key, ok := s.table.requests[requestKey{namespace, requestID}]
	n := s.table.snapshot(key)
	s.mu.Unlock()
	if !ok {
		return Item{}, false
	}
	return s.verified(n.item()), true
}

// RequestGone reports whether the sandbox of a create call was deleted.
func (s *Store) RequestGone(namespace, requestID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.memory.answered[requestKey{namespace, requestID}]
	return ok
}

// Gone reports whether the sandbox of a name and uid is known to be deleted. Uids are never reused.
func (s *Store) Gone(key Key, uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.memory.isGone(incarnation{key, uid})
}

// Deleting reports whether the deletion of the sandbox of a name and uid was accepted or has finished.
func (s *Store) Deleting(key Key, uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := incarnation{key, uid}
	_, deleting := s.memory.deleting[i]
	return deleting || s.memory.isGone(i)
}

// Len returns the number of sandboxes.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.sorted.Len()
}

// SetRecord makes a sandbox visible whose custom resource is not written yet, and returns it as the record describes it.
func (s *Store) SetRecord(r *Record) Item {
	recorded := snapshot{key: Key{r.Record.GetNamespace(), r.Record.GetName()}, record: r}
	s.mu.Lock()
	s.table.change(recorded.key, func(e *entry, _ snapshot) {
		e.record = r
		recorded.reports, recorded.deleting = e.reports, s.memory.deleting[incarnation{recorded.key, recorded.uid()}]
	})
	s.mu.Unlock()
	return recorded.item()
}

// MarkDeleting marks a sandbox as being deleted.
func (s *Store) MarkDeleting(key Key, uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.change(key, func(*entry, snapshot) { s.memory.setDeleting(incarnation{key, uid}) })
}

// MarkFailed shows a sandbox without a custom resource as failed, so that watches show why MarkGone, which follows, removes it.
func (s *Store) MarkFailed(key Key, uid, reason, message string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.change(key, func(e *entry, _ snapshot) {
		if e.record == nil || e.record.Record.GetFence().GetSandboxUid() != uid {
			return
		}
		failed := *e.record
		failed.Failure = &Failure{Reason: reason, Message: message}
		e.record = &failed
	})
}

// MarkGone removes a deleted sandbox and remembers its uid, so that no delayed message makes it visible again. It returns
// false, and does nothing, if its custom resource exists.
func (s *Store) MarkGone(key Key, uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.table.entries[key]; e != nil && e.resource != nil && e.resource.uid == uid {
		return false
	}
	s.table.change(key, func(e *entry, before snapshot) {
		s.memory.setGone(incarnation{key, uid}, before)
		e.dropRecord(uid)
	})
	return true
}

// SetResource sets a custom resource from the informer, or from the answer to a write. It is ignored if it is older than the
// known one, or its sandbox was deleted.
func (s *Store) SetResource(sb *v1alpha1.Sandbox) {
	if sb.DeletionTimestamp != nil {
		s.deletes.addResource(sb)
	}
	p := s.table.codec.pack(sb)
	key := Key{shared(sb.Namespace), strings.Clone(sb.Name)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memory.isGone(incarnation{key, p.uid}) {
		return
	}
	if e := s.table.entries[key]; e != nil && e.resource != nil && older(p.version, e.resource.version) {
		return
	}
	s.table.change(key, func(e *entry, _ snapshot) { e.resource = p })
}

// SetOutline sets a custom resource of which only the metadata are known, from the first list. It is ignored if more is known, or the
// sandbox was deleted.
func (s *Store) SetOutline(sb *v1alpha1.Sandbox) {
	if sb.DeletionTimestamp != nil {
		s.deletes.addResource(sb)
	}
	p := packOutline(sb)
	key := Key{shared(sb.Namespace), strings.Clone(sb.Name)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.table.entries[key]; e != nil && e.resource != nil || s.memory.isGone(incarnation{key, p.uid}) {
		return
	}
	s.table.change(key, func(e *entry, _ snapshot) { e.resource = p })
}

// Fill sets the whole of a custom resource of which only the metadata are known, and is ignored otherwise: unlike SetResource, it takes
// what was read some time ago for no evidence that the resource exists.
func (s *Store) Fill(sb *v1alpha1.Sandbox) {
	key := KeyOf(sb)
	s.mu.Lock()
	e := s.table.entries[key]
	fits := func() bool {
		return e != nil && e.resource != nil && e.resource.outline && e.resource.objectUID == sb.UID && !older(sb.ResourceVersion, e.resource.version)
	}
	needed := fits()
	s.mu.Unlock()
	if !needed {
		return
	}
	p := s.table.codec.pack(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e = s.table.entries[key]; fits() {
		s.table.change(e.key, func(e *entry, _ snapshot) { e.resource = p })
	}
}

// Filled reports whether no custom resource is known by its metadata alone.
func (s *Store) Filled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.outlines == 0
}

// older compares resource versions, which are increasing numbers for one kind of resource.
func older(a, b string) bool {
	x, errA := strconv.ParseUint(a, 10, 64)
	y, errB := strconv.ParseUint(b, 10, 64)
	return errA == nil && errB == nil && x < y
}

// RemoveResource removes a custom resource that was deleted in the API server.
func (s *Store) RemoveResource(sb *v1alpha1.Sandbox) {
	s.deletes.addResource(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	key := KeyOf(sb)
	s.table.change(key, func(e *entry, before snapshot) {
		s.memory.setGone(incarnation{key, sb.EffectiveUID()}, before)
		if e.resource != nil && e.resource.objectUID == sb.UID {
			e.resource = nil
		}
		e.dropRecord(sb.EffectiveUID())
	})
}

// Unlisted returns the custom resources that a complete list of a resource version does not have, so that they were deleted before. Those
// that are newer may exist.
func (s *Store) Unlisted(listed map[types.UID]struct{}, version string) []*v1alpha1.Sandbox {
	var missing []*packed
	s.mu.Lock()
	for _, e := range s.table.entries {
		if e.resource == nil || older(version, e.resource.version) {
			continue
		}
		if _, ok := listed[e.resource.objectUID]; !ok {
			missing = append(missing, e.resource)
		}
	}
	s.mu.Unlock()
	var out []*v1alpha1.Sandbox
	for _, p := range missing {
		out = append(out, s.table.codec.unpack(p))
	}
	return out
}
