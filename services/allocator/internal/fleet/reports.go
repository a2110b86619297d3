package fleet

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// updateReports keeps reports and returns them as they are kept, with what each means for the registry.
func (m *member) updateReports(reports []*agentv1.SandboxReport) ([]*agentv1.SandboxReport, []registry.Sandbox) {
	kept := make([]*agentv1.SandboxReport, 0, len(reports))
	sandboxes := make([]registry.Sandbox, 0, len(reports))
	for _, r := range reports {
		sandboxes = append(sandboxes, usage(r))
		r = m.compact(r)
		m.setReport(r)
		kept = append(kept, r)
	}
	return kept, sandboxes
}

// compact returns the part of a report that is kept. There are as many reports as sandboxes, and a persisted sandbox's custom
// resource repeats all of the record but its identity. Strings that equal the member's share its memory.
func (m *member) compact(r *agentv1.SandboxReport) *agentv1.SandboxReport {
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

// setReport keeps a report, or drops the container of a TERMINATED one.
func (m *member) setReport(r *agentv1.SandboxReport) {
	fence := identity.FenceOf(r.GetRecord().GetFence())
	delete(m.unpersisted, fence)
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		delete(m.reports, fence)
		return
	}
	m.reports[fence] = r
	if !r.GetPersisted() {
		m.unpersisted[fence] = r
	}
}

// usage returns the capacity, ports and resources that a reported sandbox holds. A sandbox whose process has ended, or never started,
// holds none; its record and logs stay until it is deleted.
func usage(r *agentv1.SandboxReport) registry.Sandbox {
	s := registry.Sandbox{Fence: identity.FenceOf(r.GetRecord().GetFence())}
	switch r.GetState() {
	case agentv1.SandboxState_SANDBOX_STATE_STOPPED, agentv1.SandboxState_SANDBOX_STATE_FAILED, agentv1.SandboxState_SANDBOX_STATE_TERMINATED:
		s.Ended = true
	default: // TERMINATING, too: of a process that runs, or of one that has ended and is being removed
		s.Ended = r.GetFinishTime() != nil
	}
	if !s.Ended {
		s.Ports, s.Demand = SharedPorts(r.GetRecord().GetSpec()), Demand(r.GetRecord().GetLimits())
	}
	return s
}
