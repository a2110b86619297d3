// Package edge is the gateway's gRPC side: one address for all services of the mesh. It passes calls on: those about what happens in a sandbox to
// the agent that runs it, so that no byte of a stream passes an allocator, and all others to the component that serves them.
//
// It keeps no state but connections, and for a while where sandboxes are. That may be outdated: a call names the container that it is meant for,
// and an agent refuses one for another container before it does anything. All methods may be called concurrently.
package edge

import (
	"context"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"k8s.io/utils/clock"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// rememberTime is how long the place of a sandbox is remembered, and maxRemembered of how many sandboxes.
	rememberTime  = time.Minute
	maxRemembered = 100_000
	// idleTime is after what time without a call a connection to an agent is closed.
	idleTime = 5 * time.Minute
)

// Config is what a Router needs.
type Config struct {
	// Locator says where sandboxes run.
	Locator allocatorv1.AllocatorServiceClient
	// Dial connects to an agent, for files or for all else. It does no I/O.
	Dial  func(address, agentUID string, files bool) (*grpc.ClientConn, error)
	Clock clock.PassiveClock
}

// Router is a connection to the agents of all sandboxes: the request of a call names its sandbox, in the fields namespace and name. Make it
// with NewRouter.
type Router struct {
	config Config

	mu     sync.Mutex
	places map[sandbox]place
	agents map[connection]*agent
}

// connection names a connection to an agent. Files have one of their own.
type connection struct {
	agentUID string
	files    bool
}

type sandbox struct{ namespace, name string }

// place is where a sandbox was.
type place struct {
	target  rpc.Target
	address string
	known   time.Time
}

// agent is a connection to an agent.
type agent struct {
	conn    *grpc.ClientConn
	address string
	used    time.Time
	calls   int
}

// NewRouter returns a Router that knows nothing yet.
func NewRouter(cfg Config) *Router {
	return &Router{config: cfg, places: map[sandbox]place{}, agents: map[connection]*agent{}}
}

// Close closes all connections.
func (r *Router) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c, a := range r.agents {
		_ = a.conn.Close()
		delete(r.agents, c)
	}
}

// Invoke implements grpc.ClientConnInterface. It makes a call again, at another agent, only if the first one cannot have had an effect.
func (r *Router) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	for again := false; ; again = true {
		to, done, err := r.route(ctx, method, args)
		if err != nil {
			return err
		}
		reached := &peer.Peer{}
		err = to.agent.conn.Invoke(to.context(ctx), method, args, reply, append(opts, grpc.Peer(reached))...)
		done()
		if err == nil {
			return nil
		}
		lost := isLost(err)
		if lost || isRefused(err) {
			r.forget(to)
		}
		if again || !isRefused(err) && (!lost || reached.Addr != nil) {
			return to.unreachable(ctx, err, reached.Addr != nil)
		}
	}
}

// isRefused reports whether an agent has refused a call because the sandbox is not, or no longer, what it was taken for. It does nothing before.
func isRefused(err error) bool {
	switch fault.ReasonOf(rpc.FromStatus(err)) {
	case fault.FenceMismatch, fault.SandboxNotFound:
		return true
	}
	return false
}

// isLost reports whether a call has failed because there is no connection to the agent, or none any longer. An agent that says itself that it is
// unavailable has a connection.
func isLost(err error) bool {
	st := status.Convert(err)
	if st.Code() != codes.Unavailable {
		return false
	}
	for _, d := range st.Details() {
		if _, ok := d.(*errdetails.ErrorInfo); ok {
			return false
		}
	}
	return true
}

// unreachable returns the error for clients if the connection to the agent is lost; its own text has addresses. A call that has reached the agent may
// have had an effect.
func (w *way) unreachable(ctx context.Context, err error, reached bool) error {
	if !isLost(err) {
		return err
	}
	logr.FromContextOrDiscard(ctx).Info("agent unreachable", obs.KeyAgentUID, w.place.target.AgentUID, obs.KeyError, err.Error())
	f := fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent of the sandbox cannot be reached")
	if reached {
		return fault.Unsettled(f)
	}
	return f
}

// way is where a call goes.
type way struct {
	sandbox sandbox
	place   place
	agent   *agent
}

func (w *way) context(ctx context.Context) context.Context {
	return rpc.ForTarget(rpc.ForCaller(ctx), w.place.target)
}

// route finds the agent for a request. done ends the use of its connection.
func (r *Router) route(ctx context.Context, method string, request any) (w *way, done func(), err error) {
	s, err := sandboxOf(request)
	if err != nil {
		return nil, nil, err
	}
	w = &way{sandbox: s}
	if w.place, err = r.locate(ctx, s); err != nil {
		return nil, nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.agent, err = r.connect(w.place, transfers(method)); err != nil {
		return nil, nil, err
	}
	w.agent.calls++
	return w, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		w.agent.calls--
		w.agent.used = r.config.Clock.Now()
	}, nil
}

// sandboxOf returns the sandbox that a request names.
func sandboxOf(request any) (sandbox, error) {
	m, ok := request.(proto.Message)
	if !ok {
		return sandbox{}, fault.New(errdefs.ErrInternal, fault.Internal, "the request is no message")
	}
	text := func(name protoreflect.Name) string {
		if f := m.ProtoReflect().Descriptor().Fields().ByName(name); f != nil && f.Kind() == protoreflect.StringKind && !f.IsList() {
			return m.ProtoReflect().Get(f).String()
		}
		return ""
	}
	s := sandbox{text("namespace"), text("name")}
	switch {
	case s.namespace == "":
		return s, fault.Field("namespace", "the first message names the sandbox")
	case s.name == "":
		return s, fault.Field("name", "the first message names the sandbox")
	}
	return s, nil
}

// locate returns where a sandbox is, or was a moment ago.
func (r *Router) locate(ctx context.Context, s sandbox) (place, error) {
	now := r.config.Clock.Now()
	r.mu.Lock()
	known, ok := r.places[s]
	r.mu.Unlock()
	if ok && now.Sub(known.known) < rememberTime {
		return known, nil
	}
	resp, err := r.config.Locator.LocateSandbox(ctx, &allocatorv1.LocateSandboxRequest{Namespace: s.namespace, Name: s.name})
	if err != nil {
		return place{}, err
	}
	at := resp.GetAssignment()
	found := place{
		target:  rpc.Target{SandboxUID: at.GetFence().GetSandboxUid(), Attempt: at.GetFence().GetAttempt(), AgentUID: at.GetFence().GetAgentUid()},
		address: at.GetAgentAddress(), known: now,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.places) >= maxRemembered {
		clear(r.places) // they are asked for again
	}
	r.places[s] = found
	return found, nil
}

// forget drops a location, unless a later one is known.
func (r *Router) forget(w *way) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.places[w.sandbox] == w.place {
		delete(r.places, w.sandbox)
	}
}

// connect returns the connection to an agent, and closes those that were not used for long. mu is held.
func (r *Router) connect(p place, files bool) (*agent, error) {
	now, key := r.config.Clock.Now(), connection{p.target.AgentUID, files}
	if a := r.agents[key]; a != nil && a.address == p.address {
		a.used = now
		return a, nil
	}
	for c, a := range r.agents {
		if a.calls == 0 && now.Sub(a.used) > idleTime {
			_ = a.conn.Close()
			delete(r.agents, c)
		}
	}
	conn, err := r.config.Dial(p.address, p.target.AgentUID, files)
	if err != nil {
		return nil, err
	}
	a := &agent{conn: conn, address: p.address, used: now}
	r.agents[key] = a
	return a, nil
}

func errClosing() error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the gateway is stopping; connect again")
}
