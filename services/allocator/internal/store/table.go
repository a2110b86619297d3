package store

import (
	"cmp"

	"github.com/google/btree"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// requestKey names a create call, or a delete call.
type requestKey struct{ namespace, id string }

// entry is the sources of one name.
type entry struct {
	key      Key
	resource *packed
	record   *Record
	reports  reports
	alone    *Record // the report that makes a sandbox visible without a resource or a record; nil if none does
}

// dropRecord drops the record if it is that of a uid.
func (e *entry) dropRecord(uid string) {
	if e.record != nil && e.record.Record.GetFence().GetSandboxUid() == uid {
		e.record = nil
	}
}

// table is the entries of all names, and their indexes. Every change of an entry, and of what memory knows about its
// sandbox, goes through change. The store's lock guards it.
type table struct {
	memory   *memory
	watchers watchers
	counter  Counter // nil for none
	codec    codec

	entries  map[Key]*entry
	outlines int                               // the entries whose resource is an outline
	sorted   *btree.BTreeG[Key]                // of the visible entries
	byAgent  map[string]map[identity.Fence]Key // the entries that an agent reports on
	homes    map[string]string                 // the namespaces of agents
	requests map[requestKey]Key                // the visible entries by their create calls
}

func newTable(m *memory) *table {
	return &table{
		memory: m, codec: newCodec(), watchers: watchers{}, entries: map[Key]*entry{}, byAgent: map[string]map[identity.Fence]Key{}, homes: map[string]string{},
		requests: map[requestKey]Key{}, sorted: btree.NewG(32, func(a, b Key) bool { return a.Compare(b) < 0 }),
	}
}

// snapshot returns what is known about a name.
func (t *table) snapshot(key Key) snapshot {
	e := t.entries[key]
	if e == nil {
		return snapshot{key: key}
	}
	n := snapshot{key: key, codec: t.codec, resource: e.resource, record: cmp.Or(e.record, e.alone), reports: e.reports}
	if n.seen() {
		n.deleting = t.memory.deleting[incarnation{key, n.uid()}]
	}
	return n
}

// change calls do, which changes an entry given the snapshot before, and then updates the indexes and notifies watchers.
func (t *table) change(key Key, do func(e *entry, before snapshot)) {
	e := t.entries[key]
	if e == nil {
		e = &entry{key: key}
		t.entries[key] = e
	}
	before := t.snapshot(key)
	do(e, before)
	t.resolve(e)
	if len(e.reports) == 0 && e.resource == nil && e.record == nil {
		delete(t.entries, key)
	}
	after := t.snapshot(key)
	t.outlines += after.outlines() - before.outlines()
	t.index(&before, &after)
	t.count(&before, &after)
	if before.seen() && after.seen() && before.uid() != after.uid() {
		t.watchers.publish(before, snapshot{key: key})
		before = snapshot{key: key}
	}
	t.watchers.publish(before, after)
}

// resolve drops a record that the custom resource replaces, and selects the report that counts if there is neither.
func (t *table) resolve(e *entry) {
	if e.resource != nil && e.record != nil {
		same := e.resource.uid == e.record.Record.GetFence().GetSandboxUid()
		if !same || e.resource.recorded { // until then the record has more of the status
			e.record = nil
		}
	}
	e.alone = nil
	if e.resource != nil || e.record != nil {
		return
	}
	var best *agentv1.SandboxReport
	reports := e.reports.sorted()
	superseded := supersededBy(reports)
	for _, r := range reports {
		switch {
		case !t.memory.showsAlone(r) || superseded[identity.FenceOf(r.GetRecord().GetFence())]:
		case best == nil, sameSandbox(best, r) && r.GetRecord().GetFence().GetAttempt() > best.GetRecord().GetFence().GetAttempt():
			best = r
		}
	}
	if best != nil {
		e.alone = &Record{Record: best.GetRecord(), Report: best}
	}
}

// supersededBy returns the attempts that the records of other reports say they superseded.
func supersededBy(reports []*agentv1.SandboxReport) map[identity.Fence]bool {
	out := map[identity.Fence]bool{}
	for _, r := range reports {
		for _, a := range r.GetRecord().GetSuperseded() {
			out[identity.FenceOf(a.GetFence())] = true
		}
	}
	return out
}

// index updates the indexes of names.
func (t *table) index(before, after *snapshot) {
	if id := before.requestID(); id != "" {
		if rk := (requestKey{before.key.Namespace, id}); t.requests[rk] == before.key {
			delete(t.requests, rk)
		}
	}
	if id := after.requestID(); id != "" {
		t.requests[requestKey{after.key.Namespace, id}] = after.key
	}
	switch {
	case after.seen() && !before.seen():
		t.sorted.ReplaceOrInsert(after.key)
	case before.seen() && !after.seen():
		t.sorted.Delete(before.key)
	}
}

// count has what has changed counted.
func (t *table) count(before, after *snapshot) {
	was, is := before.seen(), after.seen()
	if t.counter == nil || !was && !is || was && is && before.uid() == after.uid() {
		return
	}
	if was {
		t.counter.Hidden(before.key.Namespace)
	}
	if is {
		t.counter.Shown(after.key.Namespace, after.uid())
	}
}

// shows reports whether a sandbox is the visible one of its name.
func (t *table) shows(i incarnation) bool {
	n := t.snapshot(i.key)
	return n.seen() && n.uid() == i.uid
}

// mayBeOf reports whether a container can be that of a name: its agent is in the namespace, and does not report it under another
// name. Users can write any fence into a custom resource.
func (t *table) mayBeOf(key Key, fence identity.Fence) bool {
	if home, ok := t.homes[fence.AgentUID]; ok && home != key.Namespace {
		return false
	}
	reported, ok := t.byAgent[fence.AgentUID][fence]
	return !ok || reported == key
}

// sameSandbox reports whether two containers are attempts of one sandbox. Only the last one can have been acknowledged: a create
// continues on the next agent when its outcome on the agent before is unknown.
func sameSandbox(a, b *agentv1.SandboxReport) bool {
	return a.GetRecord().GetFence().GetSandboxUid() == b.GetRecord().GetFence().GetSandboxUid()
}
