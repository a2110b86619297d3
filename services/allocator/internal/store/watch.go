package store

import (
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// watchBuffer is the number of changes that a watcher may lag behind before its watch ends.
const watchBuffer = 1024

// Watch is one subscription to changes of sandboxes.
type Watch struct {
	store  *Store
	filter Filter
	events chan *sandboxv1.WatchSandboxesResponse
}

// Watch returns the matching sandboxes, in the order of namespace and name, and a subscription to every later change. The caller
// must close it.
func (s *Store) Watch(f Filter) ([]*sandboxv1.Sandbox, *Watch) {
	w := &Watch{store: s, filter: f, events: make(chan *sandboxv1.WatchSandboxesResponse, watchBuffer)}
	s.mu.Lock()
	initial := s.table.subscribe(w)
	s.mu.Unlock()
	return views(initial), w
}

// subscribe adds a watcher and returns what it watches already.
func (t *table) subscribe(w *Watch) (initial []snapshot) {
	t.watchers[w] = struct{}{}
	add := func(key Key) bool {
		if n := t.snapshot(key); w.filter.matches(&n) {
			initial = append(initial, n)
		}
		return true
	}
	if f := w.filter; f.Namespace != "" && f.Name != "" { // every create watches its name, and must not examine all sandboxes
		add(Key{f.Namespace, f.Name})
	} else {
		t.sorted.Ascend(add)
	}
	return initial
}

// Events returns the channel of changes. It is closed when the watcher was too slow, or by Close.
func (w *Watch) Events() <-chan *sandboxv1.WatchSandboxesResponse { return w.events }

// Close ends the subscription. It may be called more than once.
func (w *Watch) Close() {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	w.store.table.watchers.drop(w)
}

// watchers is the open subscriptions. The store's lock guards it.
type watchers map[*Watch]struct{}

func (ws watchers) drop(w *Watch) {
	if _, ok := ws[w]; ok {
		delete(ws, w)
		close(w.events)
	}
}

// publish sends a change to each watcher as its filter sees it, and drops a watcher whose buffer is full.
func (ws watchers) publish(before, after snapshot) {
	was, is := view{snapshot: &before}, view{snapshot: &after}
	for w := range ws {
		event := &sandboxv1.WatchSandboxesResponse{}
		switch matched, matches := w.filter.matches(&before), w.filter.matches(&after); {
		case matches && !matched:
			event.Type, event.Sandbox = sandboxv1.WatchSandboxesResponse_TYPE_ADDED, is.get()
		case matches && proto.Equal(was.get(), is.get()), !matches && !matched:
			continue
		case matches:
			event.Type, event.Sandbox = sandboxv1.WatchSandboxesResponse_TYPE_MODIFIED, is.get()
		case after.seen():
			event.Type, event.Sandbox = sandboxv1.WatchSandboxesResponse_TYPE_DELETED, is.get()
		default:
			event.Type, event.Sandbox = sandboxv1.WatchSandboxesResponse_TYPE_DELETED, was.get()
		}
		select {
		case w.events <- event:
		default:
			ws.drop(w)
		}
	}
}

// view builds a view at most once, and only if a watcher needs it.
type view struct {
	snapshot *snapshot
	sandbox  *sandboxv1.Sandbox
}

func (v *view) get() *sandboxv1.Sandbox {
	if v.sandbox == nil {
		v.sandbox = v.snapshot.item().Sandbox
	}
	return v.sandbox
}
