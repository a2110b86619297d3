package refusal_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/refusal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorded are the Events, as the Pod and the note.
type recorded []string

func (r *recorded) Eventf(regarding, _ runtime.Object, kind, reason, _, note string, args ...any) {
	pod := regarding.(*corev1.Pod)
	*r = append(*r, fmt.Sprintf("%s/%s %s %s %s: %s", pod.Namespace, pod.Name, pod.UID, kind, reason, fmt.Sprintf(note, args...)))
}

func TestRefusals(t *testing.T) {
	var events recorded
	metrics, c := prometheus.NewRegistry(), clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	r, err := refusal.New(refusal.Config{Events: &events, Metrics: metrics, Log: logr.Discard(), Clock: c})
	require.NoError(t, err)
	a, b := &agentv1.AgentInfo{Namespace: "ns", PodName: "pod-a", PodUid: "a"}, &agentv1.AgentInfo{Namespace: "ns", PodName: "pod-b", PodUid: "b"}
	for range 1000 {
		r.Refused(a, "report", 2)
	}
	r.Refused(b, refusal.KindPod, 1)
	require.Equal(t, recorded{
		"ns/pod-a a Warning Refused: the agent sent 2 (report) that name another agent, namespace or pool; they are ignored",
		"ns/pod-b b Warning Refused: the Pod has the labels of an agent and no SandboxPool that exists owns it: it gets no sandboxes",
	}, events, "one for each Pod")
	c.SetTime(c.Now().Add(refusal.Period))
	r.Refused(a, "tombstone", 1)
	require.Len(t, events, 3)
	families, err := metrics.Gather()
	require.NoError(t, err)
	require.Len(t, families, 1)
	require.Equal(t, "fastsandbox_refused_total", families[0].GetName())
	counts := map[string]float64{}
	for _, m := range families[0].GetMetric() {
		counts[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
	}
	require.Equal(t, map[string]float64{"pod": 1, "report": 2000, "tombstone": 1}, counts)
}

// TestMemoryIsBounded: a caller that creates Pods without end gets no Event for each.
func TestMemoryIsBounded(t *testing.T) {
	var events recorded
	c := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	r, err := refusal.New(refusal.Config{Events: &events, Metrics: prometheus.NewRegistry(), Log: logr.Discard(), Clock: c})
	require.NoError(t, err)
	refuse := func(n int) int {
		events = nil
		for i := range n {
			r.Refused(&agentv1.AgentInfo{PodUid: fmt.Sprint(c.Now().Unix(), "-", i)}, refusal.KindPod, 1)
		}
		return len(events)
	}
	require.Equal(t, 10000, refuse(10100))
	c.SetTime(c.Now().Add(time.Second))
	require.Zero(t, refuse(100))
	c.SetTime(c.Now().Add(refusal.Period))
	require.Equal(t, 100, refuse(100))
}
