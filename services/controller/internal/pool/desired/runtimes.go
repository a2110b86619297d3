package desired

import "fmt"

// RuntimeAgent is what an agent says of its container runtime.
type RuntimeAgent struct {
	// Problem is why the runtime cannot run new sandboxes; empty if it can.
	Problem string
}

// Runtimes summarizes the container runtimes of a pool's agents.
type Runtimes struct {
	// Known: an agent has said something. Ready: the runtimes of all agents that have can run new sandboxes.
	Known, Ready bool
	// Reason explains Ready to programs, Message to people.
	Reason, Message string
}

// SummarizeRuntimes summarizes the container runtimes of a pool's agents.
func SummarizeRuntimes(agents []RuntimeAgent) Runtimes {
	var problems []string
	for _, a := range agents {
		if a.Problem != "" {
			problems = append(problems, a.Problem)
		}
	}
	switch {
	case len(agents) == 0:
		return Runtimes{Reason: "AgentsNotReady", Message: "no agent is ready"}
	case len(problems) > 0:
		return Runtimes{Known: true, Reason: "RuntimeUnavailable",
			Message: fmt.Sprintf("%d of %d agents cannot run new sandboxes: %s", len(problems), len(agents), list(problems))}
	}
	return Runtimes{Known: true, Ready: true, Reason: "RuntimesReady"}
}
