package render

import (
	"fmt"
	"strings"
	"time"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// Pools returns a table of pools.
func Pools(pools []*allocatorv1.Pool, namespaces, wide bool, now time.Time) *Table {
	header := []string{"NAME", "AGENTS", "READY", "CAPACITY", "USED", "FREE", "SLOTS", "AGE"}
	if namespaces {
		header = append([]string{"NAMESPACE"}, header...)
	}
	if wide {
		header = append(header, "MIN", "MAX", "BUFFER", "PER-AGENT", "SLOT-RANGE", "RUNTIME", "ADDED-CAPABILITIES")
	}
	t := NewTable(header...)
	for _, p := range pools {
		row := []string{
			p.GetName(), fmt.Sprint(p.GetAgents()), fmt.Sprint(p.GetReadyAgents()), fmt.Sprint(p.GetCapacity()),
			fmt.Sprint(p.GetAllocated()), fmt.Sprint(max(0, p.GetCapacity()-p.GetAllocated())), poolSlots(p), Age(p.GetCreateTime().AsTime(), now),
		}
		if namespaces {
			row = append([]string{p.GetNamespace()}, row...)
		}
		if wide {
			row = append(row, fmt.Sprint(p.GetPoolMin()), fmt.Sprint(p.GetPoolMax()),
				fmt.Sprintf("%d-%d", p.GetBufferMin(), p.GetBufferMax()), fmt.Sprint(p.GetMaxSandboxesPerPod()), slotRange(p), p.GetRuntimeHandler(),
				strings.Join(p.GetAddedCapabilities(), ","))
		}
		t.Add(row...)
	}
	return t
}

// slotsOff is the cell of a pool or an agent that keeps no slots.
const slotsOff = "off"

// poolSlots returns the number of free slots and of those that the agents keep ready.
func poolSlots(p *allocatorv1.Pool) string {
	if p.SlotsMax != nil && p.GetSlotsMax() == 0 && p.GetFreeSlots() == 0 {
		return slotsOff
	}
	return fmt.Sprintf("%d/%d", p.GetFreeSlots(), p.GetWantedSlots())
}

// slotRange returns the range of free slots for each agent; "all" is its free capacity.
func slotRange(p *allocatorv1.Pool) string {
	if p.SlotsMax == nil {
		return fmt.Sprintf("%d-all", p.GetSlotsMin())
	}
	return fmt.Sprintf("%d-%d", p.GetSlotsMin(), p.GetSlotsMax())
}

func agentSlots(a *allocatorv1.Agent) string {
	if a.GetSlotsOffReason() != "" && a.GetFreeSlots() == 0 {
		return slotsOff
	}
	return fmt.Sprintf("%d/%d", a.GetFreeSlots(), a.GetWantedSlots())
}

// appArmor returns the profile that sandboxes of an agent have, or why they have none.
func appArmor(s *agentv1.AppArmorStatus) string {
	if s.GetProfile() == "" && s.GetOffReason() != "" {
		return "off: " + s.GetOffReason()
	}
	return s.GetProfile()
}

// Agents is the table of agents.
func Agents(agents []*allocatorv1.Agent, namespaces, wide bool, now time.Time) *Table {
	header := []string{"NAME", "POOL", "NODE", "READY", "USED", "CAPACITY", "SLOTS", "HEARTBEAT"}
	if namespaces {
		header = append([]string{"NAMESPACE"}, header...)
	}
	if wide {
		header = append(header, "ADDRESS", "RUNTIME", "IMAGES", "VERSION", "REASON", "SLOTS-OFF-REASON", "APPARMOR")
	}
	t := NewTable(header...)
	for _, a := range agents {
		info := a.GetInfo()
		ready := "True"
		if !a.GetReady() {
			ready = "False"
		}
		row := []string{
			info.GetPodName(), info.GetPool(), info.GetNodeName(), ready, fmt.Sprint(a.GetAllocated()), fmt.Sprint(info.GetCapacity()),
			agentSlots(a), Age(a.GetLastHeartbeatTime().AsTime(), now),
		}
		if namespaces {
			row = append([]string{info.GetNamespace()}, row...)
		}
		if wide {
			row = append(row, a.GetAddress(), info.GetRuntimeHandler(), fmt.Sprint(a.GetImageCount()), info.GetVersion(), a.GetReason(), a.GetSlotsOffReason(), appArmor(a.GetApparmor()))
		}
		t.Add(row...)
	}
	return t
}
