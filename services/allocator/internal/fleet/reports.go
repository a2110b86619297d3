package fleet

import (
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// updateReports keeps reports and returns them as they are kept, with what each means for the registry.
func (m *member) updateReports(reports []*agentv1.SandboxReport) ([]*agentv1.SandboxReport, []registry.Sandbox) {
	kept := make([]*agentv1.SandboxReport, 0, len(reports))
	sandboxes := make([]registry.Sandbox, 0, len(reports))
	for _, r := range reports {
		used := usage(r)
		r = m.compact(r)
		used.Fence = identity.FenceOf(r.GetRecord().GetFence()) // the texts that are kept
		sandboxes = append(sandboxes, used)
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
	return m.keep(r)
}

// kept is a report and all that it refers to, in one piece of memory: the garbage collector visits each piece in every cycle.
type kept struct {
	report        agentv1.SandboxReport
	record        agentv1.SandboxRecord
	fence         agentv1.Fence
	create, start timestamppb.Timestamp
	endpoint      [1]string
}

func (m *member) keep(r *agentv1.SandboxReport) *agentv1.SandboxReport {
	k, record, fence := &kept{}, r.GetRecord(), r.GetRecord().GetFence()
	// The texts that belong to this sandbox, in one more piece. Its container's id begins with its uid.
	rest := r.GetContainerId() + record.GetName() + strings.Join(r.GetEndpoints(), "")
	next := func(s string) string {
		head := rest[:len(s)]
		rest = rest[len(s):]
		return head
	}
	k.report.ContainerId, k.record.Name = next(r.GetContainerId()), next(record.GetName())
	k.report.Endpoints = k.endpoint[:0]
	for _, e := range r.GetEndpoints() {
		k.report.Endpoints = append(k.report.Endpoints, next(e))
	}
	if len(r.GetEndpoints()) == 0 {
		k.report.Endpoints = nil
	}
	k.fence.SandboxUid, k.fence.Attempt = fence.GetSandboxUid(), fence.GetAttempt()
	if strings.HasPrefix(k.report.GetContainerId(), fence.GetSandboxUid()) {
		k.fence.SandboxUid = k.report.GetContainerId()[:len(fence.GetSandboxUid())]
	}
	k.fence.AgentUid = shared(fence.GetAgentUid(), m.info.GetPodUid())
	k.record.Fence, k.record.Namespace = &k.fence, shared(record.GetNamespace(), m.info.GetNamespace())
	k.record.CreateTime = keptTime(&k.create, record.GetCreateTime())
	k.report.Record, k.report.State, k.report.Persisted, k.report.StartPath = &k.record, r.GetState(), true, r.GetStartPath()
	k.report.ExitCode, k.report.Reason, k.report.Message = r.ExitCode, r.GetReason(), r.GetMessage()
	k.report.StartTime, k.report.FinishTime = keptTime(&k.start, r.GetStartTime()), r.GetFinishTime()
	return &k.report
}

// keptTime copies a time into memory that is there already; nil stays nil.
func keptTime(to, from *timestamppb.Timestamp) *timestamppb.Timestamp {
	if from == nil {
		return nil
	}
	to.Seconds, to.Nanos = from.GetSeconds(), from.GetNanos()
	return to
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
