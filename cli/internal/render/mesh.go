package render

import (
	"fmt"
	"time"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// Pools is the table of pools.
func Pools(pools []*allocatorv1.Pool, namespaces, wide bool, now time.Time) *Table {
	header := []string{"NAME", "AGENTS", "READY", "CAPACITY", "USED", "FREE", "AGE"}
	if namespaces {
		header = append([]string{"NAMESPACE"}, header...)
	}
	if wide {
		header = append(header, "MIN", "MAX", "BUFFER", "PER-AGENT", "RUNTIME")
	}
	t := NewTable(header...)
	for _, p := range pools {
		row := []string{
			p.GetName(), fmt.Sprint(p.GetAgents()), fmt.Sprint(p.GetReadyAgents()), fmt.Sprint(p.GetCapacity()),
			fmt.Sprint(p.GetAllocated()), fmt.Sprint(max(0, p.GetCapacity()-p.GetAllocated())), Age(p.GetCreateTime().AsTime(), now),
		}
		if namespaces {
			row = append([]string{p.GetNamespace()}, row...)
		}
		if wide {
			row = append(row, fmt.Sprint(p.GetPoolMin()), fmt.Sprint(p.GetPoolMax()),
				fmt.Sprintf("%d-%d", p.GetBufferMin(), p.GetBufferMax()), fmt.Sprint(p.GetMaxSandboxesPerPod()), p.GetRuntimeHandler())
		}
		t.Add(row...)
	}
	return t
}

// Agents is the table of agents.
func Agents(agents []*allocatorv1.Agent, namespaces, wide bool, now time.Time) *Table {
	header := []string{"NAME", "POOL", "NODE", "READY", "USED", "CAPACITY", "HEARTBEAT"}
	if namespaces {
		header = append([]string{"NAMESPACE"}, header...)
	}
	if wide {
		header = append(header, "ADDRESS", "RUNTIME", "IMAGES", "VERSION", "REASON")
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
			Age(a.GetLastHeartbeatTime().AsTime(), now),
		}
		if namespaces {
			row = append([]string{info.GetNamespace()}, row...)
		}
		if wide {
			row = append(row, a.GetAddress(), info.GetRuntimeHandler(), fmt.Sprint(a.GetImageCount()), info.GetVersion(), a.GetReason())
		}
		t.Add(row...)
	}
	return t
}
