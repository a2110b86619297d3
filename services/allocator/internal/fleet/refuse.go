package fleet

import (
	"slices"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Refusals receives what was refused of an agent's messages. It must not block.
type Refusals interface {
	// Refused is called with the agent, as its Pod says, and the number of things of a kind.
	Refused(agent *agentv1.AgentInfo, kind string, n int)
}

// The kinds of things that are refused.
const (
	// RefusedReport: a report on a container of another agent, namespace or pool.
	RefusedReport = "report"
	// RefusedTombstone: a tombstone of a container of another agent or namespace.
	RefusedTombstone = "tombstone"
)

// described returns an agent's own description with the identity of its Pod: who and where an agent is, only its Pod says.
func (m *member) described(by *agentv1.AgentInfo) *agentv1.AgentInfo {
	info := &agentv1.AgentInfo{}
	proto.Merge(info, by)
	info.PodName, info.PodUid, info.Namespace = m.pod.GetPodName(), m.pod.GetPodUid(), m.pod.GetNamespace()
	info.Pool, info.NodeName = m.pod.GetPool(), m.pod.GetNodeName()
	if ip := m.pod.GetPodIp(); ip != "" {
		info.PodIp = ip
	}
	return info
}

// mayHave reports whether a container can be the agent's own. The record of a container that the agent could not read has no pool.
func (m *member) mayHave(fence *agentv1.Fence, namespace, pool string) bool {
	return fence.GetAgentUid() == m.pod.GetPodUid() && namespace == m.pod.GetNamespace() && (pool == "" || pool == m.pod.GetPool())
}

// ownReports returns the reports on containers that can be the agent's, and the number of the others.
func (m *member) ownReports(reports []*agentv1.SandboxReport) ([]*agentv1.SandboxReport, int) {
	return own(reports, func(r *agentv1.SandboxReport) bool {
		record := r.GetRecord()
		return m.mayHave(record.GetFence(), record.GetNamespace(), record.GetSpec().GetPool())
	})
}

// ownTombstones returns the tombstones of containers that can be the agent's, and the number of the others.
func (m *member) ownTombstones(tombstones []*agentv1.Tombstone) ([]*agentv1.Tombstone, int) {
	return own(tombstones, func(t *agentv1.Tombstone) bool { return m.mayHave(t.GetFence(), t.GetNamespace(), "") })
}

// own returns the elements that ok accepts, which are all of them unless the agent is broken or hostile.
func own[T any](list []T, ok func(T) bool) (accepted []T, refused int) {
	if !slices.ContainsFunc(list, func(e T) bool { return !ok(e) }) {
		return list, 0
	}
	for _, e := range list {
		if ok(e) {
			accepted = append(accepted, e)
		}
	}
	return accepted, len(list) - len(accepted)
}

// refuse passes on what was refused of a message. No lock is held.
func (f *Fleet) refuse(agent *agentv1.AgentInfo, reports, tombstones int) {
	if f.refusals == nil {
		return
	}
	if reports > 0 {
		f.refusals.Refused(agent, RefusedReport, reports)
	}
	if tombstones > 0 {
		f.refusals.Refused(agent, RefusedTombstone, tombstones)
	}
}
