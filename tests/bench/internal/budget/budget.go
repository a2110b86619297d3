// Package budget holds what the suites are held to (DESIGN section 9, issues 4, 6 and 14) and judges what was measured by it.
// Some budgets depend on the runtime handler of the pools. It is pure.
package budget

import (
	"fmt"
	"slices"
	"strings"
)

// Budget bounds one value of a suite: from above by Limit, from below by Least, or both.
type Budget struct {
	// Key of the value.
	Key string
	// Limit is the greatest good value, unless AtLeast is set.
	Limit float64
	// Least is the least good value.
	Least float64
	// AtLeast makes Least the only bound.
	AtLeast bool
	// Aim is a value that would be better yet; zero for none. It fails nothing.
	Aim float64
	// What the value is.
	What string
}

// Outcome of a budget.
type Outcome string

// The outcomes. What was not measured is not met either.
const (
	Met         Outcome = "met"
	Missed      Outcome = "missed"
	NotMeasured Outcome = "not measured"
)

// Verdict is a budget with what was measured.
type Verdict struct {
	Key      string   `json:"key"`
	What     string   `json:"what"`
	Limit    *float64 `json:"limit,omitempty"`
	Least    float64  `json:"least,omitempty"`
	Aim      float64  `json:"aim,omitempty"`
	Measured *float64 `json:"measured"`
	Outcome  Outcome  `json:"verdict"`
	AimMet   bool     `json:"aim_met,omitempty"`
}

// Own is the runtime handler whose budgets are those of issue 14. Pools with another one are held to the earlier ones.
const Own = "fsb"

// Create is that of a single create; all are ratios to other series of the same run.
func Create(handler string) []Budget {
	if handler == Own {
		return ownCreate()
	}
	return slices.Concat([]Budget{
		{Key: "slot_over_raw_p50", Limit: 0.15, Aim: 0.08, What: "fast create with a slot, p50, over raw containerd p50"},
		{Key: "slot_over_raw_p99", Limit: 0.40, Aim: 0.20, What: "fast create with a slot, p99, over raw containerd p50"},
		{Key: "cold_over_raw", Limit: 1.20, What: "fast create on the cold path, p50, over raw containerd p50"},
	}, anyCreate())
}

// anyCreate is what pools of every handler are held to.
func anyCreate() []Budget {
	return []Budget{
		{Key: "strong_over_pod", Limit: 0.25, What: "strong create, p50, over a Pod's create to Ready, p50"},
		{Key: "slot_stages_over_client", Limit: 1.10, Least: 0.90, What: "sum of the stages' p50 over the client's p50, with a slot"},
		{Key: "cold_stages_over_client", Limit: 1.10, Least: 0.90, What: "sum of the stages' p50 over the client's p50, cold"},
	}
}

// Burst is that of creates that come all at once.
func Burst(handler string) []Budget {
	all := []Budget{
		{Key: "all_p99_over_raw_p50", Limit: 2, What: "burst with slots for all: p99 over the p50 of single raw containerd creates"},
	}
	if handler == Own {
		all = append(all, ownBurst()...)
	}
	return all
}

// Registry is that of the Registry's Allocate, and of what the checks of a caller cost before it (issue 13).
func Registry() []Budget {
	return []Budget{
		{Key: "ns_per_op_1000", Limit: 2000, What: "Allocate at 1,000 agents, ns"},
		{Key: "growth_100_to_100000", Limit: 3, What: "Allocate at 100,000 agents over 100 agents"},
		{Key: "allocs_per_op_max", Limit: 0, What: "allocations of one Allocate, at any number of agents"},
		{Key: "cached_call_ns", Limit: 50_000, What: "a user's call through all interceptors, the decision remembered, ns"},
	}
}

// Scale is that of one allocator under load.
func Scale() []Budget {
	return []Budget{
		{Key: "cpu_cores", Limit: 1, What: "CPU seconds of the allocator per second"},
		{Key: "rss_mib", Limit: 700, What: "resident memory of the allocator, MiB, greatest"},
		{Key: "create_p99_ms", Limit: 100, What: "a create, client to reply, p99"},
		{Key: "start_s", Limit: 10, What: "from the start of an allocator to its knowing all agents and sandboxes"},
		{Key: "takeover_s", Limit: 2, What: "from SIGKILL of the leader to the standby's first answer to a create"},
	}
}

// Density is that of memory.
func Density(handler string) []Budget {
	if handler == Own {
		return ownDensity()
	}
	return []Budget{
		{Key: "free_slot_mib", Limit: 2, What: "PSS of a free slot with its share of the shim, MiB"},
	}
}

// Inside is that of what users do in sandboxes (issue 15).
func Inside() []Budget {
	return []Budget{
		{Key: "run_over_exec_p50", Limit: 0.10, What: "RunProcess through the gateway, p50, over an exec of containerd's client with runc, p50"},
		{Key: "run_over_exec_p99", Limit: 0.30, What: "RunProcess through the gateway, p99, over the same"},
		{Key: "run_agent_ms", Limit: 3, What: "RunProcess at the agent, p50, ms"},
		{Key: "first_output_over_raw_p50", Limit: 0.20, What: "StartSandbox to the first output, with a slot, p50, over raw containerd p50"},
		{Key: "first_output_over_raw_p99", Limit: 0.60, What: "StartSandbox to the first output, with a slot, p99, over raw containerd p50"},
		{Key: "runs_per_second", Least: 400, AtLeast: true, What: "RunProcess a second, 16 at once"},
		{Key: "terminal_echo_ms", Limit: 1.5, What: "a terminal's echo, round trip through the gateway, p50, ms"},
		{Key: "write_over_stream", Least: 0.4, AtLeast: true, What: "WriteFile through the gateway over one gRPC byte stream, throughput"},
		{Key: "read_over_stream", Least: 0.4, AtLeast: true, What: "ReadFile through the gateway over one gRPC byte stream, throughput"},
		{Key: "claimed_mib", Limit: 2, What: "PSS of a claimed sandbox with its supervisor, MiB"},
		{Key: "idle_terminals_cores", Limit: 0.05, What: "CPU of an agent with 200 idle terminals, cores"},
	}
}

// GC is that of the garbage collectors, beside kube-controller-manager's (issue 6).
func GC() []Budget {
	return []Budget{
		{Key: "ours_over_default_tree", Limit: 0.2, What: "time for a tree over that of kube-controller-manager with default flags"},
		{Key: "ours_over_default_pairs", Limit: 0.2, What: "the same for pairs"},
		{Key: "ours_over_lifted_tree", Limit: 1, What: "time for a tree over that of kube-controller-manager without client limits"},
		{Key: "ours_over_lifted_pairs", Limit: 1, What: "the same for pairs"},
		{Key: "ours_over_builtin_bytes_per_node", Limit: 1, What: "resident memory of each object of the graph over that of kube-controller-manager"},
		{Key: "ours_over_builtin_heap_per_node", Limit: 1, What: "the same of the heap after a garbage collection"},
	}
}

// Judge judges values by budgets, in the budgets' order.
func Judge(budgets []Budget, values map[string]float64) []Verdict {
	out := make([]Verdict, 0, len(budgets))
	for _, b := range budgets {
		v := Verdict{Key: b.Key, What: b.What, Least: b.Least, Aim: b.Aim, Outcome: NotMeasured}
		if !b.AtLeast {
			v.Limit = &b.Limit
		}
		if x, ok := values[b.Key]; ok {
			v.Measured = &x
			v.Outcome = Missed
			if (b.AtLeast || x <= b.Limit) && x >= b.Least {
				v.Outcome = Met
			}
			v.AimMet = b.Aim > 0 && x <= b.Aim
		}
		out = append(out, v)
	}
	return out
}

// Check returns an error that names each verdict that is not Met.
func Check(verdicts []Verdict) error {
	var bad []string
	for _, v := range verdicts {
		if v.Outcome != Met {
			bad = append(bad, fmt.Sprintf("%s (%s)", v.Key, v.Outcome))
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fmt.Errorf("budgets are not kept: %s", strings.Join(bad, ", "))
}
