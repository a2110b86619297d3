package fakeagent_test

import (
	"testing"

	"go.uber.org/goleak"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/agentconformance"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	agentconformance.Run(t, func(t *testing.T) *agentconformance.Agent {
		agent := fakeagent.New(&agentv1.AgentInfo{PodUid: "me", Namespace: "default", Pool: "p", PodIp: "10.0.0.1", Capacity: 2}, "docker.io/library/busybox:1")
		return &agentconformance.Agent{
			Client: fakeagent.Connect(t, agent), UID: "me", Image: "busybox:1", Remote: "remote:1",
			End: func(uid string) { agent.Stop(uid, 0) },
		}
	})
}
