// Package feed publishes the deletions that this process makes. A slow listener misses some, and learns how many; publishing
// never blocks. All methods may be called concurrently.
package feed

import (
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// backlog is the number of deletions that are buffered for a listener.
const backlog = 1024

// Deletion is a deletion that was made. The causes of Pods' deletions are the reasons of podgc/plan, prefixed with "pod-".
type Deletion struct {
	Object graph.Object
	Policy graph.Policy
	Cause  string
	Time   time.Time
}

// Item is what a listener receives: a deletion, and how many were dropped before it.
type Item struct {
	Deletion

	Missed int
}

// Feed publishes deletions. The zero value has no listeners.
type Feed struct {
	mu        sync.Mutex
	listeners map[*listener]struct{}
}

type listener struct {
	items  chan Item
	missed int
}

// Publish sends a deletion to all listeners.
func (f *Feed) Publish(d Deletion) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l := range f.listeners {
		select {
		case l.items <- Item{Deletion: d, Missed: l.missed}:
			l.missed = 0
		default:
			l.missed++
		}
	}
}

// Listen returns what is published from now on. The caller must call stop.
func (f *Feed) Listen() (items <-chan Item, stop func()) {
	l := &listener{items: make(chan Item, backlog)}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listeners == nil {
		f.listeners = map[*listener]struct{}{}
	}
	f.listeners[l] = struct{}{}
	return l.items, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.listeners, l)
	}
}
