package deletion_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
)

// inherit has the manager resume the deletion of a tombstone that a former leader left on the agent.
func (e *env) inherit() *deletion.Deletion {
	e.Helper()
	t := withTombstone().Tombstone
	e.agent.set(func(a *agent) { a.tombstones[identity.FenceOf(fence)] = t })
	e.store.AgentTombstones([]*agentv1.Tombstone{t}, nil)
	e.manager.Resume()
	synctest.Wait()
	d, ok := e.manager.Of(fence)
	require.True(e, ok)
	return d
}

func (e *env) exists() { e.api.set(func(s *server) { s.there = resource(fence.GetSandboxUid()) }) }

func (e *env) down(down bool) { e.api.set(func(s *server) { s.down = down }) }

func (e *env) removed() { e.agent.set(func(a *agent) { a.reported = false }) }

// stages are the ways into each state of a deletion that a process carries out.
func stages() map[state.State]func(e *env) *deletion.Deletion {
	// run makes a delete call that the agent does not accept in time.
	run := func(e *env, script ...answer) *deletion.Deletion {
		item := e.written()
		e.down(true)
		e.agent.set(func(a *agent) { a.script = script })
		require.Error(e, e.deletes(item, deletion.Options{}))
		d, ok := e.manager.Of(fence)
		require.True(e, ok)
		return d
	}
	refuses := fails(fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "full"))
	return map[state.State]func(e *env) *deletion.Deletion{
		// The first call is refused after the delete call has returned.
		state.Queued: func(e *env) *deletion.Deletion {
			d := run(e, silent, refuses)
			e.agent.set(func(a *agent) { refuses(a, a.unanswered[0]); a.unanswered = nil })
			synctest.Wait()
			return d
		},
		state.Calling:   func(e *env) *deletion.Deletion { return run(e, silent) },
		state.Uncertain: func(e *env) *deletion.Deletion { return run(e, breaks) },
		state.Repeating: func(e *env) *deletion.Deletion { return run(e, breaks, silent) },
		state.Accepted: func(e *env) *deletion.Deletion {
			e.down(true)
			return e.inherit()
		},
		state.Absent: func(e *env) *deletion.Deletion { return e.inherit() },
		state.Settled: func(e *env) *deletion.Deletion {
			e.exists()
			return e.inherit()
		},
		state.Removed: func(e *env) *deletion.Deletion {
			item := e.written()
			e.down(true)
			e.agent.set(func(a *agent) { a.script = []answer{accepts} })
			require.NoError(e, e.deletes(item, deletion.Options{}))
			e.agent.set(func(a *agent) { a.finish() })
			synctest.Wait()
			d, _ := e.manager.Of(fence)
			return d
		},
		state.Settling: func(e *env) *deletion.Deletion {
			e.removed()
			return e.inherit()
		},
		state.Rechecking: func(e *env) *deletion.Deletion {
			e.removed()
			d := e.inherit()
			e.down(true)
			e.pass(deletion.DefaultSettle)
			return d
		},
		state.Dropping: func(e *env) *deletion.Deletion {
			e.exists()
			e.removed()
			e.agent.set(func(a *agent) { a.forgetErr = errors.New("not now") })
			return e.inherit()
		},
		state.Confirming: func(e *env) *deletion.Deletion {
			e.exists()
			e.removed()
			e.agent.set(func(a *agent) { a.holds = true })
			return e.inherit()
		},
	}
}

// recover ends every fault: all components do what they should.
func (e *env) recover() {
	e.leads.Store(true)
	e.down(false)
	e.agent.set(func(a *agent) {
		a.script, a.forgetErr, a.holds, a.away = []answer{removes}, nil, false, false
		a.finish()
		a.disconnect()
		if a.forgets > 0 {
			delete(a.tombstones, identity.FenceOf(fence))
		}
	})
}

// over checks that nothing is left of the sandbox, in the end.
func (e *env) over() {
	e.Helper()
	for range 5 {
		e.manager.Resume() // as recovery does, about once a second
		e.pass(deletion.DefaultSettle)
		if sb := e.api.resource(); sb != nil && sb.DeletionTimestamp != nil {
			e.finalized() // as the controller does
		}
	}
	require.Nil(e, e.api.resource())
	require.Empty(e, e.agent.Tombstones())
	require.False(e, e.owns())
	require.True(e, e.store.Gone(name, fence.GetSandboxUid()))
	require.Zero(e, e.store.Len())
	require.Zero(e, e.persist.Pending(), "its room is given up, once")
}

// TestEveryStateIsReached keeps the table of stages true and complete.
func TestEveryStateIsReached(t *testing.T) {
	for s := state.Queued; s < state.Done; s++ {
		t.Run(s.String(), func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				reach := stages()[s]
				require.NotNil(e, reach)
				d := reach(e)
				require.Equal(e, s, d.State())
				e.pass(10 * time.Second)
				require.Equal(e, s, d.State(), "it stays while nothing changes")
				e.recover()
				e.over()
			})
		})
	}
}

// TestLostLeadershipInEachState: neither the agent nor the API server is called, and once this process leads again,
// the deletion ends.
func TestLostLeadershipInEachState(t *testing.T) {
	for s, reach := range stages() {
		t.Run(s.String(), func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				d := reach(e)
				e.leads.Store(false)
				e.recover()
				e.leads.Store(false)
				e.pass(10 * time.Second) // for calls that were under way
				calls, forgets := len(e.agent.calls()), e.agent.forgets
				e.api.called()
				e.pass(time.Hour)
				require.Len(e, e.agent.calls(), calls)
				require.Equal(e, forgets, e.agent.forgets)
				require.Zero(e, e.api.called())
				require.NotEqual(e, state.Done, d.State())
				e.leads.Store(true)
				e.over()
			})
		})
	}
}

// TestRestartInEachState: the next process continues with what the agent and the API server report.
func TestRestartInEachState(t *testing.T) {
	for s, reach := range stages() {
		t.Run(s.String(), func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				d := reach(e)
				durable := d.Kept()
				e.stop()
				e.recover()
				e.restart()
				if !durable {
					require.False(e, e.owns(), "it was not acknowledged, and no process remembers it")
					item, ok := e.store.Get(name)
					require.True(e, ok)
					require.NoError(e, e.deletes(item, deletion.Options{}), "its caller repeats the call")
				}
				e.over()
			})
		})
	}
}

// TestAgentGoneInEachState: its containers and tombstones are gone with it, or the janitor's.
func TestAgentGoneInEachState(t *testing.T) {
	for s, reach := range stages() {
		t.Run(s.String(), func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				d := reach(e)
				calls, forgets := len(e.agent.calls()), e.agent.forgets
				e.agent.set(func(a *agent) {
					a.gone, a.away = true, true
					clear(a.tombstones)
					a.disconnect()
				})
				e.down(false)
				e.over()
				require.Equal(e, state.Done, d.State())
				require.Equal(e, forgets, e.agent.forgets)
				require.Len(e, e.agent.calls(), calls)
			})
		})
	}
}

// TestRecordFollowsTheAPIServer checks the record half of a former leader's deletion: each answer of the API server.
func TestRecordFollowsTheAPIServer(t *testing.T) {
	deleted := func() *metav1.Time { now := metav1.Now(); return &now }
	tests := map[string]struct {
		set    func(s *server)
		want   state.State // while the agent reports the container
		marked bool        // the custom resource is being deleted
	}{
		"the resource is there": {func(s *server) { s.there = resource("u") }, state.Settled, true},
		"it is absent":          {func(*server) {}, state.Absent, false},
		"it is another's":       {func(s *server) { s.there = resource("other") }, state.Absent, false},
		"it is being deleted": {func(s *server) {
			s.there = resource("u")
			s.there.DeletionTimestamp = deleted()
			s.fail["delete"] = errRefused
		}, state.Settled, true},
		"reading fails":  {func(s *server) { s.there = resource("u"); s.fail["get"] = errRefused }, state.Accepted, false},
		"deleting fails": {func(s *server) { s.there = resource("u"); s.fail["delete"] = errRefused }, state.Accepted, false},
		"deleting is refused": {func(s *server) {
			s.there, s.fail["delete"] = resource("u"), apierrors.NewForbidden(kind, name.Name, errors.New("policy"))
		}, state.Accepted, false},
		"it was deleted meanwhile": {func(s *server) {
			s.there, s.fail["delete"] = resource("u"), apierrors.NewNotFound(kind, name.Name)
		}, state.Settled, false},
		"it was replaced meanwhile": {func(s *server) {
			s.there, s.fail["delete"] = resource("u"), apierrors.NewConflict(kind, name.Name, errors.New("uid"))
		}, state.Settled, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				e.api.set(test.set)
				d := e.inherit()
				e.pass(20 * time.Second)
				require.Equal(e, test.want, d.State())
				sb := e.api.resource()
				require.Equal(e, test.marked, sb != nil && sb.DeletionTimestamp != nil)
				e.api.set(func(s *server) { clear(s.fail) })
				if sb != nil && sb.EffectiveUID() != fence.GetSandboxUid() {
					e.removed()
					e.pass(time.Hour)
					require.Nil(e, e.api.resource().DeletionTimestamp, "the other sandbox of the name stays")
					require.False(e, e.owns())
					return
				}
				e.recover()
				if test.want == state.Settled && !test.marked {
					e.api.set(func(s *server) { s.there = nil }) // as it said
					e.store.RemoveResource(resource("u"))
				}
				e.over()
			})
		})
	}
}

// TestWriteThatLandsDuringADeletion: a write of the custom resource was sent before the sandbox was deleted.
func TestWriteThatLandsDuringADeletion(t *testing.T) {
	for name, reach := range map[string]func(e *env){
		"while the container is removed": func(e *env) { e.inherit() },
		"while it settles": func(e *env) {
			e.removed()
			e.inherit()
			e.pass(deletion.DefaultSettle / 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				reach(e)
				e.exists()
				e.removed()
				e.pass(2 * deletion.DefaultSettle)
				require.NotNil(e, e.api.resource().DeletionTimestamp)
				e.over()
			})
		})
	}
	t.Run("and the informer shows it before the name is free", func(t *testing.T) {
		bubble(t, []answer{removes}, func(e *env) {
			d := e.inherit()
			require.Equal(e, state.Absent, d.State())
			e.exists()
			e.store.SetResource(resource(fence.GetSandboxUid()))
			e.removed()
			e.pass(10 * time.Second)
			if e.store.Gone(name, fence.GetSandboxUid()) {
				return // the tombstone has hidden it from the store
			}
			require.NotNil(e, e.api.resource().DeletionTimestamp, "it is deleted at once")
			e.over()
		})
	})
}

// TestTombstoneIsDroppedByItsAgent checks each answer of the agent to ForgetTombstone.
func TestTombstoneIsDroppedByItsAgent(t *testing.T) {
	tests := map[string]struct {
		err  error
		away bool
		want state.State
	}{
		"dropped":             {nil, false, state.Confirming},
		"it has none":         {fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no"), false, state.Confirming},
		"another Pod is here": {fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "no"), false, state.Confirming},
		"it fails":            {fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "no"), false, state.Dropping},
		"it knows a later leader": {
			fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "no"), false, state.Dropping,
		},
		"it cannot be reached": {nil, true, state.Dropping},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, []answer{removes}, func(e *env) {
				e.removed()
				e.exists()
				e.agent.set(func(a *agent) { a.forgetErr, a.away, a.holds = test.err, test.away, true })
				d := e.inherit()
				e.pass(10 * time.Second)
				require.Equal(e, test.want, d.State())
				e.agent.set(func(a *agent) { a.away = false })
				e.recover()
				e.over()
			})
		})
	}
}

// TestConfirmation: a deletion ends only when neither the agent nor the API server reports the sandbox.
func TestConfirmation(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		e.store.SetRecord(record())
		e.removed()
		e.exists()
		d := e.inherit()
		e.pass(time.Hour)
		require.Equal(e, state.Confirming, d.State(), "the custom resource has its finalizer")
		item, ok := e.store.Get(name)
		require.True(e, ok)
		require.Equal(e, sandboxv1.Phase_PHASE_TERMINATING, item.Sandbox.GetStatus().GetPhase())
		e.api.set(func(s *server) { s.there, s.down = nil, true })
		e.pass(time.Hour)
		require.Equal(e, state.Confirming, d.State(), "without an answer nothing is confirmed")
		e.down(false)
		e.store.RemoveResource(resource(fence.GetSandboxUid())) // as the informer does
		e.pass(10 * time.Second)
		require.Equal(e, state.Done, d.State())
	})
}

// TestConfirmationWithoutTheInformer: it never showed the custom resource, nor its end.
func TestConfirmationWithoutTheInformer(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		e.store.SetRecord(record())
		e.removed()
		e.exists()
		e.agent.set(func(a *agent) { a.holds = true })
		d := e.inherit()
		e.pass(time.Minute)
		require.Equal(e, state.Confirming, d.State())
		e.api.set(func(s *server) { s.there = nil })
		e.agent.set(func(a *agent) { clear(a.tombstones) })
		e.pass(time.Minute)
		require.Equal(e, state.Done, d.State())
	})
}

func TestResumeWaitsForTheAnnouncement(t *testing.T) {
	bubble(t, []answer{removes}, func(e *env) {
		e.announced.Store(false)
		e.agent.set(func(a *agent) { a.tombstones[identity.FenceOf(fence)] = withTombstone().Tombstone })
		e.manager.Resume()
		e.pass(time.Minute)
		require.False(e, e.owns(), "a former leader may still act on the agent")
		require.Zero(e, e.api.called())
		e.announced.Store(true)
		e.removed()
		e.over()
	})
}
