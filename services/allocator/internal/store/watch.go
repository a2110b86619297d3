package store

import (
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// watchBuffer is how many changes a watcher may lag behind before it is ended.
const watchBuffer = 1024

// Watch is one subscription to changes of sandboxes.
type Watch struct {
	store  *Store
	filter Filter
	events chan *sandboxv1.WatchSandboxesResponse
}

// Watch returns the sandboxes that match, in the order of namespace and name, and a subscription to every change after
// that. Close it when done.
func (s *Store) Watch(f Filter) ([]*sandboxv1.Sandbox, *Watch) {
	w := &Watch{store: s, filter: f, events: make(chan *sandboxv1.WatchSandboxesResponse, watchBuffer)}
	return views(s.subscribe(w)), w
}

func (s *Store) subscribe(w *Watch) (initial []snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[w] = struct{}{}
	look := func(key Key) bool {
		if n := s.snapshot(key); w.filter.matches(&n) {
			initial = append(initial, n)
		}
		return true
	}
	if f := w.filter; f.Namespace != "" && f.Name != "" { // every create watches its name: not at the price of looking at all there are
		look(Key{f.Namespace, f.Name})
	} else {
		s.sorted.Ascend(look)
	}
	return initial
}

// Events carries the changes. It is closed when the watcher was too slow, or closed itself.
func (w *Watch) Events() <-chan *sandboxv1.WatchSandboxesResponse { return w.events }

// Close ends the subscription. It may be called again.
func (w *Watch) Close() {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	w.store.drop(w)
}

func (s *Store) drop(w *Watch) {
	if _, ok := s.watchers[w]; ok {
		delete(s.watchers, w)
		close(w.events)
	}
}

// publish tells each watcher of a change as its filter sees it; one that cannot take it is dropped. The lock is held.
func (s *Store) publish(before, after snapshot) {
	was, is := view{snapshot: &before}, view{snapshot: &after}
	for w := range s.watchers {
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
			s.drop(w)
		}
	}
}

// view is made at most once, and only if somebody watches.
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
