// Package tombstone owns what an agent remembers of deletions: the tombstones that its callers had it keep, in one file
// each, and, in memory only, which attempts were deleted of late. It does the disk I/O and puts the calls on one sandbox's
// tombstone in order; it knows nothing of containers. All methods of Store may be called concurrently.
//
//	           Put                     written              Forget              container gone, file removed
//	(nothing) ------> being written -----------> reported ---------> forgotten ------------------> (nothing)
//	    ^                 | failed                  ^                    |
//	    +-----------------+                         +--------- Put ------+
//
// A tombstone that is forgotten while its container still exists keeps its file until the container is gone, so that a crash
// in between cannot bring the sandbox back.
//
// Lock order: the turn on one sandbox (acquire), then the caller's lock, then mu. Only the turn is held over I/O. A caller
// that holds a lock of its own may call Remember, Latest, Reported and Lookup, and no other method.
package tombstone

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// Limit bounds the number of tombstones: in an outage of the API server of some hours they would fill the disk and the
	// agent's snapshot.
	Limit      = 20000
	limitRetry = 5 * time.Second

	// Deleted attempts are remembered for recentAge, and at most recentLimit of them.
	recentLimit = 8192
	recentAge   = time.Hour
)

// Files keeps small files durably; state.Dir implements it. Its calls block for the disk.
type Files interface {
	// Names returns the names of all files.
	Names() ([]string, error)
	// Read returns a file, or nil without an error if there is none.
	Read(name string) ([]byte, error)
	// Write creates or replaces a file. Once it has returned, the file is durable.
	Write(name string, data []byte) error
	// Remove removes a file durably. A file that does not exist is removed already.
	Remove(name string) error
}

// Store keeps the tombstones of one agent. Make it with Open.
type Store struct {
	files   Files
	publish func(*agentv1.AgentDelta)
	recent  *cache.LRUExpireCache // of int64, the latest attempt deleted, by sandbox uid

	mu   sync.Mutex
	kept map[string]*record // by sandbox uid
}

// record is one sandbox's tombstone: of its latest attempt, which covers the earlier ones.
type record struct {
	tombstone *agentv1.Tombstone // as in its file; nil while the first is being written
	forgotten bool
	turn      chan struct{} // closed when the call that has the turn is done; nil if none has
}

func (r *record) attempt() int64 {
	if r == nil {
		return 0
	}
	return r.tombstone.GetFence().GetAttempt()
}

// Open reads the tombstones that an earlier agent process left. A file that cannot be read is an error, because ignoring
// it could bring a deleted sandbox back. publish receives every change; it must not call the Store.
func Open(files Files, c clock.PassiveClock, publish func(*agentv1.AgentDelta)) (*Store, error) {
	s := &Store{files: files, publish: publish, recent: cache.NewLRUExpireCacheWithClock(recentLimit, c), kept: map[string]*record{}}
	names, err := files.Names()
	if err != nil {
		return nil, fmt.Errorf("reading tombstones: %w", err)
	}
	for _, name := range names {
		raw, err := files.Read(name)
		if err != nil {
			return nil, fmt.Errorf("reading tombstones: %w", err)
		}
		t := &agentv1.Tombstone{}
		if err := proto.Unmarshal(raw, t); err != nil {
			return nil, fmt.Errorf("reading the tombstone of sandbox %s: %w", name, err)
		}
		if uid := t.GetFence().GetSandboxUid(); uid != name {
			return nil, fmt.Errorf("reading the tombstone of sandbox %s: the file is of sandbox %q: %w", name, uid, errdefs.ErrDataLoss)
		}
		s.kept[name] = &record{tombstone: t}
	}
	if reported := s.Reported(); len(reported) > 0 {
		publish(&agentv1.AgentDelta{TombstonesAdded: reported})
	}
	return s, nil
}

// Remember notes, in memory, that an attempt of a sandbox and all before it were deleted.
func (s *Store) Remember(uid string, attempt int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recent.Add(uid, max(attempt, s.recentAttempt(uid)), recentAge)
}

func (s *Store) recentAttempt(uid string) int64 {
	v, _ := s.recent.Get(uid)
	attempt, _ := v.(int64)
	return attempt
}

// Latest returns the latest attempt of a sandbox that is known to be deleted; 0 if none is.
func (s *Store) Latest(uid string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.recentAttempt(uid), s.kept[uid].attempt())
}

// Lookup returns the tombstone of a sandbox, forgotten or not; nil if there is none. It must not be modified.
func (s *Store) Lookup(uid string) *agentv1.Tombstone {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.kept[uid]; r != nil {
		return r.tombstone
	}
	return nil
}

// Reported returns the tombstones that are durable and not forgotten, sorted by sandbox uid.
func (s *Store) Reported() []*agentv1.Tombstone {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*agentv1.Tombstone
	for _, r := range s.kept {
		if r.tombstone != nil && !r.forgotten {
			out = append(out, r.tombstone)
		}
	}
	slices.SortFunc(out, func(a, b *agentv1.Tombstone) int {
		return strings.Compare(a.GetFence().GetSandboxUid(), b.GetFence().GetSandboxUid())
	})
	return out
}

// Put makes a tombstone durable and publishes it. For an attempt that has one already, a grace period that is set replaces
// the one that is kept, and the rest stays; a tombstone of a later attempt covers t. ResourceExhausted: the limit is
// reached. Unavailable: the disk failed; the tombstone may still appear after a restart. It blocks for the disk and for other
// calls on the same sandbox. Safe to repeat.
func (s *Store) Put(ctx context.Context, t *agentv1.Tombstone) error {
	uid := t.GetFence().GetSandboxUid()
	r, err := s.acquire(ctx, uid)
	if err != nil {
		return err
	}
	defer s.release(uid, r)
	next, _ := proto.Clone(t).(*agentv1.Tombstone)
	// The turn protects r.tombstone and r.forgotten against other writers, so that reading them needs no lock.
	if old := r.tombstone; r.attempt() >= t.GetFence().GetAttempt() {
		next, _ = proto.Clone(old).(*agentv1.Tombstone)
		if r.attempt() == t.GetFence().GetAttempt() && t.GetGracePeriod() != nil {
			next.GracePeriod = t.GetGracePeriod()
		}
		if proto.Equal(next, old) {
			s.restore(r)
			return nil
		}
	}
	if r.tombstone == nil && s.count() >= Limit {
		return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the agent keeps %d tombstones already", Limit).RetryIn(limitRetry)
	}
	raw, err := proto.Marshal(next)
	if err != nil {
		return fmt.Errorf("encoding the tombstone of sandbox %s: %w", uid, err)
	}
	if err := s.files.Write(uid, raw); err != nil {
		return diskError(err)
	}
	s.replace(r, next)
	return nil
}

// replace puts a tombstone that was just written into force.
func (s *Store) replace(r *record, next *agentv1.Tombstone) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delta := &agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{next}}
	if r.tombstone != nil && !r.forgotten && r.attempt() != next.GetFence().GetAttempt() {
		delta.TombstonesRemoved = []*agentv1.Fence{r.tombstone.GetFence()}
	}
	r.tombstone, r.forgotten = next, false
	s.publish(delta)
}

// restore reports a tombstone again that was forgotten.
func (s *Store) restore(r *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.forgotten {
		r.forgotten = false
		s.publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{r.tombstone}})
	}
}

// Forget drops the tombstone of exactly the fence's attempt; any other is left alone. It is no longer reported at once. Its
// file stays while exists reports that the sandbox's container does; ContainerGone then removes it. exists is called
// without the Store's lock. Unavailable: the disk failed. It blocks as Put does. Safe to repeat.
func (s *Store) Forget(ctx context.Context, fence *agentv1.Fence, exists func() bool) error {
	uid := fence.GetSandboxUid()
	r, err := s.acquire(ctx, uid)
	if err != nil {
		return err
	}
	defer s.release(uid, r)
	if r.tombstone == nil || r.attempt() != fence.GetAttempt() {
		return nil
	}
	s.Remember(uid, fence.GetAttempt()) // a create that comes late is still refused
	s.mu.Lock()
	if !r.forgotten {
		r.forgotten = true
		s.publish(&agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{r.tombstone.GetFence()}})
	}
	s.mu.Unlock()
	if exists() {
		return nil
	}
	return s.drop(uid, r)
}

// ContainerGone calls removed, which takes the container out of the caller's state, while no tombstone of the sandbox is
// being written: so watchers learn of a tombstone before they learn that the container is gone. Then it removes the file
// of a tombstone that was forgotten. An error is the disk's, and then the next agent process reports the tombstone again.
func (s *Store) ContainerGone(uid string, removed func()) error {
	r, err := s.acquire(context.Background(), uid) // the disk is waited for
	if err != nil {
		return err
	}
	defer s.release(uid, r)
	removed()
	if !r.forgotten {
		return nil
	}
	return s.drop(uid, r)
}

// drop removes the file. The caller has the turn.
func (s *Store) drop(uid string, r *record) error {
	if err := s.files.Remove(uid); err != nil {
		return diskError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.tombstone, r.forgotten = nil, false
	return nil
}

// acquire waits for the turn on a sandbox's tombstone. release must be called.
func (s *Store) acquire(ctx context.Context, uid string) (*record, error) {
	for {
		s.mu.Lock()
		r := s.kept[uid]
		if r == nil {
			r = &record{}
			s.kept[uid] = r
		}
		turn := r.turn
		if turn == nil {
			r.turn = make(chan struct{})
		}
		s.mu.Unlock()
		if turn == nil {
			return r, nil
		}
		select {
		case <-turn:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// release ends a turn, and removes a record that holds nothing.
func (s *Store) release(uid string, r *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(r.turn)
	r.turn = nil
	if r.tombstone == nil {
		delete(s.kept, uid)
	}
}

// count returns the number of other tombstones, those that are just being written included.
func (s *Store) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kept) - 1
}

func diskError(err error) error {
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent cannot keep its state on the disk")
}
