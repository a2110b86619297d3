package verdict_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func pick[T any](t *rapid.T, name string, values ...T) T {
	return rapid.SampledFrom(values).Draw(t, name)
}

func drawPolicy(t *rapid.T) verdict.Policy {
	return verdict.Policy{Grace: time.Duration(rapid.Int64Range(1, 100).Draw(t, "grace"))}
}

func drawResource(t *rapid.T, states ...verdict.ResourceState) verdict.Resource {
	r := verdict.Resource{State: rapid.SampledFrom(states).Draw(t, "resource")}
	if r.State == verdict.ResourceUnknown || r.State == verdict.ResourceAbsent {
		return r
	}
	r.UID, r.Attempt = pick(t, "uid", "u", "v"), rapid.Int64Range(0, 4).Draw(t, "last attempt")
	switch rapid.IntRange(0, 3).Draw(t, "assignment") {
	case 0:
		r.Unreadable = true
	case 1:
	default:
		r.Assignment = &verdict.Assignment{AgentUID: pick(t, "assigned agent", "a", "b"), Attempt: rapid.Int64Range(1, 4).Draw(t, "assigned attempt")}
	}
	return r
}

func anyState() []verdict.ResourceState {
	return append([]verdict.ResourceState{verdict.ResourceUnknown, verdict.ResourceAbsent}, there...)
}

func drawObservation(t *rapid.T) verdict.Observation {
	o := verdict.Observation{
		ContainerID: "u-3", Managed: rapid.IntRange(0, 9).Draw(t, "managed") > 0,
		Container: rapid.SampledFrom(containers).Draw(t, "container"),
		Age:       time.Duration(rapid.Int64Range(-100, 200).Draw(t, "age")),
		Agent:     rapid.SampledFrom(agents).Draw(t, "agent"),
		Resource:  drawResource(t, anyState()...),
	}
	if o.Resource.State == verdict.ResourceAbsent {
		o.Missing = time.Duration(rapid.Int64Range(0, 200).Draw(t, "missing"))
	}
	switch rapid.IntRange(0, 5).Draw(t, "identity") {
	case 0:
		o.Identity = identity.Identity{AgentUID: pick(t, "agent uid", "", "a")}
		o.Defect = "labels do not add up"
	case 1:
		o.Identity = identity.Identity{AgentUID: "a", Pool: "p", State: identity.StateSlot}
	default:
		o.Identity = claimed(rapid.Bool().Draw(t, "persisted"))
		o.Identity.Attempt = rapid.Int64Range(1, 4).Draw(t, "attempt")
	}
	return o
}

// TestUnknownNeverDeletes: a Delete stands whatever the unknown parts turn out to be, except that a gone agent's Pod needs no custom
// resource.
func TestUnknownNeverDeletes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, p := drawObservation(t), drawPolicy(t)
		got := verdict.Decide(o, p)
		if o.Agent == verdict.AgentUnknown {
			require.NotEqual(t, verdict.Delete, got.Action)
		}
		if o.Resource.State == verdict.ResourceUnknown && o.Agent != verdict.AgentGone {
			require.NotEqual(t, verdict.Delete, got.Action)
		}
		if got.Action != verdict.Delete {
			return
		}
		if o.Resource.State == verdict.ResourceUnknown {
			o.Resource = drawResource(t, anyState()...)
		}
		require.Equal(t, got, verdict.Decide(o, p))
	})
}

// TestYoungContainersAreKept unless their agent is gone or another container is meant.
func TestYoungContainersAreKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, p := drawObservation(t), drawPolicy(t)
		if o.Age >= p.Grace && o.Missing >= p.Grace {
			return
		}
		switch v := verdict.Decide(o, p); v.Reason {
		case verdict.AgentPodGone, verdict.SandboxReplaced, verdict.AttemptOver, verdict.AssignedElsewhere:
		default:
			require.NotEqual(t, verdict.Delete, v.Action, v.Reason)
		}
	})
}

// TestAssignedContainersAreKept: a container of a living agent that its custom resource means is kept, whatever else is true.
func TestAssignedContainersAreKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, p := drawObservation(t), drawPolicy(t)
		o.Managed, o.Agent, o.Defect, o.Identity = true, verdict.AgentAlive, "", claimed(rapid.Bool().Draw(t, "persisted anyway"))
		o.Resource = resource(rapid.SampledFrom(there).Draw(t, "resource that means it"), verdict.FenceMatch)
		require.Equal(t, verdict.Keep, verdict.Decide(o, p).Action)
	})
}

// TestUnrelatedContainersAreKept: unmanaged ones, those of another cluster, slots of a living agent, and unpersisted ones.
func TestUnrelatedContainersAreKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, p := drawObservation(t), drawPolicy(t)
		slot := o.Identity.State == identity.StateSlot
		unpersisted := o.Identity.State == identity.StateClaimed && !o.Identity.Persisted
		if !o.Managed || o.Agent == verdict.AgentForeign || (o.Agent == verdict.AgentAlive && (slot || unpersisted || o.Defect != "")) {
			require.NotEqual(t, verdict.Delete, verdict.Decide(o, p).Action)
		}
	})
}

// TestEachReasonHasOneAction, and a gone agent always deletes what is managed.
func TestEachReasonHasOneAction(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, p := drawObservation(t), drawPolicy(t)
		v := verdict.Decide(o, p)
		require.Equal(t, v.Reason.Action(), v.Action)
		if o.Managed && o.Agent == verdict.AgentGone && o.Identity.AgentUID != "" {
			require.Equal(t, verdict.Verdict{Action: verdict.Delete, Reason: verdict.AgentPodGone}, v)
		}
		o.Container = rapid.SampledFrom(containers).Draw(t, "another state")
		require.Equal(t, v, verdict.Decide(o, p), "the state of the task is no evidence")
	})
}
