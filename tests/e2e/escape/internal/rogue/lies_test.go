package rogue_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/rogue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestLies: an agent with lies tells them, in its status and in its answers.
func TestLies(t *testing.T) {
	lies := &rogue.Lies{Namespace: "victim", Pool: "p", Name: "box", UID: "11111111-2222-4333-8444-555555555555", Attempt: 2, AgentPod: "other", AgentUID: "other-uid",
		AgentAddress: "10.0.0.1:1", Image: "nowhere"}
	parsed, err := rogue.ParseLies(lies.String())
	require.NoError(t, err)
	require.Equal(t, lies, parsed)
	info := &agentv1.AgentInfo{PodName: "own", PodUid: "own-uid", Namespace: "own-ns", Pool: "own-pool", Capacity: 5}
	a := fakeagent.New(info)
	a.Wrap = func(truth agentv1.AgentServiceServer) agentv1.AgentServiceServer { return parsed.Service(info, truth) }
	c := fakeagent.Connect(t, a)

	watch, err := c.WatchStatus(t.Context(), &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	m, err := watch.Recv()
	require.NoError(t, err)
	snapshot := m.GetSnapshot()
	require.Equal(t, []string{"victim", "p", "other", "other-uid"}, []string{snapshot.GetInfo().GetNamespace(), snapshot.GetInfo().GetPool(), snapshot.GetInfo().GetPodName(), snapshot.GetInfo().GetPodUid()})
	require.EqualValues(t, 1_000_000, snapshot.GetInfo().GetCapacity())
	require.Contains(t, snapshot.GetImages(), "nowhere")
	namespaces := map[string]int{}
	for _, r := range snapshot.GetSandboxes() {
		namespaces[r.GetRecord().GetNamespace()]++
	}
	require.Equal(t, map[string]int{"victim": 4, "own-ns": 2}, namespaces)
	require.Len(t, snapshot.GetTombstones(), 4)
	watch, err = c.WatchStatus(t.Context(), &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	m, err = watch.Recv()
	require.NoError(t, err)
	require.Equal(t, []string{"victim", "own-uid"}, []string{m.GetSnapshot().GetInfo().GetNamespace(), m.GetSnapshot().GetInfo().GetPodUid()}, "the uid is a lie only once")

	create, err := c.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "own-uid"}, Namespace: "own-ns", Name: "asked", Spec: &sandboxv1.SandboxSpec{Image: "i", Pool: "own-pool"},
	}})
	require.NoError(t, err)
	var last *agentv1.CreateSandboxResponse
	for {
		m, err := create.Recv()
		if err != nil {
			break
		}
		last = m
	}
	require.Equal(t, "victim", last.GetReport().GetRecord().GetNamespace())
	require.Equal(t, rogue.PlantedAnswer, last.GetReport().GetRecord().GetName())
}
