// Package forward lets clients call any replica: the leader handles a call, every other replica forwards it to the leader.
// It consists of interceptors that run after all checks: the caller was authorized and the request validated here, and the
// leader admits the other replicas by their own certificates. It owns the connection to the leader. All methods may be called
// concurrently.
//
//	              leads                          -> handled here
//	call arrives: forwarded by another replica   -> NOT_LEADER: it is never forwarded twice
//	              another leads, and is reached  -> forwarded once; its answer is final, unless it is NOT_LEADER
//	              no leader is known             -> wait for a change, then as above
//
// A call is forwarded again only if the first one was certainly not executed (it was not sent, or was answered NOT_LEADER), or
// if executing it twice is harmless. Every method is harmless in that sense but a create without a request_id: when its
// connection breaks, it ends with a plain UNAVAILABLE, as it would for a direct client of the leader.
package forward

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

// marker is the metadata key of a forwarded call.
const marker = "fast-sandbox-forwarded"

const (
	// defaultTimeout is how long a call without a deadline waits for a leader.
	defaultTimeout = 10 * time.Second
	// margin is the part of a deadline, at most a quarter of it, that is kept for the answer: the caller then receives NOT_LEADER in
	// place of a timeout.
	margin = 500 * time.Millisecond
	// connectTimeout is how long connecting to the leader may take before it counts as unreachable.
	connectTimeout = time.Second
	// retryInterval is the interval of retries while the leader cannot be reached, or does not know yet that it leads.
	retryInterval = 50 * time.Millisecond
)

// Config is what a Forwarder needs.
type Config struct {
	Lead *leadership.View
	// Dial returns a connection to another replica that connects on first use.
	Dial  func(address string) (*grpc.ClientConn, error)
	Clock clock.Clock
	// Services whose calls are forwarded, by full name. All others are handled by the replica that receives them.
	Services []string
	// Timeout is how long a call without a deadline waits for a leader. Zero: 10 s.
	Timeout time.Duration
}

// Forwarder forwards calls.
type Forwarder struct {
	config Config
	ending chan struct{}
	end    sync.Once

	mu   sync.Mutex
	link *link // to the leader that was last forwarded to
}

// New returns a forwarder. Close it when its server has ended.
func New(cfg Config) *Forwarder {
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	return &Forwarder{config: cfg, ending: make(chan struct{})}
}

// End ends all endless streams, so that a draining server does not wait for them, and stops forwarding. Clients continue at
// another replica.
func (f *Forwarder) End() { f.end.Do(func() { close(f.ending) }) }

// Close closes the connections.
func (f *Forwarder) Close() {
	f.End()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.link != nil {
		f.link.abandon()
		f.link = nil
	}
}

func (f *Forwarder) forwards(method string) bool {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return slices.Contains(f.config.Services, service)
}

// errNotLeader is the answer while no leader is known.
func errNotLeader(last error) error {
	return fault.Wrap(last, errdefs.ErrUnavailable, fault.NotLeader, "no allocator is the leader now").RetryIn(200 * time.Millisecond)
}

// call is one call to be routed.
type call struct {
	// local handles the call in this process; done as for remote.
	local func() (done bool, err error)
	// remote forwards the call to the leader. done is false if it was certainly not executed, or may be executed again.
	remote func(ctx context.Context, conn *grpc.ClientConn, leader epoch) (done bool, err error)
}

// epoch is a period with one leader.
type epoch struct {
	leadership.State
	changed <-chan struct{}
}

// route executes a call, here or at the leader, and waits for a leader until the deadline.
func (f *Forwarder) route(ctx context.Context, c call) error {
	timeout := f.config.Clock.NewTimer(f.timeout(ctx))
	defer timeout.Stop()
	var last error
	for {
		state, changed := f.config.Lead.State()
		var again <-chan time.Time
		switch {
		case state.Leads:
			done, err := c.local()
			if done || forwarded(ctx) {
				return err
			}
			last = err
			again = f.config.Clock.After(retryInterval)
		case forwarded(ctx):
			return errNotLeader(nil)
		case state.Address != "":
			done, err := f.forward(ctx, epoch{state, changed}, c)
			if done {
				return err
			}
			last = err
			again = f.config.Clock.After(retryInterval)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timeout.C():
			return errNotLeader(last)
		case <-f.ending:
			return errNotLeader(last)
		case <-changed:
		case <-again:
		}
	}
}

// forward makes one attempt at the leader.
func (f *Forwarder) forward(ctx context.Context, leader epoch, c call) (bool, error) {
	l, err := f.dial(leader.Address)
	if err != nil {
		return false, err
	}
	defer f.release(l)
	if err := l.ready(ctx, leader.changed); err != nil {
		return false, err
	}
	return c.remote(ctx, l.conn, leader)
}

func (f *Forwarder) timeout(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return f.config.Timeout
	}
	left := time.Until(deadline) // deadlines of contexts use the system clock
	return max(left-min(margin, left/4), 0)
}

func forwarded(ctx context.Context) bool {
	return len(metadata.ValueFromIncomingContext(ctx, marker)) > 0
}

// outgoing returns the context of a forwarded call with the incoming metadata and the user who was authenticated here. What the
// caller itself sent as credentials stays here. gRPC passes on deadline and trace itself.
func outgoing(ctx context.Context) context.Context {
	out := metadata.MD{marker: {"1"}}
	in, _ := metadata.FromIncomingContext(ctx)
	for key, values := range in {
		if !reserved(key) {
			out[key] = values
		}
	}
	return rpc.ForCaller(metadata.NewOutgoingContext(ctx, out))
}

// passed returns the metadata of an answer without the keys of the transport.
func passed(md metadata.MD) metadata.MD {
	out := metadata.MD{}
	for key, values := range md {
		if !reserved(key) {
			out[key] = values
		}
	}
	return out
}

// reserved reports whether the transport or the tracer sets a key itself.
func reserved(key string) bool {
	switch key {
	case "content-type", "user-agent", "te", "traceparent", "tracestate", "baggage", marker:
		return true
	}
	return rpc.IsCredential(key) || strings.HasPrefix(key, ":") || strings.HasPrefix(key, "grpc-")
}

// messages returns a new request and a new reply of a method.
func messages(method string) (request, reply proto.Message, err error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, nil, fmt.Errorf("finding method %s: %w", method, err)
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, nil, fmt.Errorf("finding method %s: %s is not a method", method, name)
	}
	in, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
	if err != nil {
		return nil, nil, fmt.Errorf("finding the request of %s: %w", method, err)
	}
	out, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		return nil, nil, fmt.Errorf("finding the reply of %s: %w", method, err)
	}
	return in.New().Interface(), out.New().Interface(), nil
}
