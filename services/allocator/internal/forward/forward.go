// Package forward lets clients call any replica: one that does not lead passes a call on to the one that does, and one that
// leads handles it itself. It stands in a server as interceptors, behind all checks: the caller was authorized and the
// request validated here, and the leader lets the other replicas in by their own certificates. All methods may be called
// concurrently.
//
//	              leads                          -> handled here
//	call arrives: forwarded by another replica   -> NOT_LEADER: it is never forwarded twice
//	              another leads, and is reached  -> forwarded once; its answer is the answer, but NOT_LEADER
//	              nobody leads (that is known)   -> waited for a change, then as above
//
// A call is forwarded again only if the first cannot have been carried out: it was not sent, or was answered NOT_LEADER; or
// if carrying it out twice does no harm. That is so for every method but a create without a request_id: such a one ends,
// when its connection breaks, as it would have for a client of the leader itself, with a bare UNAVAILABLE: unknown.
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
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

// marker is the metadata key of a call that a replica has forwarded.
const marker = "fast-sandbox-forwarded"

const (
	// defaultPatience is how long a call without a deadline waits for a leader.
	defaultPatience = 10 * time.Second
	// margin is left of a deadline for the answer, so that the caller reads NOT_LEADER and not its own clock.
	margin = 100 * time.Millisecond
	// connectPatience is how long one connection to the leader may take before it counts as unreachable.
	connectPatience = time.Second
	// retryInterval is how often a leader that cannot be reached, or does not know of its lead yet, is tried again.
	retryInterval = 50 * time.Millisecond
)

// Config is what a Forwarder needs.
type Config struct {
	Lead *leadership.View
	// Dial makes a connection to another replica that connects when it is used.
	Dial  func(address string) (*grpc.ClientConn, error)
	Clock clock.Clock
	// Services whose calls are forwarded, by full name; all others are handled where they arrive.
	Services []string
	// Patience is how long a call without a deadline waits for a leader. Zero: 10 s.
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
		cfg.Timeout = defaultPatience
	}
	return &Forwarder{config: cfg, ending: make(chan struct{})}
}

// End ends the streams that have no end of their own, so that a server that drains need not wait for them, and forwards
// nothing more. Clients take them up at another replica.
func (f *Forwarder) End() { f.end.Do(func() { close(f.ending) }) }

// Close gives the connections up.
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

// errNotLeader is the answer while there is no leader to turn to.
func errNotLeader(last error) error {
	return fault.Wrap(last, errdefs.ErrUnavailable, fault.NotLeader, "no allocator leads now").RetryIn(200 * time.Millisecond)
}

// call is one call on its way.
type call struct {
	// local handles it here; done as for remote.
	local func() (done bool, err error)
	// remote has it handled by the leader. done is false if it was certainly not carried out, or may be carried out again.
	remote func(ctx context.Context, conn *grpc.ClientConn, leader epoch) (done bool, err error)
}

// epoch is a time in which one replica leads.
type epoch struct {
	leadership.State
	changed <-chan struct{}
}

// route carries a call out, here or at the leader, and waits for one as long as the deadline lasts.
func (f *Forwarder) route(ctx context.Context, c call) error {
	patience := f.config.Clock.NewTimer(f.patience(ctx))
	defer patience.Stop()
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
		case <-patience.C():
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
	defer f.leave(l)
	if err := l.ready(ctx, leader.changed); err != nil {
		return false, err
	}
	return c.remote(ctx, l.conn, leader)
}

func (f *Forwarder) patience(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return f.config.Timeout
	}
	left := time.Until(deadline) // a context's deadline goes by the machine's clock
	return max(left-min(margin, left/4), 0)
}

func forwarded(ctx context.Context) bool {
	return len(metadata.ValueFromIncomingContext(ctx, marker)) > 0
}

// outgoing is the context of a forwarded call: its deadline and trace go on by themselves, its other metadata here.
func outgoing(ctx context.Context) context.Context {
	out := metadata.MD{marker: {"1"}}
	in, _ := metadata.FromIncomingContext(ctx)
	for key, values := range in {
		if !reserved(key) {
			out[key] = values
		}
	}
	return metadata.NewOutgoingContext(ctx, out)
}

// passed is the metadata of an answer, without what the transport itself writes.
func passed(md metadata.MD) metadata.MD {
	out := metadata.MD{}
	for key, values := range md {
		if !reserved(key) {
			out[key] = values
		}
	}
	return out
}

// reserved tells which keys are the transport's, or the tracer's, who writes its own.
func reserved(key string) bool {
	switch key {
	case "content-type", "user-agent", "te", "traceparent", "tracestate", "baggage", marker:
		return true
	}
	return strings.HasPrefix(key, ":") || strings.HasPrefix(key, "grpc-")
}

// messages are new messages of the kinds that a method takes and answers with.
func messages(method string) (request, reply proto.Message, err error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, nil, fmt.Errorf("finding method %s: %w", method, err)
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, nil, fmt.Errorf("finding method %s: %s is none", method, name)
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
