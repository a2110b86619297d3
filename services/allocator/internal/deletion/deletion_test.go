package deletion_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func order() deletion.Request { return deletion.Request{Fence: identity.FenceOf(fence)} }

func withTombstone() deletion.Request {
	r := order()
	r.Tombstone = &agentv1.Tombstone{Fence: fence, Namespace: name.Namespace, Name: name.Name}
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

func TestDeletionIsRepeatedUntilRemoved(t *testing.T) {
	superseded := fails(fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term 9 is known").With(rpc.TermMetadata, "9"))
	tests := map[string][]answer{
		"removed":                    {removes},
		"the stream breaks":          {breaks, removes},
		"the stream ends too early":  {ends, removes},
		"the agent fails for now":    {fails(fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "no")), removes},
		"another leads":              {superseded, superseded, removes},
		"another attempt is there":   {fails(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "no"))},
		"the agent does not have it": {fails(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no"))},
	}
	for name, script := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, script, func(e *env) {
				d := e.manager.Container(fence)
				require.Same(e, d, e.manager.Request(order()), "the same request joins it")
				e.pass(time.Minute)
				require.True(e, closed(d.Removed()))
				require.True(e, d.Acknowledged())
				require.Equal(e, state.Done, d.State())
				require.False(e, e.owns())
				require.Equal(e, 1, e.agent.released, "its capacity is free, once")
				require.True(e, e.store.ContainerRemoved(identity.FenceOf(fence)))
				require.Len(e, e.agent.calls(), len(script))
			})
		})
	}
}

// TestStateFollowsTheAgent checks the container half: each answer of the agent, to the first call and to a further one.
func TestStateFollowsTheAgent(t *testing.T) {
	overloaded := fails(fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "full"))
	superseded := fails(fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "later"))
	invalid := fails(fault.Field("fence", "invalid"))
	denied := fails(fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "no"))
	tests := map[string]struct {
		script   []answer
		want     state.State
		withdraw bool
	}{
		"no answer":                      {[]answer{silent}, state.Calling, false},
		"refused: too many tombstones":   {[]answer{overloaded}, state.Queued, true},
		"refused: a later leader":        {[]answer{superseded}, state.Queued, true},
		"refused: invalid":               {[]answer{invalid}, state.Queued, true},
		"refused: not allowed":           {[]answer{denied}, state.Queued, true},
		"lost":                           {[]answer{breaks}, state.Uncertain, false},
		"lost, then no answer":           {[]answer{breaks, silent}, state.Repeating, false},
		"lost, then refused":             {[]answer{breaks, overloaded}, state.Uncertain, false},
		"refused, then no answer":        {[]answer{overloaded, silent}, state.Calling, false},
		"accepted":                       {[]answer{accepts}, state.Accepted, false},
		"lost, then accepted":            {[]answer{breaks, accepts}, state.Accepted, false},
		"accepted, then the stream ends": {[]answer{func(a *agent, s *stream) { accepts(a, s); close(s.messages); a.open = nil }, silent}, state.Accepted, false},
		"removed":                        {[]answer{removes}, state.Removed, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, test.script, func(e *env) {
				d := e.manager.Request(withTombstone())
				e.pass(time.Hour + time.Millisecond) // between two calls, if they are repeated
				require.Equal(e, test.want, d.State())
				require.Equal(e, test.withdraw, d.Withdraw(), "only what no agent has received is withdrawn")
				require.Equal(e, !test.withdraw, e.owns())
				n := len(e.agent.calls())
				e.pass(time.Hour)
				if test.withdraw {
					require.Len(e, e.agent.calls(), n, "no call follows a withdrawal")
					require.Equal(e, state.Withdrawn, d.State())
					e.agent.set(func(a *agent) { a.script = []answer{removes} })
					again := e.manager.Request(withTombstone())
					e.pass(time.Minute)
					require.True(e, closed(again.Removed()), "a new request begins again")
				}
			})
		})
	}
}

func TestErrorOfTheLastCall(t *testing.T) {
	bubble(t, []answer{fails(fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "full")), breaks}, func(e *env) {
		d := e.manager.Request(order())
		require.NoError(e, d.Err())
		synctest.Wait()
		require.Equal(e, fault.Overloaded, fault.ReasonOf(d.Err()))
		e.pass(time.Minute)
		require.ErrorContains(e, d.Err(), "connection reset")
		e.agent.set(func(a *agent) { a.script = []answer{removes} })
		e.pass(time.Minute)
		require.ErrorContains(e, d.Err(), "connection reset", "a success does not replace it")
	})
}

func TestOnlyLeaderDeletes(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		e.leads.Store(false)
		d := e.manager.Request(order())
		e.pass(time.Hour)
		require.Empty(e, e.agent.calls(), "a standby deletes nothing")
		require.False(e, closed(d.Removed()))
		e.leads.Store(true)
		e.pass(time.Minute)
		require.True(e, closed(d.Removed()))
	})
}

func TestUnreachableAgentIsNotGone(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		e.agent.set(func(a *agent) { a.away = true })
		d := e.manager.Request(order())
		e.pass(time.Hour)
		require.False(e, closed(d.Removed()), "an agent that cannot be reached is not gone")
		require.True(e, e.manager.Deleting(identity.FenceOf(fence)))
		e.agent.set(func(a *agent) { a.gone = true })
		e.pass(time.Minute)
		require.True(e, closed(d.Removed()), "the containers of a Pod that is gone are the janitor's")
		require.False(e, e.manager.Deleting(identity.FenceOf(fence)))
		require.False(e, d.Kept())
		require.Empty(e, e.agent.calls())
	})
}

func TestFirstStageAcceptsTombstone(t *testing.T) {
	bubble(t, []answer{accepts}, func(e *env) {
		d := e.manager.Request(withTombstone())
		synctest.Wait()
		require.True(e, d.Acknowledged())
		require.True(e, d.Kept())
		require.False(e, closed(d.Removed()))
		require.False(e, d.Withdraw(), "it is durable")
	})
}

// TestRequestJoinsRunningDeletion: what is new of a later request reaches the agent by a further call, at once.
func TestRequestJoinsRunningDeletion(t *testing.T) {
	grace := func(r deletion.Request, seconds int64) deletion.Request {
		r.Grace = &durationpb.Duration{Seconds: seconds}
		return r
	}
	tests := map[string]struct {
		first, second deletion.Request
		calls         int
		grace         int64
		kept          bool
	}{
		"the same":                        {order(), order(), 1, 0, false},
		"a tombstone":                     {order(), withTombstone(), 2, 0, true},
		"no tombstone after one":          {withTombstone(), order(), 1, 0, true},
		"a grace period":                  {order(), grace(order(), 5), 2, 5, false},
		"a longer grace period":           {grace(order(), 5), grace(order(), 50), 2, 50, false},
		"the same grace period":           {grace(order(), 5), grace(order(), 5), 1, 5, false},
		"no grace period after one":       {grace(order(), 5), order(), 1, 5, false},
		"a grace period with a tombstone": {withTombstone(), grace(order(), 5), 2, 5, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{accepts}, func(e *env) {
				d := e.manager.Request(test.first)
				synctest.Wait()
				require.True(e, d.Acknowledged())
				require.Same(e, d, e.manager.Request(test.second))
				synctest.Wait()
				require.True(e, d.Acknowledged(), "as it stands")
				calls := e.agent.calls()
				require.Len(e, calls, test.calls)
				last := calls[len(calls)-1]
				require.Equal(e, test.grace, last.GetGracePeriod().GetSeconds())
				require.Equal(e, test.kept, last.GetTombstone() != nil)
				require.Equal(e, test.kept, d.Kept())
				if test.kept {
					require.Equal(e, test.grace, last.GetTombstone().GetGracePeriod().GetSeconds(), "the next leader finds it")
				}
			})
		})
	}
}

// TestTombstoneIsKeptAfterRemoval: the container ended while the request for a tombstone was on its way.
func TestTombstoneIsKeptAfterRemoval(t *testing.T) {
	bubble(t, []answer{func(a *agent, s *stream) {
		s.messages <- agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT
		a.open = append(a.open, s)
	}, removes}, func(e *env) {
		d := e.manager.Request(order())
		synctest.Wait()
		e.agent.set(func(a *agent) {
			e.manager.Request(withTombstone()) // before the answer to the first call is read
			a.finish()
		})
		synctest.Wait()
		require.True(t, closed(d.Removed()))
		require.True(t, d.Kept())
		require.Equal(t, state.Removed, d.State(), "its record is still to be deleted")
	})
}

// TestDeletionJoinsTheTraceOfItsCall: also when another leader resumes it, for the tombstone carries the traceparent.
func TestDeletionJoinsTheTraceOfItsCall(t *testing.T) {
	const trace, span = "0123456789abcdef0123456789abcdef", "0123456789abcdef"
	recorder := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)))
	t.Cleanup(func() { otel.SetTracerProvider(before) })
	bubble(t, []answer{removes}, func(e *env) {
		r := order()
		r.Traceparent = "00-" + trace + "-" + span + "-01"
		e.manager.Request(r)
		synctest.Wait()
	})
	require.Len(t, recorder.Ended(), 1)
	ended := recorder.Ended()[0]
	require.Equal(t, "delete container", ended.Name())
	require.Equal(t, trace, ended.SpanContext().TraceID().String())
	require.Equal(t, span, ended.Parent().SpanID().String())
}

func TestLostLeadershipIsRetried(t *testing.T) {
	err := deletion.LostLeadership(context.Canceled)
	require.Equal(t, fault.NotLeader, fault.ReasonOf(err))
	require.Equal(t, codes.Unavailable, status.Code(rpc.ToStatus(err)))
	_, retry := fault.RetryAfter(err)
	require.True(t, retry)
}
