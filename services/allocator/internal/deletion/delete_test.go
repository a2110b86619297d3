package deletion_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

const traceparent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"

func written(e *env) store.Item { return e.written() }

// never is a sandbox that no process has written yet.
func never(e *env) store.Item {
	e.down(true)
	return e.unwritten(true)
}

// perhaps is a sandbox whose write was sent, and its answer lost.
func perhaps(e *env) store.Item {
	e.api.set(func(s *server) { s.fail["create"] = errLost })
	item := e.unwritten(true)
	e.pass(time.Second)
	e.api.set(func(s *server) { clear(s.fail) })
	return item
}

// former is a sandbox that a former leader has acknowledged: whether it wrote it is not known.
func former(e *env) store.Item { return e.store.SetRecord(record()) }

// TestDelete checks a delete call against what is known of the sandbox, and the answers of its agent and the API server.
func TestDelete(t *testing.T) {
	overloaded := fails(fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too many tombstones"))
	mismatch := fails(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "another attempt"))
	away := func(e *env) { e.agent.set(func(a *agent) { a.away = true }) }
	gone := func(e *env) { e.agent.set(func(a *agent) { a.gone = true }) }
	down := func(e *env) { e.down(true) }
	tests := map[string]struct {
		item      func(e *env) store.Item
		given     []func(e *env)
		script    answer
		reason    fault.Reason // of the error; empty for none
		resource  bool         // the custom resource is being deleted
		tombstone bool         // the agent keeps a tombstone
		continues bool         // the deletion runs after the call
	}{
		"written":                                {written, nil, accepts, "", true, false, true},
		"written, the agent is away":             {written, []func(*env){away}, accepts, "", true, false, true},
		"written, the agent refuses":             {written, nil, overloaded, "", true, false, true},
		"written, without an API server":         {written, []func(*env){down}, accepts, "", false, true, true},
		"written, neither":                       {written, []func(*env){down, away}, accepts, fault.AgentUnavailable, false, false, false},
		"written, no tombstone fits":             {written, []func(*env){down}, overloaded, fault.Overloaded, false, false, false},
		"written, no answer at all":              {written, []func(*env){down}, silent, fault.AgentUnavailable, false, false, true},
		"written, the connection breaks":         {written, []func(*env){down}, breaks, fault.AgentUnavailable, false, false, true},
		"written, the agent is gone":             {written, []func(*env){down, gone}, accepts, fault.APIUnavailable, false, false, false},
		"written, another attempt is there":      {written, []func(*env){down}, mismatch, fault.APIUnavailable, false, false, true},
		"never written":                          {never, nil, accepts, "", false, true, true},
		"never written, the agent is away":       {never, []func(*env){away}, accepts, fault.AgentUnavailable, false, false, false},
		"never written, another attempt":         {never, nil, mismatch, "", false, false, false},
		"perhaps written":                        {perhaps, nil, accepts, "", false, true, true},
		"perhaps written, the agent is away":     {perhaps, []func(*env){away}, accepts, fault.AgentUnavailable, false, false, false},
		"a former leader's":                      {former, nil, accepts, "", false, true, true},
		"a former leader's, without API server":  {former, []func(*env){down}, accepts, "", false, true, true},
		"a former leader's, no tombstone fits":   {former, nil, overloaded, fault.Overloaded, false, false, false},
		"a former leader's, no answer at all":    {former, nil, silent, fault.AgentUnavailable, false, false, true},
		"a former leader's, the agent is gone":   {former, []func(*env){gone}, accepts, "", false, false, true},
		"a former leader's, gone and without it": {former, []func(*env){gone, down}, accepts, fault.APIUnavailable, false, false, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{test.script}, func(e *env) {
				item := test.item(e)
				for _, f := range test.given {
					f(e)
				}
				begin := time.Now()
				err := e.deletes(item, deletion.Options{})
				require.LessOrEqual(e, time.Since(begin), 7*time.Second, "a caller does not wait for longer")
				require.Equal(e, test.reason, fault.ReasonOf(err), "%v", err)
				require.Equal(e, test.reason == "", err == nil)
				if test.reason != "" {
					_, retry := fault.RetryAfter(err)
					require.True(e, retry || test.reason == fault.Overloaded)
				}
				sb := e.api.resource()
				require.Equal(e, test.resource, sb != nil && sb.DeletionTimestamp != nil)
				require.Equal(e, test.tombstone, len(e.agent.Tombstones()) == 1)
				require.Equal(e, test.continues, e.owns())
				d, ok := e.manager.Of(fence)
				removed := err == nil && !ok || ok && d.State().ContainerRemoved()
				if now, visible := e.store.Get(item.Key); visible {
					terminating := now.Sandbox.GetStatus().GetPhase() == sandboxv1.Phase_PHASE_TERMINATING
					require.Equal(e, err == nil || removed, terminating, "it is shown as deleted as soon as that is durable")
				} else {
					require.True(e, removed, "it is visible until its container is gone")
				}
				if err != nil && !test.continues {
					e.stays(item)
					require.Equal(e, !strings.HasPrefix(name, "a former leader's"), e.api.resource() != nil, "recovery writes what this process did not begin")
					return
				}
				e.recover()
				e.over()
			})
		})
	}
}

// stays checks that a sandbox whose deletion failed runs on.
func (e *env) stays(item store.Item) {
	e.Helper()
	calls := len(e.agent.calls())
	e.recover()
	e.pass(time.Hour)
	require.Len(e, e.agent.calls(), calls, "no further call")
	if sb := e.api.resource(); sb != nil {
		require.Nil(e, sb.DeletionTimestamp)
		require.Equal(e, item.Sandbox.GetUid(), sb.EffectiveUID())
	}
	require.Zero(e, e.persist.Pending())
	require.Zero(e, e.agent.released)
}

// TestDeleteWithoutAgent: the custom resource alone makes a deletion durable.
func TestDeleteWithoutAgent(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		sb := resource("u")
		delete(sb.Annotations, v1alpha1.AnnotationAssignment)
		e.api.set(func(s *server) { s.there = sb })
		e.store.SetResource(sb.DeepCopy())
		item, _ := e.store.Get(name)
		require.Nil(e, item.Fence)
		e.down(true)
		require.Equal(e, fault.APIUnavailable, fault.ReasonOf(e.deletes(item, deletion.Options{})))
		e.down(false)
		require.NoError(e, e.deletes(item, deletion.Options{}))
		require.NotNil(e, e.api.resource().DeletionTimestamp)
		require.Empty(e, e.agent.calls())
	})
}

// TestDeletionsWithoutTheAPIServerAreBounded: each counts as a pending write, and the room of this test is one.
func TestDeletionsWithoutTheAPIServerAreBounded(t *testing.T) {
	bubble(t, []answer{accepts}, func(e *env) {
		item := e.written()
		e.down(true)
		require.NoError(e, e.persist.Admit())
		err := e.deletes(item, deletion.Options{})
		require.Equal(e, fault.Overloaded, fault.ReasonOf(err))
		require.Empty(e, e.agent.calls())
		require.False(e, e.owns())
		e.persist.Abandon()
		require.NoError(e, e.deletes(item, deletion.Options{}))
		require.EqualValues(e, 1, e.persist.Pending(), "until the API server has it")
		e.recover()
		e.over()
	})
}

// TestOptionsAreDurable: the grace period, the request_id and the trace of a delete call reach the agent, and the component
// that carries the deletion out, by the custom resource or the tombstone.
func TestOptionsAreDurable(t *testing.T) {
	none := map[string]string{}
	tests := map[string]struct {
		options deletion.Options
		traced  bool
		want    map[string]string // the custom resource's annotations
	}{
		"nothing":              {deletion.Options{}, true, none},
		"a grace period":       {deletion.Options{Grace: seconds(60)}, true, map[string]string{v1alpha1.AnnotationDeleteGracePeriod: "60"}},
		"no grace":             {deletion.Options{Grace: seconds(0)}, true, map[string]string{v1alpha1.AnnotationDeleteGracePeriod: "0"}},
		"a request_id":         {deletion.Options{RequestID: "d"}, true, map[string]string{v1alpha1.AnnotationDeleteRequestID: "d"}},
		"a trace":              {deletion.Options{Traceparent: traceparent}, true, map[string]string{v1alpha1.AnnotationDeleteTraceparent: traceparent}},
		"a trace not exported": {deletion.Options{Traceparent: traceparent}, false, none},
		"all": {deletion.Options{Grace: seconds(5), RequestID: "d", Traceparent: traceparent}, false, map[string]string{
			v1alpha1.AnnotationDeleteGracePeriod: "5", v1alpha1.AnnotationDeleteRequestID: "d", v1alpha1.AnnotationDeleteTraceparent: traceparent,
		}},
	}
	keys := []string{v1alpha1.AnnotationDeleteGracePeriod, v1alpha1.AnnotationDeleteRequestID, v1alpha1.AnnotationDeleteTraceparent}
	check := func(e *env, want map[string]string) {
		e.Helper()
		require.NotNil(e, e.api.resource().DeletionTimestamp)
		for _, key := range keys {
			value, set := e.api.resource().Annotations[key]
			wanted, required := want[key]
			require.Equal(e, required, set, key)
			require.Equal(e, wanted, value, key)
		}
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{accepts}, func(e *env) {
				e.stop()
				e.traced = test.traced
				e.start()
				require.NoError(e, e.deletes(e.written(), test.options))
				check(e, test.want)
				require.Equal(e, test.options.Grace.AsDuration(), e.agent.calls()[0].GetGracePeriod().AsDuration())
				require.Equal(e, test.options.Grace == nil, e.agent.calls()[0].GetGracePeriod() == nil)
			})
			bubble(t, []answer{accepts}, func(e *env) {
				e.stop()
				e.traced = test.traced
				e.start()
				item := e.written()
				e.down(true)
				require.NoError(e, e.deletes(item, test.options))
				kept := e.agent.Tombstones()[0]
				require.Equal(e, test.options.RequestID, kept.GetDeleteRequestId())
				require.Equal(e, test.options.Traceparent, kept.GetTraceparent())
				require.Equal(e, test.options.Grace == nil, kept.GetGracePeriod() == nil)
				require.Equal(e, test.options.Grace.AsDuration(), kept.GetGracePeriod().AsDuration())
				e.down(false)
				e.restart() // the next leader has the tombstone alone
				e.pass(10 * time.Second)
				check(e, test.want)
			})
		})
	}
}

// TestGraceIsRoundedUp: the custom resource has whole seconds.
func TestGraceIsRoundedUp(t *testing.T) {
	bubble(t, []answer{accepts}, func(e *env) {
		grace := seconds(1)
		grace.Nanos = 1
		require.NoError(e, e.deletes(e.written(), deletion.Options{Grace: grace}))
		require.Equal(e, "2", e.api.resource().Annotations[v1alpha1.AnnotationDeleteGracePeriod])
		require.Equal(e, time.Second+1, e.agent.calls()[0].GetGracePeriod().AsDuration())
	})
}

// TestRepeatedDelete: a later call that sets another grace period replaces it, everywhere; one that sets none changes nothing.
func TestRepeatedDelete(t *testing.T) {
	first := deletion.Options{Grace: seconds(60), RequestID: "d1", Traceparent: traceparent}
	tests := map[string]struct {
		down    bool // during the first call: the agent keeps a tombstone
		restart bool // a later leader receives the second call
		again   deletion.Options
		grace   string
		calls   int // of the agent, in all
	}{
		"by the custom resource, no grace":            {false, false, deletion.Options{RequestID: "d2"}, "60", 1},
		"by the custom resource, another":             {false, false, deletion.Options{Grace: seconds(1), RequestID: "d2"}, "1", 2},
		"by the tombstone, no grace":                  {true, false, deletion.Options{RequestID: "d2"}, "60", 1},
		"by the tombstone, another":                   {true, false, deletion.Options{Grace: seconds(1)}, "1", 2},
		"by the tombstone, the same":                  {true, false, deletion.Options{Grace: seconds(60)}, "60", 1},
		"by a former leader's tombstone, no grace":    {true, true, deletion.Options{}, "60", 1},
		"by a former leader's tombstone, another":     {true, true, deletion.Options{Grace: seconds(120)}, "120", 2},
		"by a former leader's resource, another":      {false, true, deletion.Options{Grace: seconds(120)}, "120", 2},
		"by a former leader's resource, without one":  {false, true, deletion.Options{}, "60", 2},
		"by a former leader's resource, without both": {false, true, deletion.Options{RequestID: "d2", Traceparent: "x"}, "60", 2},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{accepts}, func(e *env) {
				item := e.written()
				e.down(test.down)
				require.NoError(e, e.deletes(item, first))
				e.down(false)
				if test.restart {
					e.restart()
				}
				e.pass(10 * time.Second)
				e.informed()
				item, ok := e.store.Get(item.Key)
				require.True(e, ok)
				require.NoError(e, e.deletes(item, test.again))
				e.pass(10 * time.Second)
				annotations := e.api.resource().Annotations
				require.Equal(e, test.grace, annotations[v1alpha1.AnnotationDeleteGracePeriod])
				require.Equal(e, "d1", annotations[v1alpha1.AnnotationDeleteRequestID], "the first call's stays")
				require.Equal(e, traceparent, annotations[v1alpha1.AnnotationDeleteTraceparent])
				require.Len(e, e.agent.calls(), test.calls)
				if test.again.Grace != nil && test.calls > 1 {
					require.Equal(e, test.again.Grace.AsDuration(), e.agent.calls()[1].GetGracePeriod().AsDuration())
				}
				e.recover()
				e.over()
			})
		})
	}
}

// TestRepeatedDeleteOfAnUnreachableAgent: another grace period is accepted once the agent or the API server has it.
func TestRepeatedDeleteOfAnUnreachableAgent(t *testing.T) {
	bubble(t, []answer{accepts}, func(e *env) {
		item := e.store.SetRecord(record())
		require.NoError(e, e.deletes(item, deletion.Options{}))
		e.agent.set(func(a *agent) { a.away = true })
		err := e.deletes(item, deletion.Options{Grace: seconds(1)})
		require.Equal(e, fault.AgentUnavailable, fault.ReasonOf(err))
		require.ErrorContains(e, err, "the deletion continues")
		e.agent.set(func(a *agent) { a.away = false })
		require.NoError(e, e.deletes(item, deletion.Options{Grace: seconds(1)}))
		calls := e.agent.calls()
		require.EqualValues(e, 1, calls[len(calls)-1].GetGracePeriod().GetSeconds())
	})
}

// TestRepeatedDeleteWithoutAgentAndAPIServer: nothing but the API server can make such a deletion durable, and a repeated call is
// not acknowledged before it has.
func TestRepeatedDeleteWithoutAgentAndAPIServer(t *testing.T) {
	bubble(t, []answer{fails(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "another attempt"))}, func(e *env) {
		item := e.written()
		e.down(true)
		for range 3 {
			require.Equal(e, fault.APIUnavailable, fault.ReasonOf(e.deletes(item, deletion.Options{})))
		}
		e.down(false)
		require.NoError(e, e.deletes(item, deletion.Options{}))
		require.NotNil(e, e.api.resource().DeletionTimestamp)
		e.over()
	})
}

// TestCallerLeavesDuringADelete: a deletion that an agent may have received is carried out, record included, and one that it has
// not received is withdrawn.
func TestCallerLeavesDuringADelete(t *testing.T) {
	leave := func(e *env, item store.Item) {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		require.ErrorIs(e, e.manager.Delete(ctx, item, deletion.Options{}), context.DeadlineExceeded)
	}
	t.Run("the agent may have received it", func(t *testing.T) {
		bubble(t, []answer{silent}, func(e *env) {
			item := e.written()
			e.down(true)
			leave(e, item)
			require.True(e, e.owns())
			e.agent.set(func(a *agent) { a.gone = true; a.disconnect() })
			e.down(false)
			e.pass(time.Minute)
			require.NotNil(e, e.api.resource().DeletionTimestamp)
			e.over()
		})
	})
	t.Run("the agent has not received it", func(t *testing.T) {
		bubble(t, []answer{accepts}, func(e *env) {
			item := e.written()
			e.down(true)
			e.agent.set(func(a *agent) { a.away = true })
			leave(e, item)
			require.False(e, e.owns())
			e.stays(item)
		})
	})
}

// TestLeadershipIsLostDuringADelete: the caller learns soon that it has to repeat the call elsewhere.
func TestLeadershipIsLostDuringADelete(t *testing.T) {
	bubble(t, []answer{silent}, func(e *env) {
		item := e.written()
		e.down(true)
		go func() {
			<-time.After(time.Second)
			e.leads.Store(false)
		}()
		begin := time.Now()
		err := e.deletes(item, deletion.Options{})
		require.Equal(e, fault.NotLeader, fault.ReasonOf(err))
		require.Less(e, time.Since(begin), 1100*time.Millisecond)
	})
}

// TestWriteLandsInTheMomentOfADelete: the caller looked before it did.
func TestWriteLandsInTheMomentOfADelete(t *testing.T) {
	tests := map[string]func(e *env) store.Item{
		"the informer shows it": func(e *env) store.Item {
			item := e.store.SetRecord(record())
			e.written()
			return item
		},
		"its call is under way": func(e *env) store.Item {
			item := e.unwritten(true)
			e.api.set(func(s *server) {
				s.before = func(verb string) {
					if verb == "create" {
						<-time.After(500 * time.Millisecond)
					}
				}
			})
			e.pass(100 * time.Millisecond)
			return item
		},
	}
	for name, prepare := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{accepts}, func(e *env) {
				require.NoError(e, e.deletes(prepare(e), deletion.Options{}))
				require.NotNil(e, e.api.resource().DeletionTimestamp)
				require.Nil(e, e.agent.calls()[0].GetTombstone(), "the custom resource makes it durable")
				e.recover()
				e.over()
			})
		})
	}
}

// TestWriteThatDoesNotEnd: it is not known whether it lands, so the deletion waits for it.
func TestWriteThatDoesNotEnd(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		e.api.set(func(s *server) {
			s.before = func(verb string) {
				if verb == "create" {
					<-time.After(30 * time.Second)
				}
			}
		})
		item := e.unwritten(true)
		e.pass(300 * time.Millisecond)
		require.NoError(e, e.deletes(item, deletion.Options{}))
		require.NotNil(e, e.agent.calls()[0].GetTombstone())
		e.pass(time.Minute)
		require.NotNil(e, e.api.resource(), "it has landed")
		e.pass(2 * deletion.DefaultSettle)
		require.NotNil(e, e.api.resource().DeletionTimestamp)
		e.over()
	})
}

// TestNeverWrittenNeedsNoAPIServer: no process ever sent a write, so the name is free as soon as the container is removed.
func TestNeverWrittenNeedsNoAPIServer(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		item := never(e)
		require.NoError(e, e.deletes(item, deletion.Options{}))
		e.api.called()
		e.pass(time.Second)
		require.False(e, e.owns())
		require.Empty(e, e.agent.Tombstones())
		require.True(e, e.store.Gone(item.Key, item.Sandbox.GetUid()))
		require.Zero(e, e.api.called())
		require.Zero(e, e.persist.Pending())
	})
}

// TestResumeDuringADelete: a former leader's tombstone arrives while this process makes the same deletion durable.
func TestResumeDuringADelete(t *testing.T) {
	bubble(t, []answer{accepts}, func(e *env) {
		item := e.written()
		e.down(true)
		e.api.set(func(s *server) {
			s.before = func(string) {
				s.set(func(s *server) { s.before = nil })
				e.agent.set(func(a *agent) { a.tombstones[identity.FenceOf(fence)] = withTombstone().Tombstone })
				e.manager.Resume()
			}
		})
		require.NoError(e, e.deletes(item, deletion.Options{Grace: seconds(7)}))
		require.Equal(e, []*agentv1.Fence{fence}, []*agentv1.Fence{e.agent.calls()[0].GetFence()})
		require.EqualValues(e, 7, e.agent.calls()[0].GetGracePeriod().GetSeconds())
		synctest.Wait()
		e.recover()
		e.over()
	})
}
