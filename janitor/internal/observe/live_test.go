package observe_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"testing"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/typeurl/v2"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// reader gives scripted answers.
type reader struct {
	mu    sync.Mutex
	err   error
	pods  []corev1.Pod
	node  string
	lists int
	// begun receives each list, which continues after a receive from goOn; nil means at once.
	begun, goOn chan struct{}
}

func (r *reader) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	obj.SetName(key.Name)
	return r.err
}

func (r *reader) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	r.mu.Lock()
	r.node = o.FieldSelector.String()
	r.lists++
	list.(*corev1.PodList).Items = r.pods
	r.mu.Unlock()
	if r.begun != nil {
		select {
		case r.begun <- struct{}{}:
			<-r.goOn
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return r.err
}

func pod(uid string, phase corev1.PodPhase) corev1.Pod {
	return corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}, Status: corev1.PodStatus{Phase: phase}}
}

func TestEndedPodsAreNotListed(t *testing.T) {
	r := &reader{pods: []corev1.Pod{pod("a", corev1.PodRunning), pod("b", corev1.PodFailed), pod("c", corev1.PodSucceeded), pod("d", corev1.PodPending), pod("e", "")}}
	got, err := observe.NewLive(r, "node-1").Pods(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]bool{"a": true, "d": true, "e": true}, got)
	require.Equal(t, "spec.nodeName=node-1", r.node)
	r.err = errors.New("away")
	_, err = observe.NewLive(r, "node-1").Pods(t.Context())
	require.ErrorIs(t, err, r.err)
}

// TestConcurrentCallsShareOneFreshAnswer: a caller that arrives during a list shares one that begins after the call.
func TestConcurrentCallsShareOneFreshAnswer(t *testing.T) {
	r := &reader{begun: make(chan struct{}), goOn: make(chan struct{})}
	l := observe.NewLive(r, "node-1")
	var wg sync.WaitGroup
	ask := func(n int) {
		for range n {
			wg.Go(func() {
				if _, err := l.Pods(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
	ask(1)
	<-r.begun
	ask(50)
	r.goOn <- struct{}{}
	<-r.begun // the second list: it began after the first had ended
	r.goOn <- struct{}{}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for range 50 { // callers that arrived after the second list began
		select {
		case <-done:
		case <-r.begun:
			r.goOn <- struct{}{}
			continue
		}
		break
	}
	<-done
	require.GreaterOrEqual(t, r.lists, 2)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := l.Pods(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestOnlyCertainAbsenceCounts(t *testing.T) {
	resource := schema.GroupResource{Group: v1alpha1.Group, Resource: "sandboxes"}
	for name, c := range map[string]struct {
		err    error
		absent bool
	}{
		"there":              {nil, false},
		"absent":             {apierrors.NewNotFound(resource, "one"), true},
		"no such resource":   {apierrors.NewGenericServerResponse(http.StatusNotFound, "GET", resource, "one", "404 page not found", 0, true), false},
		"no details":         {&apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonNotFound}}, false},
		"forbidden":          {apierrors.NewForbidden(resource, "one", errors.New("no")), false},
		"server is at fault": {apierrors.NewInternalError(errors.New("etcd")), false},
		"cannot be reached":  {errors.New("connection refused"), false},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := observe.NewLive(&reader{err: c.err}, "node-1").Sandbox(t.Context(), "ns", "one")
			switch {
			case c.err == nil:
				require.NoError(t, err)
				require.Equal(t, "one", s.Name)
			case c.absent:
				require.NoError(t, err)
				require.Nil(t, s)
			default:
				require.ErrorIs(t, err, c.err)
			}
		})
	}
}

func TestRead(t *testing.T) {
	good := identity.Identity{Namespace: "ns", Name: "one", SandboxUID: uidOne, Attempt: 1, AgentUID: agentA, Pool: "p", State: identity.StateClaimed, Persisted: true}
	with := func(key, value string) map[string]string {
		l := good.Labels()
		if l[key] = value; value == "" {
			delete(l, key)
		}
		return l
	}
	for name, c := range map[string]struct {
		id     string
		labels map[string]string
		defect string
		agent  string
	}{
		"good":                {idOne, good.Labels(), "", agentA},
		"good, began a slot":  {"slot.0123456789abcdef0123", good.Labels(), "", agentA},
		"another's id":        {uidOne + "-2", good.Labels(), "its id is not that of attempt 1", agentA},
		"no agent":            {idOne, with(identity.KeyAgentUID, ""), "agent-uid is missing", ""},
		"attempt is garbage":  {idOne, with(identity.KeyAttempt, "x"), "not a number", agentA},
		"a slot with a name":  {idOne, with(identity.KeyState, identity.StateSlot), "is set on a slot", agentA},
		"an unknown state":    {idOne, with(identity.KeyState, "asleep"), "asleep", agentA},
		"no name, no uid":     {idOne, map[string]string{identity.KeyManaged: "true", identity.KeyAgentUID: agentA}, "neither", agentA},
		"not ours":            {idOne, map[string]string{}, "not \"true\"", ""},
		"almost ours":         {idOne, with(identity.KeyManaged, "yes"), "not \"true\"", agentA},
		"persisted otherwise": {idOne, with(identity.KeyPersisted, "yes"), "", agentA},
	} {
		t.Run(name, func(t *testing.T) {
			got := observe.Read(containers.Container{ID: c.id, Labels: c.labels, Extensions: map[string]typeurl.Any{ctrd.RecordKey: &anypb.Any{TypeUrl: "x"}}}, verdict.Stopped, name != "good")
			require.Equal(t, c.agent, got.Identity.AgentUID)
			require.Equal(t, c.labels[identity.KeyManaged] == "true", got.Managed)
			require.Equal(t, "x", got.Record.GetTypeUrl())
			if c.defect == "" {
				want := good
				want.Persisted = c.labels[identity.KeyPersisted] == "true"
				require.Equal(t, want, got.Identity)
				require.Empty(t, got.Defect)
				return
			}
			require.Contains(t, got.Defect, c.defect)
			require.Equal(t, identity.Identity{AgentUID: c.agent}, got.Identity)
		})
	}
	require.Equal(t, verdict.NoTask, observe.Read(containers.Container{}, verdict.Running, false).State)
	require.Equal(t, verdict.Stopped, observe.Read(containers.Container{}, verdict.Stopped, true).State)
}

func TestContainerOf(t *testing.T) {
	for want, list := range map[string][]any{
		"c": {&events.ContainerCreate{ID: "c"}, &events.ContainerUpdate{ID: "c"}, &events.ContainerDelete{ID: "c"}, &events.TaskCreate{ContainerID: "c"},
			&events.TaskStart{ContainerID: "c"}, &events.TaskDelete{ContainerID: "c"}, &events.TaskDelete{ContainerID: "c", ID: "c"}, &events.TaskExit{ContainerID: "c", ID: "c"}},
		"": {&events.TaskExit{ContainerID: "c", ID: "exec-1"}, &events.TaskDelete{ContainerID: "c", ID: "exec-1"}, &events.TaskOOM{ContainerID: "c"}, &events.ImageCreate{Name: "c"}},
	} {
		for _, e := range list {
			raw, err := typeurl.MarshalAny(e)
			require.NoError(t, err)
			require.Equal(t, want, observe.ContainerOf(raw), "%T", e)
		}
	}
	require.Empty(t, observe.ContainerOf(&anypb.Any{TypeUrl: "nothing"}))
}
