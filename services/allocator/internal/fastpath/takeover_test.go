package fastpath_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
)

// unwritten is a container that a former leader had started and no allocator has written.
func unwritten(agentUID, uid, name, requestID string, attempt int64) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: uid, Record: &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: agentUID}, Namespace: ns, Name: name, RequestId: requestID,
		Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: pool},
	}}
}

// events writes down reasons.
type events struct{ seen chan string }

func (e *events) Eventf(_, _ runtime.Object, kind, reason, _, _ string, _ ...any) {
	e.seen <- kind + " " + reason
}

func TestEvents(t *testing.T) {
	e := &events{seen: make(chan string, 10)}
	m := newMesh(t, func(c *fastpath.Config) { c.Events = e })
	a := m.agent("a", 5, nil)
	a.Put(unwritten("a", "u", "adopted", "", 1))
	require.Equal(t, corev1.EventTypeNormal+" Adopted", <-e.seen)
	var taken atomic.Bool
	m.api.onCreate.Store(func(sb *v1alpha1.Sandbox) { // another client writes the name a moment earlier
		if taken.CompareAndSwap(false, true) {
			theirs := &v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{Image: "theirs", PoolRef: pool}}
			theirs.Namespace, theirs.Name = ns, sb.Name
			if err := m.api.Create(context.Background(), theirs); err != nil {
				t.Error(err)
			}
		}
	})
	_, err := m.create(request("taken"))
	require.NoError(t, err)
	require.Equal(t, corev1.EventTypeWarning+" NameConflict", <-e.seen)
	m.eventually("theirs has won", func() bool { sb, err := m.get("taken"); return err == nil && sb.GetSpec().GetImage() == "theirs" })
}
