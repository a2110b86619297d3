package fleet

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// take remembers reports and returns them as they are remembered, and what they mean for the registry.
func (m *member) take(reports []*agentv1.SandboxReport) ([]*agentv1.SandboxReport, []registry.Sandbox) {
	kept := make([]*agentv1.SandboxReport, 0, len(reports))
	places := make([]registry.Sandbox, 0, len(reports))
	for _, r := range reports {
		places = append(places, place(r))
		r = m.slim(r)
		m.set(r)
		kept = append(kept, r)
	}
	return kept, places
}

// slim is what is remembered of a report. All that the record of a written sandbox says, its custom resource says too, and
// there are as many reports as sandboxes: of such a record, only whose it is stays. Its strings are shared with the member's
// where they are the same.
func (m *member) slim(r *agentv1.SandboxReport) *agentv1.SandboxReport {
	if !r.GetPersisted() {
		return r
	}
	record := r.GetRecord()
	return &agentv1.SandboxReport{
		Record: &agentv1.SandboxRecord{
			Fence: &agentv1.Fence{
				SandboxUid: record.GetFence().GetSandboxUid(), Attempt: record.GetFence().GetAttempt(),
				AgentUid: shared(record.GetFence().GetAgentUid(), m.info.GetPodUid()),
			},
			Namespace: shared(record.GetNamespace(), m.info.GetNamespace()), Name: record.GetName(), CreateTime: record.GetCreateTime(),
		},
		State: r.GetState(), ContainerId: r.GetContainerId(), Endpoints: r.GetEndpoints(), ExitCode: r.ExitCode,
		Reason: r.GetReason(), Message: r.GetMessage(), StartTime: r.GetStartTime(), FinishTime: r.GetFinishTime(),
		Persisted: true, StartPath: r.GetStartPath(),
	}
}

func shared(s, known string) string {
	if s == known {
		return known
	}
	return s
}

// set remembers a report; the last word on a container forgets it.
func (m *member) set(r *agentv1.SandboxReport) {
	key := identity.FenceOf(r.GetRecord().GetFence())
	delete(m.loose, key)
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		delete(m.reports, key)
		return
	}
	m.reports[key] = r
	if !r.GetPersisted() {
		m.loose[key] = r
	}
}

// place is what a report means for the registry. A sandbox that could not be created takes no place; one whose process has
// ended keeps its place until it is deleted, and its ports are free.
func place(r *agentv1.SandboxReport) registry.Sandbox {
	s := registry.Sandbox{Fence: identity.FenceOf(r.GetRecord().GetFence())}
	switch r.GetState() {
	case agentv1.SandboxState_SANDBOX_STATE_TERMINATED, agentv1.SandboxState_SANDBOX_STATE_FAILED:
		s.Gone = true
	case agentv1.SandboxState_SANDBOX_STATE_STOPPED:
	default:
		s.Ports = SharedPorts(r.GetRecord().GetSpec())
	}
	return s
}
