package rpc_test

import (
	"testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/agentconformance"
)

// TestConformance runs the contract of AgentService on the real server, above the fake runtime.
func TestConformance(t *testing.T) {
	agentconformance.Run(t, func(t *testing.T) *agentconformance.Agent {
		env := serveCapacity(t, 2)
		return &agentconformance.Agent{
			Client: env.AgentServiceClient, UID: "me", Image: "busybox:1", Remote: "remote:1",
			End: func(uid string) { env.runtime.Exit(uid+"-1", runtime.Exit{Code: 3}) },
		}
	})
}
