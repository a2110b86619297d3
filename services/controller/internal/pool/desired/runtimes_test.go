package desired_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func TestSummarizeRuntimes(t *testing.T) {
	ok, old, lost := desired.RuntimeAgent{}, desired.RuntimeAgent{Problem: "containerd is too old"}, desired.RuntimeAgent{Problem: "containerd is lost"}
	for _, c := range []struct {
		name   string
		agents []desired.RuntimeAgent
		want   desired.Runtimes
	}{
		{"no agents", nil, desired.Runtimes{Reason: "AgentsNotReady", Message: "no agent is ready"}},
		{"all", []desired.RuntimeAgent{ok, ok}, desired.Runtimes{Known: true, Ready: true, Reason: "RuntimesReady"}},
		{"some cannot", []desired.RuntimeAgent{old, ok, lost, old}, desired.Runtimes{
			Known: true, Reason: "RuntimeUnavailable", Message: "3 of 4 agents cannot run new sandboxes: containerd is lost; containerd is too old",
		}},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.want, desired.SummarizeRuntimes(c.agents)) })
	}
}
