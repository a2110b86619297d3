package desired_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func TestSummarizeUsers(t *testing.T) {
	on, off := desired.UsersAgent{On: true}, desired.UsersAgent{OffReason: "the kernel is old"}
	for _, c := range []struct {
		name   string
		agents []desired.UsersAgent
		want   desired.Users
	}{
		{"no agents", nil, desired.Users{Reason: "AgentsNotReady", Message: "no agent is ready"}},
		{"all", []desired.UsersAgent{on, on}, desired.Users{On: true, Reason: "Enabled"}},
		{"one cannot", []desired.UsersAgent{on, off, off}, desired.Users{
			Reason: "Unavailable", Message: "sandboxes of 2 of 3 agents have no user namespaces: the kernel is old",
		}},
		{"one is old", []desired.UsersAgent{{}}, desired.Users{
			Reason: "Unavailable", Message: "sandboxes of 1 of 1 agents have no user namespaces: the agent's version is older than user namespaces",
		}},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.want, desired.SummarizeUsers(c.agents)) })
	}
}
