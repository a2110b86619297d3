package store

import (
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
	s.mu.Lock()
	defer s.mu.Unlock()
	var initial []*sandboxv1.Sandbox
	look := func(key Key) bool {
		if e := s.entries[key]; e != nil && e.item != nil && f.Matches(e.item.Sandbox) {
			initial = append(initial, e.item.Sandbox)
		}
		return true
	}
	if f.Namespace != "" && f.Name != "" { // every create watches its name: not at the price of looking at all there are
		look(Key{f.Namespace, f.Name})
	} else {
		s.sorted.Ascend(look)
	}
	s.watchers[w] = struct{}{}
	return initial, w
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
func (s *Store) publish(before, after *sandboxv1.Sandbox) {
	for w := range s.watchers {
		was, is := w.filter.Matches(before), w.filter.Matches(after)
		event := &sandboxv1.WatchSandboxesResponse{Sandbox: after}
		switch {
		case is && !was:
			event.Type = sandboxv1.WatchSandboxesResponse_TYPE_ADDED
		case is:
			event.Type = sandboxv1.WatchSandboxesResponse_TYPE_MODIFIED
		case was && after != nil:
			event.Type = sandboxv1.WatchSandboxesResponse_TYPE_DELETED
		case was:
			event.Type, event.Sandbox = sandboxv1.WatchSandboxesResponse_TYPE_DELETED, before
		default:
			continue
		}
		select {
		case w.events <- event:
		default:
			s.drop(w)
		}
	}
}
