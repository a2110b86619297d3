package sandbox

import (
	"container/list"
	"time"
)

const (
	maxTombstones = 8192
	tombstoneAge  = time.Hour
)

// tombstones remember which attempts were deleted, so that a create that comes late is refused. They are bounded in
// number, the oldest going first, and in age. Not safe for concurrent use.
type tombstones struct {
	limit int
	age   time.Duration
	order *list.List // of tombstone, the oldest first
	byUID map[string]*list.Element
}

type tombstone struct {
	uid     string
	attempt int64
	at      time.Time
}

func newTombstones(limit int, age time.Duration) *tombstones {
	return &tombstones{limit: limit, age: age, order: list.New(), byUID: map[string]*list.Element{}}
}

// put remembers that all attempts of uid up to attempt were deleted.
func (t *tombstones) put(uid string, attempt int64, now time.Time) {
	if el, ok := t.byUID[uid]; ok {
		if old, ok := el.Value.(tombstone); ok {
			attempt = max(attempt, old.attempt)
		}
		t.order.Remove(el)
	}
	t.byUID[uid] = t.order.PushBack(tombstone{uid, attempt, now})
	for t.order.Len() > t.limit {
		t.drop(t.order.Front())
	}
}

// get is the latest attempt of uid that was deleted.
func (t *tombstones) get(uid string, now time.Time) (int64, bool) {
	for el := t.order.Front(); el != nil; el = t.order.Front() {
		if s, ok := el.Value.(tombstone); ok && now.Sub(s.at) <= t.age {
			break
		}
		t.drop(el)
	}
	el, ok := t.byUID[uid]
	if !ok {
		return 0, false
	}
	s, ok := el.Value.(tombstone)
	return s.attempt, ok
}

func (t *tombstones) drop(el *list.Element) {
	if s, ok := t.order.Remove(el).(tombstone); ok {
		delete(t.byUID, s.uid)
	}
}
