package recovery_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
)

// fate is what becomes of a container.
type fate string

const (
	kept    fate = "kept"
	deleted fate = "deleted"
	marked  fate = "marked"
	adopted fate = "adopted"
)

// awaitFate waits until the container has met its fate. The sweep decides before it returns; the rest happens in the background.
func (e *env) awaitFate(want fate) {
	e.t.Helper()
	switch want {
	case kept:
		require.False(e.t, e.deletions.Owns(fence), "its deletion has begun")
		require.Empty(e.t, e.agent.Deletes())
	case deleted:
		e.await("it is deleted", func() bool { return len(e.agent.Sandboxes()) == 0 })
		require.Equal(e.t, fence, identity.FenceOf(e.agent.Deletes()[0]))
	case marked:
		e.await("it is marked", func() bool { return e.agent.Sandboxes()[0].GetPersisted() })
	case adopted:
		e.until("its custom resource is written and it is marked", func() bool { return e.there() != nil && e.agent.Sandboxes()[0].GetPersisted() })
		require.Equal(e.t, "u", e.there().EffectiveUID())
	}
	if want != marked && want != adopted {
		require.Zero(e.t, e.marks.Load())
	}
	require.Equal(e.t, want == adopted, e.adopted.Load() == 1)
}

// TestSweep is about every kind of container that an agent may report as not persisted, and all evidence about it.
func TestSweep(t *testing.T) {
	const few, many = 4, 12 // sweeps, each a second: before and after the orphan timeout
	elsewhere := func(sb *v1alpha1.Sandbox) { assign(sb, identity.Fence{SandboxUID: "u", Attempt: 3, AgentUID: "b"}) }
	unassigned := func(attempt int64) func(*v1alpha1.Sandbox) {
		return func(sb *v1alpha1.Sandbox) {
			delete(sb.Annotations, v1alpha1.AnnotationAssignment)
			sb.Status.Attempt = attempt
		}
	}
	theirs := func(sb *v1alpha1.Sandbox) { sb.Annotations[v1alpha1.AnnotationSandboxUID] = "theirs" }
	shown := func(change func(*v1alpha1.Sandbox)) func(*env) {
		return func(e *env) { e.store.SetResource(e.write(resource(change))) }
	}
	unseen := func(change func(*v1alpha1.Sandbox)) func(*env) { return func(e *env) { e.write(resource(change)) } }
	behind := func(change func(*v1alpha1.Sandbox)) func(*env) { // the informer shows it as it was before the last change
		return func(e *env) { e.store.SetResource(resource(change)); e.write(resource(nil)) }
	}
	away := func(e *env) { e.api.Before(func(fakeapi.Verb, client.Object) error { return fakeapi.Refused() }) }
	tests := map[string]struct {
		state   agentv1.SandboxState // default: running
		arrange func(*env)
		sweeps  int // default: few
		want    fate
	}{
		"unwritten, it runs":                   {want: adopted},
		"unwritten, it has ended":              {state: agentv1.SandboxState_SANDBOX_STATE_STOPPED, want: adopted},
		"unwritten, the API server is away":    {arrange: away, sweeps: many, want: kept},
		"before the informer is synced":        {arrange: func(e *env) { e.unsynced.Store(true) }, sweeps: many, want: kept},
		"of another leader":                    {arrange: func(e *env) { e.follows.Store(true) }, sweeps: many, want: kept},
		"its agent may obey a former leader":   {arrange: func(e *env) { e.unannounced.Store(true) }, sweeps: many, want: kept},
		"it is being created here":             {arrange: func(e *env) { e.creating.Store(true) }, sweeps: many, want: kept},
		"it was removed since":                 {arrange: func(e *env) { e.store.SetContainerRemoved(wireFence) }, sweeps: many, want: kept},
		"its name is in use":                   {arrange: lockName, sweeps: few, want: kept},
		"its deletion was accepted":            {arrange: func(e *env) { e.store.MarkDeleting(one, "u") }, want: deleted},
		"its deletion was finished":            {arrange: func(e *env) { require.True(e.t, e.store.MarkGone(one, "u")) }, want: deleted},
		"its name is another sandbox's":        {arrange: shown(theirs), want: deleted},
		"its name is another's, not yet shown": {arrange: unseen(theirs), want: deleted},

		"written and assigned":                             {arrange: shown(nil), want: marked},
		"written and assigned, not yet shown":              {arrange: unseen(nil), want: marked},
		"assigned elsewhere, for a moment":                 {arrange: shown(elsewhere), want: kept},
		"assigned elsewhere":                               {arrange: shown(elsewhere), sweeps: many, want: deleted},
		"assigned elsewhere by an informer that is behind": {arrange: behind(elsewhere), sweeps: many, want: marked},
		"assigned elsewhere, the API server is away":       {arrange: func(e *env) { shown(elsewhere)(e); away(e) }, sweeps: many, want: kept},
		"not assigned, in an earlier attempt":              {arrange: shown(unassigned(1)), sweeps: many, want: kept},
		"not assigned, after its attempt":                  {arrange: shown(unassigned(2)), sweeps: many, want: deleted},
		"with an assignment that cannot be read":           {arrange: shown(func(sb *v1alpha1.Sandbox) { sb.Annotations[v1alpha1.AnnotationAssignment] = "{" }), sweeps: many, want: kept},
		"assigned elsewhere, but gone from the API server": {arrange: func(e *env) { e.store.SetResource(resource(elsewhere)) }, sweeps: many, want: deleted},
		"assigned elsewhere, but another's by the API server": {arrange: func(e *env) {
			e.store.SetResource(resource(elsewhere))
			e.write(resource(theirs))
		}, sweeps: many, want: deleted},

		"never started, for a moment":           {state: creating, want: kept},
		"never started":                         {state: creating, sweeps: many, want: deleted},
		"never started, assigned, not yet seen": {state: creating, arrange: unseen(nil), sweeps: many, want: marked},
		"never started, the API server is away": {state: creating, arrange: away, sweeps: many, want: kept},

		"its create was repeated and answered with another": {arrange: func(e *env) {
			_, _, err := e.creates.Do(e.t.Context(), requestKey, "d", func(**sandboxv1.CreateSandboxResponse) (*sandboxv1.CreateSandboxResponse, error) {
				return &sandboxv1.CreateSandboxResponse{Sandbox: &sandboxv1.Sandbox{Uid: "other"}}, nil
			})
			require.NoError(e.t, err)
		}, want: deleted},
		"its create was repeated and answered with it": {arrange: func(e *env) {
			_, _, err := e.creates.Do(e.t.Context(), requestKey, "d", func(**sandboxv1.CreateSandboxResponse) (*sandboxv1.CreateSandboxResponse, error) {
				return &sandboxv1.CreateSandboxResponse{Sandbox: &sandboxv1.Sandbox{Uid: "u"}}, nil
			})
			require.NoError(e.t, err)
		}, want: adopted},
		"its create is being repeated": {arrange: repeating, want: kept},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			e.put(report(func(r *agentv1.SandboxReport) {
				if test.state != 0 {
					r.State = test.state
				}
			}))
			if test.arrange != nil {
				test.arrange(e)
			}
			for range max(test.sweeps, few) {
				e.sweep()
			}
			e.awaitFate(test.want)
		})
	}
}

const creating = agentv1.SandboxState_SANDBOX_STATE_CREATING

var requestKey = idempotency.Key{Namespace: ns, RequestID: "r1"} //nolint:gochecknoglobals // a constant

func lockName(e *env) {
	unlock, err := e.names.Lock(context.Background(), one)
	require.NoError(e.t, err)
	e.t.Cleanup(unlock)
}

// repeating has a call of the container's request_id run until the test ends.
func repeating(e *env) {
	began, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _, _ = e.creates.Do(context.Background(), requestKey, "d", func(**sandboxv1.CreateSandboxResponse) (*sandboxv1.CreateSandboxResponse, error) {
			close(began)
			<-end
			return nil, context.Canceled
		})
	}()
	<-began
	e.t.Cleanup(func() { close(end); <-ended })
}

// TestAbsenceNeedsTwoMessages: a deletion removes the container before the custom resource, so that a report may be older than the
// absence of the custom resource. The two that follow it are not.
func TestAbsenceNeedsTwoMessages(t *testing.T) {
	e := newEnv(t)
	e.put(report(nil))
	sweep := func(messages int) {
		for range messages {
			e.fleet.Heartbeat("a")
		}
		e.clock.Step(time.Second)
		e.recovery.Sweep(t.Context())
	}
	for _, messages := range []int{5, 0, 0, 1} { // the first sweep asks the API server
		sweep(messages)
		require.Zero(t, e.adopted.Load())
	}
	sweep(1)
	e.awaitFate(adopted)
}

// TestEvidenceEndsWithLeadership: what was seen before another process led is asked again.
func TestEvidenceEndsWithLeadership(t *testing.T) {
	e := newEnv(t)
	e.put(report(nil))
	e.sweep()
	e.sweep()
	e.follows.Store(true)
	e.sweep()
	e.follows.Store(false)
	e.sweep()
	require.Zero(t, e.adopted.Load(), "it would be the second message after the absence")
	e.sweep()
	e.sweep()
	e.awaitFate(adopted)
}

// TestLastAttemptIsAdopted: of two containers of one sandbox, the later one is what its caller knows.
func TestLastAttemptIsAdopted(t *testing.T) {
	e := newEnv(t)
	e.put(report(nil), report(func(r *agentv1.SandboxReport) {
		r.ContainerId = "u-1"
		r.Record.Fence = &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "a"}
	}))
	for range 4 {
		e.sweep()
	}
	e.until("the last one is adopted", func() bool { return e.there() != nil })
	a, err := e.there().Assignment()
	require.NoError(t, err)
	require.EqualValues(t, 2, a.Attempt)
	require.Equal(t, "pod-a", a.AgentPod)
	e.await("the first is a leftover", func() bool {
		e.reportAll()
		e.sweep() // one that comes while the last one is being written does not count
		return len(e.agent.Sandboxes()) == 1
	})
	require.EqualValues(t, 2, e.agent.Sandboxes()[0].GetRecord().GetFence().GetAttempt())
	require.EqualValues(t, 1, e.adopted.Load())
}

// TestRunSweepsUntilItsContextEnds: once a second.
func TestRunSweepsUntilItsContextEnds(t *testing.T) {
	e := newEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- e.recovery.Run(ctx) }()
	e.await("it waits", e.clock.HasWaiters)
	for i := range int64(3) {
		require.Equal(t, i, e.checks.Load())
		e.clock.Step(time.Second)
		e.await("it sweeps", func() bool { return e.checks.Load() == i+1 })
	}
	cancel()
	require.NoError(t, <-ended)
}

// TestLateResource: a custom resource whose sandbox was deleted before it was seen, or whose create has failed, is deleted by the
// leader.
func TestLateResource(t *testing.T) {
	abandoned := func(sb *v1alpha1.Sandbox) { sb.Annotations[v1alpha1.AnnotationAbandoned] = "true" }
	tests := map[string]struct {
		change func(*v1alpha1.Sandbox)
		gone   bool // its sandbox was deleted before
		want   bool // it is deleted
	}{
		"one that is meant to be":    {nil, false, false},
		"of a deleted sandbox":       {nil, true, true},
		"of a create that failed":    {abandoned, false, true},
		"of a failed one of another": {func(sb *v1alpha1.Sandbox) { strong(sb); abandoned(sb) }, false, true},
	}
	for name, test := range tests {
		for _, standby := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, standby %t", name, standby), func(t *testing.T) {
				e := newEnv(t)
				if test.gone {
					require.True(t, e.store.MarkGone(one, "u"))
				}
				e.follows.Store(standby)
				sb := e.write(resource(test.change))
				e.recovery.ResourceSeen(sb)
				if standby {
					e.sweep()
					require.Nil(t, e.there().DeletionTimestamp, "a standby does nothing")
					e.follows.Store(false)
					e.sweep()
				}
				if !test.want {
					require.Nil(t, e.there().DeletionTimestamp)
					return
				}
				e.await("it is deleted", func() bool { return e.there().DeletionTimestamp != nil })
			})
		}
	}
}

// TestDeleteOfLateResourceIsRetried: each sweep deletes it again until it no longer exists.
func TestDeleteOfLateResourceIsRetried(t *testing.T) {
	e := newEnv(t)
	require.True(t, e.store.MarkGone(one, "u"))
	sb := e.write(resource(nil))
	deletes := make(chan struct{}, 100)
	e.api.Before(func(verb fakeapi.Verb, _ client.Object) error {
		if verb == fakeapi.Delete {
			deletes <- struct{}{}
		}
		return fakeapi.Refused()
	})
	e.recovery.ResourceSeen(sb)
	<-deletes
	e.sweep()
	<-deletes
	e.api.Before(nil)
	e.until("it is deleted", func() bool { return e.there().DeletionTimestamp != nil })

	e.recovery.ResourceSeen(e.there()) // terminating
	e.recovery.ResourceGone(e.there())
	calls := 0
	e.api.Before(func(fakeapi.Verb, client.Object) error { calls++; return nil })
	e.recovery.Sweep(t.Context())
	require.Zero(t, calls, "it is forgotten")
}

// TestTombstonesAreResumed: the sweep continues the deletions of a former leader.
func TestTombstonesAreResumed(t *testing.T) {
	e := newEnv(t)
	e.agent.AddTombstone(&agentv1.Tombstone{Fence: wireFence, Namespace: ns, Name: "one"})
	e.write(resource(nil))
	e.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info, Accepting: true, Tombstones: e.agent.Tombstones()})
	e.unannounced.Store(true)
	e.sweep()
	require.False(t, e.deletions.Owns(fence), "the agent may obey a former leader")
	e.unannounced.Store(false)
	e.follows.Store(true)
	e.sweep()
	require.False(t, e.deletions.Owns(fence), "a standby does nothing")
	e.follows.Store(false)
	e.sweep()
	require.True(t, e.deletions.Owns(fence))
	e.until("the custom resource is deleted", func() bool { return e.there().DeletionTimestamp != nil })
}

// TestSupersededOfAnotherNameIsKept: an agent names the container of another sandbox in a tombstone, as one that its own superseded.
func TestSupersededOfAnotherNameIsKept(t *testing.T) {
	for name, tt := range map[string]struct {
		of   string
		want fate
	}{
		"of its own name":      {"one", deleted},
		"of another sandbox's": {"another", adopted},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			r := report(nil)
			e.agent.Put(r)
			e.fleet.Snapshot("a", &agentv1.AgentSnapshot{Info: info, Accepting: true, Sandboxes: e.agent.Sandboxes(), Tombstones: []*agentv1.Tombstone{{
				Fence: &agentv1.Fence{SandboxUid: "later", Attempt: 1, AgentUid: "a"}, Namespace: ns, Name: tt.of,
				Superseded: []*agentv1.SupersededAttempt{{Fence: wireFence}},
			}}})
			for range 4 {
				e.sweep()
			}
			e.awaitFate(tt.want)
		})
	}
}
