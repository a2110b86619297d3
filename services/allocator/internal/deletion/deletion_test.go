package deletion_test

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	wait = testkit.Timeout
	tick = testkit.Tick
)

// agent answers deletes as its script says, the last answer again and again.
type agent struct {
	agentv1.AgentServiceClient // what is not used is nil

	mu       sync.Mutex
	script   []func(s *stream)
	requests []*agentv1.DeleteSandboxRequest
	gone     bool
	away     bool
}

func (a *agent) Client(string) (agentv1.AgentServiceClient, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a, !a.away
}

func (a *agent) Gone(string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gone
}

func (a *agent) calls() []*agentv1.DeleteSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*agentv1.DeleteSandboxRequest(nil), a.requests...)
}

func (a *agent) set(change func(a *agent)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(a)
}

func (a *agent) DeleteSandbox(ctx context.Context, req *agentv1.DeleteSandboxRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.DeleteSandboxResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, req)
	answer := a.script[0]
	if len(a.script) > 1 {
		a.script = a.script[1:]
	}
	s := &stream{ctx: ctx, messages: make(chan any, 4)}
	answer(s)
	return s, nil
}

// stream is the answer to one delete: stages, and then an error.
type stream struct {
	grpc.ClientStream
	ctx      context.Context //nolint:containedctx // a stream's context is reached through the stream
	messages chan any
}

func (s *stream) Recv() (*agentv1.DeleteSandboxResponse, error) {
	select {
	case m := <-s.messages:
		if err, ok := m.(error); ok {
			return nil, err
		}
		return &agentv1.DeleteSandboxResponse{Stage: m.(agentv1.DeleteStage)}, nil
	case <-s.ctx.Done():
		return nil, status.FromContextError(s.ctx.Err()).Err()
	}
}

func removed(s *stream)  { s.messages <- agentv1.DeleteStage_DELETE_STAGE_REMOVED }
func silent(*stream)     {}
func accepted(s *stream) { s.messages <- agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT }
func fails(err error) func(*stream) {
	return func(s *stream) { s.messages <- rpc.ToStatus(err) }
}

// fleetView counts releases, and reports no tombstones.
type fleetView struct{ released atomic.Int64 }

func (f *fleetView) Release(*agentv1.Fence)           { f.released.Add(1) }
func (f *fleetView) Tombstones() []*agentv1.Tombstone { return nil }
func (f *fleetView) HasTombstone(identity.Fence) bool { return false }
func (f *fleetView) Reported(identity.Fence) bool     { return false }

type fixture struct {
	manager *deletion.Manager
	agent   *agent
	leads   atomic.Bool
	fleet   fleetView
}

func start(t *testing.T, script ...func(*stream)) *fixture {
	t.Helper()
	set := tasks.New()
	f := &fixture{agent: &agent{script: script}}
	f.leads.Store(true)
	f.manager = deletion.New(deletion.Config{
		Agents: f.agent, Leads: f.leads.Load, Tasks: set, Clock: clock.RealClock{}, Fleet: &f.fleet, Store: store.New(clock.RealClock{}),
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return f
}

var fence = &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "a"} //nolint:gochecknoglobals // a constant

func order() deletion.Request { return deletion.Request{Fence: identity.FenceOf(fence)} }

func withTombstone() deletion.Request {
	r := order()
	r.Tombstone = &agentv1.Tombstone{Fence: fence, Namespace: "ns", Name: "one"}
	return r
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func await(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	require.Eventually(t, func() bool { return closed(c) }, wait, tick, what)
}

func TestDeletionIsRepeatedUntilRemoved(t *testing.T) {
	superseded := fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term 9 is known").With(rpc.TermMetadata, "9")
	tests := map[string][]func(*stream){
		"removed":                   {removed},
		"the stream breaks":         {fails(status.Error(codes.Unavailable, "reset")), removed},
		"the stream ends too early": {func(s *stream) { s.messages <- io.EOF }, removed},
		"the agent fails for now":   {fails(fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "no")), removed},
		"another leads":             {fails(superseded), fails(superseded), removed},
		"another fence is in force": {fails(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "no"))},
		"it is not there":           {fails(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no"))},
	}
	for name, script := range tests {
		t.Run(name, func(t *testing.T) {
			f := start(t, script...)
			d := f.manager.Request(order())
			require.Same(t, d, f.manager.Request(order()), "the same again joins it")
			await(t, "it is done", d.Removed())
			require.True(t, d.Acknowledged())
			require.EqualValues(t, 1, f.fleet.released.Load())
			require.Len(t, f.agent.calls(), len(script))
			require.Eventually(t, func() bool { return len(f.agent.calls()) == len(script) }, wait, tick)
		})
	}
}

func TestOnlyLeaderDeletes(t *testing.T) {
	f := start(t, removed)
	f.leads.Store(false)
	d := f.manager.Request(order())
	require.Never(t, func() bool { return len(f.agent.calls()) > 0 || closed(d.Removed()) }, 300*time.Millisecond, tick, "a standby deletes nothing")
	f.leads.Store(true)
	await(t, "done", d.Removed())
}

func TestUnreachableAgentIsNotGone(t *testing.T) {
	f := start(t, removed)
	f.agent.set(func(a *agent) { a.away = true })
	d := f.manager.Request(order())
	require.Never(t, func() bool { return closed(d.Removed()) }, 200*time.Millisecond, tick, "an agent that cannot be reached is not gone")
	f.agent.set(func(a *agent) { a.gone = true })
	await(t, "the containers of a Pod that is gone are the janitor's", d.Removed())
	require.False(t, d.Kept())
	require.Empty(t, f.agent.calls())
}

func TestFirstStageAcceptsTombstone(t *testing.T) {
	f := start(t, accepted)
	d := f.manager.Request(withTombstone())
	require.Eventually(t, d.Acknowledged, wait, tick, "accepted")
	require.True(t, d.Kept())
	require.False(t, closed(d.Removed()))
	require.False(t, d.Withdraw(), "it is durable")
}

func TestTombstoneJoinsRunningDeletion(t *testing.T) {
	f := start(t, accepted, removed)
	d := f.manager.Request(order())
	require.Eventually(t, d.Acknowledged, wait, tick, "accepted")
	require.Same(t, d, f.manager.Request(withTombstone()))
	require.Eventually(t, d.Acknowledged, wait, tick, "the tombstone is accepted, too")
	await(t, "done", d.Removed())
	require.True(t, d.Kept())
	calls := f.agent.calls()
	require.Len(t, calls, 2)
	require.Nil(t, calls[0].GetTombstone())
	require.NotNil(t, calls[1].GetTombstone())
}

func TestGraceJoinsRunningDeletion(t *testing.T) {
	f := start(t, accepted, removed)
	d := f.manager.Request(order())
	require.Eventually(t, d.Acknowledged, wait, tick, "accepted")
	short := order()
	short.Grace = durationpb.New(0)
	f.manager.Request(short)
	await(t, "done", d.Removed())
	require.NotNil(t, f.agent.calls()[1].GetGracePeriod())
}

func TestWithdraw(t *testing.T) {
	t.Run("no agent received it", func(t *testing.T) {
		f := start(t, fails(fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "full")))
		d := f.manager.Request(withTombstone())
		require.Eventually(t, func() bool { return d.Err() != nil && d.Withdraw() }, wait, tick)
		require.Equal(t, fault.Overloaded, fault.ReasonOf(d.Err()))
		n := len(f.agent.calls())
		require.Never(t, func() bool { return len(f.agent.calls()) > n }, 300*time.Millisecond, tick)
		require.Zero(t, f.fleet.released.Load())
		f.agent.set(func(a *agent) { a.script = []func(*stream){removed} })
		await(t, "a new request begins again", f.manager.Request(withTombstone()).Removed())
	})
	t.Run("one may have", func(t *testing.T) {
		f := start(t, silent)
		d := f.manager.Request(withTombstone())
		require.Eventually(t, func() bool { return len(f.agent.calls()) == 1 }, wait, tick)
		require.False(t, d.Withdraw())
		g := start(t, fails(status.Error(codes.Unavailable, "reset")))
		d = g.manager.Request(withTombstone())
		require.Eventually(t, func() bool { return d.Err() != nil }, wait, tick)
		require.False(t, d.Withdraw())
		require.False(t, errors.Is(d.Err(), context.Canceled))
	})
}

// TestDeletionJoinsTheTraceOfItsCall: also when another leader resumes it, for the tombstone carries the traceparent.
func TestDeletionJoinsTheTraceOfItsCall(t *testing.T) {
	const trace, span = "0123456789abcdef0123456789abcdef", "0123456789abcdef"
	recorder := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)))
	t.Cleanup(func() { otel.SetTracerProvider(before) })
	f := start(t, removed)
	r := order()
	r.Traceparent = "00-" + trace + "-" + span + "-01"
	await(t, "removed", f.manager.Request(r).Removed())
	require.Eventually(t, func() bool { return len(recorder.Ended()) == 1 }, wait, tick)
	ended := recorder.Ended()[0]
	require.Equal(t, "delete container", ended.Name())
	require.Equal(t, trace, ended.SpanContext().TraceID().String())
	require.Equal(t, span, ended.Parent().SpanID().String())
}
