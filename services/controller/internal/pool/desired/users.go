package desired

import "fmt"

// UsersAgent is what an agent says of the user namespaces of its sandboxes.
type UsersAgent struct {
	// On: each sandbox has one.
	On bool
	// OffReason is why they have none although the pool asks for them; empty if the agent's version is older than user namespaces.
	OffReason string
}

// Users summarizes the user namespaces of a pool.
type Users struct {
	// On: the sandboxes of all agents have user namespaces.
	On bool
	// Reason explains On to programs, Message to people.
	Reason, Message string
}

// SummarizeUsers summarizes the user namespaces of a pool's agents.
func SummarizeUsers(agents []UsersAgent) Users {
	var reasons []string
	off := 0
	for _, a := range agents {
		if a.On {
			continue
		}
		off++
		if a.OffReason == "" {
			a.OffReason = "the agent's version is older than user namespaces"
		}
		reasons = append(reasons, a.OffReason)
	}
	switch {
	case len(agents) == 0:
		return Users{Reason: "AgentsNotReady", Message: "no agent is ready"}
	case off > 0:
		return Users{Reason: "Unavailable", Message: fmt.Sprintf("sandboxes of %d of %d agents have no user namespaces: %s", off, len(agents), list(reasons))}
	}
	return Users{On: true, Reason: "Enabled"}
}
