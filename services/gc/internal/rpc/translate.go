package rpc

import (
	"fmt"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// The terms of the graph in terms of the API.
var (
	states = map[graph.State]gcv1.State{ //nolint:gochecknoglobals // a constant
		graph.Free: gcv1.State_STATE_FREE, graph.Owned: gcv1.State_STATE_OWNED, graph.Unclear: gcv1.State_STATE_UNCLEAR, graph.Doomed: gcv1.State_STATE_DOOMED,
		graph.AwaitsDependents: gcv1.State_STATE_AWAITS_DEPENDENTS, graph.AwaitsOrphaning: gcv1.State_STATE_AWAITS_ORPHANING,
		graph.AwaitsFinalizers: gcv1.State_STATE_AWAITS_FINALIZERS, graph.Terminating: gcv1.State_STATE_TERMINATING,
	}
	refStatuses = map[graph.RefStatus]gcv1.Standing{ //nolint:gochecknoglobals // a constant
		graph.Solid: gcv1.Standing_STANDING_SOLID, graph.Dangling: gcv1.Standing_STANDING_DANGLING, graph.Waiting: gcv1.Standing_STANDING_WAITING,
		graph.Orphaning: gcv1.Standing_STANDING_ORPHANING, graph.Unverified: gcv1.Standing_STANDING_UNVERIFIED,
		graph.Unresolvable: gcv1.Standing_STANDING_UNRESOLVABLE, graph.NoReference: gcv1.Standing_STANDING_NO_REFERENCE,
	}
	outcomes = map[graph.Outcome]gcv1.Outcome{ //nolint:gochecknoglobals // a constant
		graph.Goes: gcv1.Outcome_OUTCOME_GOES, graph.Stays: gcv1.Outcome_OUTCOME_STAYS, graph.Held: gcv1.Outcome_OUTCOME_HELD,
	}
	policies = map[graph.Policy]gcv1.PropagationPolicy{ //nolint:gochecknoglobals // a constant
		graph.Background: gcv1.PropagationPolicy_PROPAGATION_POLICY_BACKGROUND, graph.Foreground: gcv1.PropagationPolicy_PROPAGATION_POLICY_FOREGROUND,
		graph.Orphan: gcv1.PropagationPolicy_PROPAGATION_POLICY_ORPHAN,
	}
	verbs = map[graph.Verb]gcv1.Verb{ //nolint:gochecknoglobals // a constant
		graph.Verify: gcv1.Verb_VERB_VERIFY, graph.Delete: gcv1.Verb_VERB_DELETE, graph.Patch: gcv1.Verb_VERB_PATCH, graph.Finalize: gcv1.Verb_VERB_FINALIZE,
	}
	causes = map[string]gcv1.Cause{ //nolint:gochecknoglobals // a constant
		string(graph.OwnersGone): gcv1.Cause_CAUSE_OWNERS_GONE, string(graph.OwnersWait): gcv1.Cause_CAUSE_OWNERS_WAIT,
		string(graph.DanglingOwners): gcv1.Cause_CAUSE_DANGLING_OWNERS, string(graph.Orphaned): gcv1.Cause_CAUSE_ORPHANED,
		string(graph.WaitCycle): gcv1.Cause_CAUSE_WAIT_CYCLE, string(graph.DependentsGone): gcv1.Cause_CAUSE_DEPENDENTS_GONE,
		string(graph.DependentsOrphaned): gcv1.Cause_CAUSE_DEPENDENTS_ORPHANED, string(graph.Doubtful): gcv1.Cause_CAUSE_DOUBTFUL,
		"pod-terminated": gcv1.Cause_CAUSE_POD_TERMINATED, "pod-out-of-service": gcv1.Cause_CAUSE_POD_OUT_OF_SERVICE,
		"pod-orphaned": gcv1.Cause_CAUSE_POD_ORPHANED, "pod-unscheduled": gcv1.Cause_CAUSE_POD_UNSCHEDULED,
	}
)

func kind(k graph.Kind) *gcv1.Kind { return &gcv1.Kind{Group: k.Group, Kind: k.Kind} }

func object(o graph.Object) *gcv1.Object {
	return &gcv1.Object{Place: &gcv1.Place{Kind: kind(o.Kind), Namespace: o.Namespace, Name: o.Name}, Uid: o.UID, Deleting: o.Deleting, Finalizers: o.Finalizers}
}

func objects(list []graph.Object) (out []*gcv1.Object) {
	for _, o := range list {
		out = append(out, object(o))
	}
	return out
}

func vertices(list []graph.Vertex) []*gcv1.Vertex {
	out := make([]*gcv1.Vertex, 0, len(list))
	for _, v := range list {
		out = append(out, &gcv1.Vertex{Object: object(v.Object), Virtual: v.Virtual, State: states[v.State], Distance: int32(v.Distance)})
	}
	return out
}

func references(list []graph.Reference) []*gcv1.Reference {
	out := make([]*gcv1.Reference, 0, len(list))
	for _, r := range list {
		out = append(out, &gcv1.Reference{Dependent: r.Dependent, Owner: r.Owner, Standing: refStatuses[r.Status], Block: r.Block})
	}
	return out
}

func explained(x graph.Explanation) *gcv1.ExplainObjectResponse {
	out := &gcv1.ExplainObjectResponse{Object: object(x.Object), State: states[x.State], Path: objects(x.Path), Blockers: objects(x.Blockers),
		BlockerCount: int32(x.BlockerCount), Finalizers: x.Finalizers, Unblock: unblock(x),
		Next: &gcv1.Step{Verb: verbs[x.Next.Verb], Cause: causes[string(x.Next.Cause)], Policy: policies[x.Next.Policy], Finalizer: x.Next.Finalizer}}
	for _, v := range x.Owners {
		o := v.Owner
		out.Owners = append(out.Owners, &gcv1.Owner{Place: &gcv1.Place{Kind: kind(o.Kind), Namespace: v.Namespace, Name: o.Name}, Uid: o.UID, Version: o.Version,
			Block: o.Block == graph.True, Controller: o.Controller == graph.True, Standing: refStatuses[v.Status]})
	}
	return out
}

// unblock returns what a person could do so that the object is deleted.
func unblock(x graph.Explanation) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for _, v := range x.Owners {
		what := fmt.Sprintf("%s %s (uid %s)", v.Owner.Kind, v.Owner.Name, v.Owner.UID)
		switch {
		case x.Object.Deleting:
		case v.Status == graph.Solid:
			say("delete its owner %s, or remove the reference to it", what)
		case v.Status == graph.Unresolvable:
			say("remove the reference to %s: the API server does not serve that kind in version %s", what, v.Owner.Version)
		case v.Status == graph.NoReference:
			say("remove the reference to %s: no object can be at its other end", what)
		}
	}
	if x.State == graph.Free {
		say("delete it: it has no owner whose deletion would delete it")
	}
	if x.State == graph.AwaitsDependents && x.BlockerCount > 0 {
		say("wait for its %d blocking dependents to be deleted, or set blockOwnerDeletion to false in their references", x.BlockerCount)
	}
	for _, f := range x.Finalizers {
		say("the component that sets the finalizer %s must remove it", f)
	}
	return out
}
