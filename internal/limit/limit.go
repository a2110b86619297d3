// Package limit bounds what each user may ask of a server: requests a second, creates at a time, and open streams. It counts by the
// name of the user, however the user proved it, so that users behind one gateway do not share a limit. It does no I/O. All methods may
// be called concurrently; those of a nil *Limits allow everything.
package limit

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Options are the limits of each user; zero is no limit.
type Options struct {
	// Rate is how many requests a user may make in a second on average, and Burst how many at once.
	Rate  float64
	Burst int
	// Creates is how many creates of a user may run at a time, Streams how many streams may be open.
	Creates, Streams int
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.Float64Var(&o.Rate, "caller-rate", 5000, "`number` of requests that each user may make in a second on average; 0: no limit")
	fs.IntVar(&o.Burst, "caller-burst", 10000, "`number` of requests that each user may make at once")
	fs.IntVar(&o.Creates, "caller-creates", 1000, "`number` of creates of each user that may run at a time; 0: no limit")
	fs.IntVar(&o.Streams, "caller-streams", 2000, "`number` of streams (watches, logs) that each user may have open; 0: no limit")
}

// Validate returns every problem, each naming its flag.
func (o *Options) Validate() []error {
	var problems []error
	if o.Rate < 0 {
		problems = append(problems, fmt.Errorf("--caller-rate is %v, want 0 or more", o.Rate))
	}
	if o.Rate > 0 && o.Burst < 1 {
		problems = append(problems, errors.New("--caller-burst must be at least 1 with --caller-rate"))
	}
	if o.Creates < 0 {
		problems = append(problems, fmt.Errorf("--caller-creates is %d, want 0 or more", o.Creates))
	}
	if o.Streams < 0 {
		problems = append(problems, fmt.Errorf("--caller-streams is %d, want 0 or more", o.Streams))
	}
	return problems
}

// Names of the limits in errors and metrics.
const (
	requests = "requests"
	creates  = "creates"
	streams  = "streams"
)

// maxUsers bounds the users whose rates are remembered, and idle is how long one is: a bucket is full again long before.
const (
	maxUsers = 16 << 10
	idle     = time.Hour
)

// retry is the retry hint of a user who has too much open: something of it has to end.
const retry = time.Second

// Limits keeps count of each user.
type Limits struct {
	options Options
	clock   clock.PassiveClock
	refused *prometheus.CounterVec

	mu      sync.Mutex
	buckets *cache.LRUExpireCache // user -> *rate.Limiter
	open    map[key]int           // what is open now; no entry is zero
}

type key struct{ limit, user string }

// New returns limits of which nothing is used. They count refusals in r, which may be nil.
func New(o Options, c clock.PassiveClock, r prometheus.Registerer) (*Limits, error) {
	l := &Limits{options: o, clock: c, buckets: cache.NewLRUExpireCacheWithClock(maxUsers, c), open: map[key]int{},
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_caller_limited_total", Help: "Calls that were refused because their user had reached a limit (requests, creates, streams).",
		}, []string{"limit"})}
	if r == nil {
		return l, nil
	}
	if err := r.Register(l.refused); err != nil {
		return nil, fmt.Errorf("registering metrics of limits: %w", err)
	}
	return l, nil
}

// Request counts a request. The error is CALLER_LIMIT_EXCEEDED, and says when the next request is allowed.
func (l *Limits) Request(user string) error {
	if l == nil || l.options.Rate == 0 {
		return nil
	}
	now := l.clock.Now()
	r := l.bucket(user).ReserveN(now, 1)
	wait := r.DelayFrom(now)
	if wait == 0 {
		return nil
	}
	r.CancelAt(now)
	return l.exceeded(user, requests, strconv.FormatFloat(l.options.Rate, 'f', -1, 64), "a second", wait)
}

func (l *Limits) bucket(user string) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b, ok := l.buckets.Get(user); ok {
		return b.(*rate.Limiter)
	}
	b := rate.NewLimiter(rate.Limit(l.options.Rate), l.options.Burst)
	l.buckets.Add(user, b, idle)
	return b
}

// Create counts a create until done is called. The error is CALLER_LIMIT_EXCEEDED.
func (l *Limits) Create(user string) (done func(), err error) {
	if l == nil {
		return func() {}, nil
	}
	return l.enter(key{creates, user}, l.options.Creates)
}

// Stream counts an open stream until done is called. The error is CALLER_LIMIT_EXCEEDED.
func (l *Limits) Stream(user string) (done func(), err error) {
	if l == nil {
		return func() {}, nil
	}
	return l.enter(key{streams, user}, l.options.Streams)
}

func (l *Limits) enter(k key, limit int) (done func(), err error) {
	if limit == 0 {
		return func() {}, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[k] >= limit {
		return nil, l.exceeded(k.user, k.limit, strconv.Itoa(limit), "at a time", retry)
	}
	l.open[k]++
	return sync.OnceFunc(func() { l.leave(k) }), nil
}

func (l *Limits) leave(k key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[k]--; l.open[k] == 0 {
		delete(l.open, k)
	}
}

func (l *Limits) exceeded(user, limit, allowed, per string, wait time.Duration) error {
	l.refused.WithLabelValues(limit).Inc()
	return fault.New(errdefs.ErrResourceExhausted, fault.CallerLimitExceeded, "user %q may have %s %s %s", user, allowed, limit, per).
		With("user", user).With("limit", limit).With("allowed", allowed).RetryIn(wait)
}
