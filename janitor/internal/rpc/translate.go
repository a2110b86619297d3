package rpc

import (
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// The API's enums have the names of package verdict; a test compares them.

func action(a verdict.Action) janitorv1.Action {
	return janitorv1.Action(named(janitorv1.Action_value, "ACTION_", a.String()))
}

func reason(r verdict.Reason) janitorv1.Reason {
	return janitorv1.Reason(named(janitorv1.Reason_value, "REASON_", r.String()))
}

func agent(a verdict.Agent) janitorv1.AgentState {
	return janitorv1.AgentState(named(janitorv1.AgentState_value, "AGENT_STATE_", a.String()))
}

func outcome(o Outcome) janitorv1.SweepResponse_Outcome {
	switch o {
	case Deleted:
		return janitorv1.SweepResponse_OUTCOME_DELETED
	case WouldDelete:
		return janitorv1.SweepResponse_OUTCOME_WOULD_DELETE
	case Kept:
		return janitorv1.SweepResponse_OUTCOME_KEPT
	case Failed:
		return janitorv1.SweepResponse_OUTCOME_FAILED
	}
	return janitorv1.SweepResponse_OUTCOME_UNSPECIFIED
}

// named returns the value whose name is the prefix and the word, or the unspecified one.
func named(values map[string]int32, prefix, word string) int32 {
	return values[prefix+strings.ToUpper(strings.ReplaceAll(word, "-", "_"))]
}

// message returns the API's message for a finding.
func (s *Service) message(f *Finding) *janitorv1.Verdict {
	v := &janitorv1.Verdict{
		NodeName: s.config.NodeName, ContainerId: f.key().id, Action: action(f.Verdict.Action), Reason: reason(f.Verdict.Reason),
		Time: timestamppb.New(f.Time),
	}
	if f.Remnant != nil {
		v.Evidence = &janitorv1.Verdict_Remnant{Remnant: remnant(f.Remnant)}
	} else {
		v.Evidence = &janitorv1.Verdict_Observation{Observation: observation(f.Observation)}
	}
	return v
}

func observation(o *verdict.Observation) *janitorv1.Observation {
	out := &janitorv1.Observation{
		Managed: o.Managed, Defect: o.Defect, Age: durationpb.New(o.Age), Agent: agent(o.Agent),
		Identity: &janitorv1.ContainerIdentity{
			Namespace: o.Identity.Namespace, Name: o.Identity.Name, SandboxUid: o.Identity.SandboxUID, Attempt: o.Identity.Attempt,
			AgentUid: o.Identity.AgentUID, Pool: o.Identity.Pool, Slot: o.Identity.State == identity.StateSlot, Persisted: o.Identity.Persisted,
		},
		State: janitorv1.ContainerState(named(janitorv1.ContainerState_value, "CONTAINER_STATE_", o.Container.String())),
	}
	if o.Identity.State != identity.StateClaimed {
		return out // it cannot have a custom resource
	}
	out.Resource, out.Missing = resource(&o.Resource), durationpb.New(o.Missing)
	switch o.Resource.State {
	case verdict.ResourcePresent, verdict.ResourceTerminating, verdict.ResourceExpired:
		compared := verdict.Compare(o.Identity, o.Resource)
		out.Fence = janitorv1.FenceOutcome(named(janitorv1.FenceOutcome_value, "FENCE_OUTCOME_", compared.String()))
	}
	return out
}

func resource(r *verdict.Resource) *janitorv1.Resource {
	out := &janitorv1.Resource{
		State: janitorv1.ResourceState(named(janitorv1.ResourceState_value, "RESOURCE_STATE_", r.State.String())),
		Uid:   r.UID, Attempt: r.Attempt, AssignmentUnreadable: r.Unreadable,
	}
	if r.Assignment != nil {
		out.Assignment = &janitorv1.Assignment{AgentUid: r.Assignment.AgentUID, Attempt: r.Assignment.Attempt}
	}
	return out
}

func remnant(r *verdict.Remnant) *janitorv1.Remnant {
	out := &janitorv1.Remnant{
		Kind:  janitorv1.RemnantKind(named(janitorv1.RemnantKind_value, "REMNANT_KIND_", r.Kind.String())),
		Since: durationpb.New(r.Since),
	}
	if r.Kind == verdict.Log || r.Agent != verdict.AgentUnknown {
		out.Agent = agent(r.Agent)
	}
	if out.Deleted = r.Deleted; r.Deleted {
		out.DeletedAge = durationpb.New(r.DeletedAge)
	}
	return out
}
