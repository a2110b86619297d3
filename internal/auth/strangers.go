package auth

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Each host may present this many credentials that turn out not to be valid, in a second on average and at once. Without a
// bound, any client that can open a connection makes the API server review as many tokens as it likes.
const (
	strangerRate  = 10
	strangerBurst = 100
	// strangerHosts bounds the hosts that are remembered, strangerIdle is for how long: a bucket is full again long before.
	strangerHosts = 16 << 10
	strangerIdle  = time.Minute
)

// strangers counts the invalid credentials of each host.
type strangers struct {
	clock clock.PassiveClock

	mu    sync.Mutex
	hosts *cache.LRUExpireCache // host -> *rate.Limiter
}

func newStrangers(c clock.PassiveClock) *strangers {
	return &strangers{clock: c, hosts: cache.NewLRUExpireCacheWithClock(strangerHosts, c)}
}

// admit returns an error if the caller's host has presented too many invalid credentials to have another one reviewed.
func (s *strangers) admit(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.hosts.Get(hostOf(ctx))
	if !ok || b.(*rate.Limiter).TokensAt(s.clock.Now()) >= 1 {
		return nil
	}
	return fault.New(errdefs.ErrResourceExhausted, fault.CallerLimitExceeded,
		"too many invalid credentials came from this address").With("limit", "invalid-credentials").RetryIn(time.Second)
}

// failed counts an invalid credential of the caller's host.
func (s *strangers) failed(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	host := hostOf(ctx)
	b, ok := s.hosts.Get(host)
	if !ok {
		b = rate.NewLimiter(strangerRate, strangerBurst)
	}
	b.(*rate.Limiter).AllowN(s.clock.Now(), 1)
	s.hosts.Add(host, b, strangerIdle)
}

type addressKey struct{}

// WithAddress returns a context that carries the address of the client that calls, before anyone knows who that is.
func WithAddress(ctx context.Context, address string) context.Context {
	return context.WithValue(ctx, addressKey{}, address)
}

// hostOf returns the address of the client without its port.
func hostOf(ctx context.Context) string {
	address, _ := ctx.Value(addressKey{}).(string)
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}
