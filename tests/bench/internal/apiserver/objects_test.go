package apiserver_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/swarm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The custom resource means the very container that the report is of.
func TestSandbox(t *testing.T) {
	info := &agentv1.AgentInfo{PodName: "agent-1", PodUid: "pod-uid", NodeName: "node-1", PodIp: "127.1.0.1"}
	report := swarm.Running(&agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: "uid", Attempt: 1, AgentUid: "pod-uid"},
		Namespace: "default", Name: "one", RequestId: "request", CreateTime: timestamppb.Now(),
		Spec: &sandboxv1.SandboxSpec{Image: "image", Pool: "pool", Ports: []int32{8000}},
	}, info.GetPodIp(), true)
	sb := apiserver.Sandbox(info, report, 5758)
	require.Equal(t, "uid", sb.EffectiveUID())
	assigned, err := sb.Assignment()
	require.NoError(t, err)
	require.Equal(t, &v1alpha1.Assignment{
		AgentPod: "agent-1", AgentUID: "pod-uid", NodeName: "node-1", AgentAddress: "127.1.0.1:5758", SandboxUID: "uid", Attempt: 1,
	}, assigned)
	require.Equal(t, map[string]string{v1alpha1.LabelPool: "pool", v1alpha1.LabelNode: "node-1"}, sb.Labels)
	require.Equal(t, v1alpha1.PhaseRunning, sb.Status.Phase)
	require.Equal(t, "uid-1", sb.Status.SandboxID)
	require.Equal(t, []string{"127.1.0.1:8000"}, sb.Status.Endpoints)
	require.Equal(t, "image", sb.Spec.Image)
}

func TestEach(t *testing.T) {
	var sum atomic.Int64
	require.NoError(t, apiserver.Each(t.Context(), 100, func(_ context.Context, i int) error {
		sum.Add(int64(i))
		return nil
	}))
	require.EqualValues(t, 4950, sum.Load())
	broken := errors.New("broken")
	require.ErrorIs(t, apiserver.Each(t.Context(), 100, func(_ context.Context, i int) error {
		if i == 50 {
			return broken
		}
		return nil
	}), broken)
}
