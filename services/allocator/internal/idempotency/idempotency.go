// Package idempotency carries out a request that is repeated under one request_id once. A repetition waits for the first
// call while that runs, and gets its answer, also later, as long as this process remembers it; another request under the
// same id is refused. Errors are not remembered. It does no I/O, and knows nothing of former leaders: callers look for
// durable facts themselves. All methods may be called concurrently.
package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Bounds of the answers that are remembered.
const (
	// TTL is how long an answer is remembered.
	TTL = 10 * time.Minute
	// Limit is how many answers are remembered.
	Limit = 10000
)

// Key names a request. Each method has its own request_ids.
type Key struct{ Namespace, RequestID string }

// Calls are the requests of one method, whose answers are of type R. What an answer points to must not be changed.
type Calls[R any] struct {
	// mu guards flights, and orders the end of a flight and its answer. The answers have their own lock, below it.
	mu      sync.Mutex
	flights map[Key]*flight[R]
	answers *cache.LRUExpireCache // Key -> answer[R]
}

// flight is a call that runs, for others with the same request_id to wait for.
type flight[R any] struct {
	digest string
	done   chan struct{}
	// Set before done is closed.
	response R
	err      error
}

type answer[R any] struct {
	digest   string
	response R
}

// New returns a memory without answers.
func New[R any](c clock.PassiveClock) *Calls[R] {
	return &Calls[R]{flights: map[Key]*flight[R]{}, answers: cache.NewLRUExpireCacheWithClock(Limit, c)}
}

// errUnanswered is how a flight ends whose call panicked.
var errUnanswered = errors.New("the request was not answered")

// Do calls call, or waits for the call that runs under the same key and returns its answer: then shared is true. call gets
// the answer that is remembered, nil if none is, and decides what that is worth now. A waiting caller whose first call ends
// by that caller's own cancellation or deadline takes its turn. digest identifies the request: two requests of different
// digests under one key are a REQUEST_ID_REUSED error. Requests without a request_id are not shared.
func (c *Calls[R]) Do(ctx context.Context, key Key, digest string, call func(prior *R) (R, error)) (response R, shared bool, err error) {
	if key.RequestID == "" {
		response, err = call(nil)
		return response, false, err
	}
	var none R
	for {
		f, first := c.join(key, digest)
		if first {
			response, err = c.run(key, f, call)
			return response, false, err
		}
		if f.digest != digest {
			return none, false, Reused(key.RequestID)
		}
		select {
		case <-ctx.Done():
			return none, false, fault.Unsettled(fault.FromContext(ctx, "waiting for the same request", nil))
		case <-f.done:
		}
		switch {
		case errors.Is(f.err, context.Canceled), errors.Is(f.err, context.DeadlineExceeded), errors.Is(f.err, errUnanswered):
			continue
		case f.err != nil:
			return none, false, f.err
		}
		return f.response, true, nil
	}
}

// join returns the call that runs under a key; first reports that it is the caller's to carry out.
func (c *Calls[R]) join(key Key, digest string) (f *flight[R], first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f, ok := c.flights[key]; ok {
		return f, false
	}
	f = &flight[R]{digest: digest, done: make(chan struct{}), err: errUnanswered}
	c.flights[key] = f
	return f, true
}

func (c *Calls[R]) run(key Key, f *flight[R], call func(prior *R) (R, error)) (R, error) {
	defer func() { // also after a panic: others wait
		c.mu.Lock()
		delete(c.flights, key)
		if _, known := c.answers.Get(key); f.err == nil && !known { // a repetition does not make it younger
			c.answers.Add(key, answer[R]{f.digest, f.response}, TTL)
		}
		c.mu.Unlock()
		close(f.done)
	}()
	var prior *R
	if a, ok := c.answers.Get(key); ok {
		if a := a.(answer[R]); a.digest == f.digest {
			prior = &a.response
		} else {
			f.err = Reused(key.RequestID)
			return f.response, f.err
		}
	}
	f.response, f.err = call(prior)
	return f.response, f.err
}

// Peek returns whether a call runs under a key, and the answer that is remembered, nil if none is.
func (c *Calls[R]) Peek(key Key) (running bool, prior *R) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, running = c.flights[key]
	if a, ok := c.answers.Get(key); ok {
		a := a.(answer[R])
		prior = &a.response
	}
	return running, prior
}

// Reused returns the error of a request_id that was used with another request.
func Reused(id string) error {
	return fault.New(errdefs.ErrAlreadyExists, fault.RequestIDReused, "request_id %q was used with another request", id).
		With("request_id", id)
}

// Digest identifies a request by its JSON. It is kept on custom resources, so it stays the same across versions of this
// program. The request must be one that always marshals.
func Digest(request any) string {
	raw, err := json.Marshal(request)
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:16])
}
