package pool

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// renewAfter is when the certificates of a fakeIssuer are renewed.
const renewAfter = 16 * time.Hour

// fakeIssuer issues certificates that are text: the agent, the authority, a number and the time.
type fakeIssuer struct {
	clock clock.PassiveClock

	mu        sync.Mutex
	authority string
	issued    int
	pending   bool
	err       error
}

func (i *fakeIssuer) set(change func()) { i.mu.Lock(); defer i.mu.Unlock(); change() }

func (i *fakeIssuer) Issue(_ context.Context, id rpc.AgentID, now time.Time) (map[string][]byte, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err != nil || i.pending {
		return nil, i.err
	}
	i.issued++
	return map[string][]byte{"tls.crt": fmt.Appendf(nil, "%s|%s|%s|%d", id, i.authority, now.Format(time.RFC3339), i.issued)}, nil
}

func (i *fakeIssuer) RenewAt(id rpc.AgentID, data map[string][]byte) (time.Time, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	parts := strings.Split(string(data["tls.crt"]), "|")
	if len(parts) != 4 || parts[0] != id.String() || parts[1] != i.authority {
		return time.Time{}, i.err
	}
	at, err := time.Parse(time.RFC3339, parts[2])
	if err != nil {
		return time.Time{}, err
	}
	return at.Add(renewAfter), i.err
}

// secured is a fixture whose agents have certificates.
func secured(t *testing.T) (*fixture, *fakeIssuer) {
	t.Helper()
	f := newFixture(t, testPool(poolMin(1)))
	i := f.Issuer.(*fakeIssuer)
	f.Injection.Insecure, f.certs.config.Injection.Insecure, f.pods.config.Injection.Insecure = false, false, false
	return f, i
}

// onlyPod returns the Pod of the pool's only agent.
func (f *fixture) onlyPod() *corev1.Pod {
	f.t.Helper()
	var list corev1.PodList
	require.NoError(f.t, f.client.List(f.t.Context(), &list))
	require.Len(f.t, list.Items, 1)
	return &list.Items[0]
}

func (f *fixture) secretOf(pod *corev1.Pod) *corev1.Secret {
	f.t.Helper()
	var s corev1.Secret
	require.NoError(f.t, f.client.Get(f.t.Context(), types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name + "-tls"}, &s))
	return &s
}

func (f *fixture) certificateOf(pod *corev1.Pod) string {
	return string(f.secretOf(pod).Data["tls.crt"])
}

// TestEachAgentHasACertificateOfItsOwn: the Pod mounts a Secret that nothing else mounts, names it alone, and goes with it.
func TestEachAgentHasACertificateOfItsOwn(t *testing.T) {
	f, _ := secured(t)
	f.reconcile()
	pod := f.onlyPod()
	require.True(t, strings.HasPrefix(pod.Name, "py-agent-"))
	require.Len(t, pod.Name, len("py-agent-")+5)
	require.True(t, mountsOwn(pod))
	s := f.secretOf(pod)
	require.Equal(t, corev1.SecretTypeTLS, s.Type)
	require.True(t, strings.HasPrefix(string(s.Data["tls.crt"]), "ns/"+pod.Name+"/"+string(pod.UID)+"|"))
	require.Equal(t, map[string]string{labelManagedBy: managedBy, v1alpha1.LabelPool: "py"}, s.Labels)
	require.True(t, metav1.IsControlledBy(s, pod))
	require.Nil(t, s.OwnerReferences[0].BlockOwnerDeletion)
	result := f.reconcile()
	require.LessOrEqual(t, result.RequeueAfter, certificateCheck)
	require.Equal(t, 1, f.api.writes("create Secret"))
}

func TestNamesAreBounded(t *testing.T) {
	p := testPool(func(p *v1alpha1.SandboxPool) { p.Name = strings.Repeat("p", 63) })
	require.Len(t, podName(p), 63)
	require.NotEqual(t, podName(p), podName(p))
}

func TestCertificateIsRenewed(t *testing.T) {
	for name, tt := range map[string]struct {
		change  func(f *fixture, i *fakeIssuer, pod *corev1.Pod)
		after   time.Duration
		renewed bool
	}{
		"not before its time":    {nil, renewAfter - time.Second, false},
		"in time":                {nil, renewAfter, true},
		"by another authority":   {func(_ *fixture, i *fakeIssuer, _ *corev1.Pod) { i.set(func() { i.authority = "next" }) }, certificateCheck, true},
		"not at once by another": {func(_ *fixture, i *fakeIssuer, _ *corev1.Pod) { i.set(func() { i.authority = "next" }) }, certificateCheck - time.Second, false},
		"its Secret was deleted": {func(f *fixture, _ *fakeIssuer, pod *corev1.Pod) {
			require.NoError(f.t, f.client.Delete(f.t.Context(), f.secretOf(pod)))
		}, certificateCheck, true},
		"its Secret was forged":        {forge(func(s *corev1.Secret) { s.Data["tls.crt"] = []byte("forged") }), certificateCheck, true},
		"its Secret is no longer ours": {forge(func(s *corev1.Secret) { s.OwnerReferences = nil }), certificateCheck, true},
	} {
		t.Run(name, func(t *testing.T) {
			f, i := secured(t)
			f.reconcile()
			pod := f.onlyPod()
			before := f.certificateOf(pod)
			if tt.change != nil {
				tt.change(f, i, pod)
			}
			f.clock.Step(tt.after)
			f.reconcile()
			if !tt.renewed {
				require.Equal(t, 1, i.issued)
				return
			}
			require.Equal(t, 2, i.issued)
			require.NotEqual(t, before, f.certificateOf(pod))
			require.True(t, metav1.IsControlledBy(f.secretOf(pod), pod))
			require.Equal(t, pod.UID, f.onlyPod().UID, "the agent is not restarted")
		})
	}
}

func forge(change func(*corev1.Secret)) func(*fixture, *fakeIssuer, *corev1.Pod) {
	return func(f *fixture, _ *fakeIssuer, pod *corev1.Pod) {
		s := f.secretOf(pod)
		change(s)
		require.NoError(f.t, f.client.Update(f.t.Context(), s))
	}
}

// TestSecretOfAnotherIsTakenOver: a user who makes the Secret of a Pod first does not choose whom the agent trusts.
func TestSecretOfAnotherIsTakenOver(t *testing.T) {
	f, _ := secured(t)
	f.api.fail["create Secret"] = errAPI
	_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
	require.ErrorIs(t, err, errAPI)
	pod := f.onlyPod()
	delete(f.api.fail, "create Secret")
	require.NoError(t, f.client.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: pod.Name + "-tls"}, Data: map[string][]byte{"tls.crt": []byte("mine"), "ca.crt": []byte("mine")},
	}))
	f.reconcile()
	s := f.secretOf(pod)
	require.True(t, metav1.IsControlledBy(s, pod))
	require.NotContains(t, s.Data, "ca.crt")
	require.Contains(t, string(s.Data["tls.crt"]), string(pod.UID))
}

// TestPendingCertificate: a certificate that another component signs is asked for until it is there; the one before stays until then.
func TestPendingCertificate(t *testing.T) {
	f, i := secured(t)
	i.set(func() { i.pending = true })
	require.LessOrEqual(t, f.reconcile().RequeueAfter, pendingCheck)
	pod := f.onlyPod()
	require.Error(t, f.client.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: pod.Name + "-tls"}, &corev1.Secret{}))
	i.set(func() { i.pending = false })
	f.clock.Step(pendingCheck)
	f.reconcile()
	first := f.certificateOf(pod)
	i.set(func() { i.pending = true })
	f.clock.Step(renewAfter)
	require.LessOrEqual(t, f.reconcile().RequeueAfter, pendingCheck)
	require.Equal(t, first, f.certificateOf(pod))
	i.set(func() { i.pending = false })
	f.clock.Step(pendingCheck)
	f.reconcile()
	require.NotEqual(t, first, f.certificateOf(pod))
}

func TestCertificateErrors(t *testing.T) {
	for _, call := range []string{"get Secret", "create Secret"} {
		t.Run(call, func(t *testing.T) {
			f, _ := secured(t)
			f.api.fail[call] = errAPI
			_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
			require.ErrorIs(t, err, errAPI)
			pod := f.onlyPod()
			delete(f.api.fail, call)
			f.reconcile()
			require.NotEmpty(t, f.certificateOf(pod))
			require.Equal(t, 1, f.api.writes("create Pod"))
		})
	}
	t.Run("no authority", func(t *testing.T) {
		f, i := secured(t)
		i.err = errRefused
		_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
		require.ErrorIs(t, err, errRefused)
		require.Equal(t, 1, f.api.writes("create Pod"), "no Pod after the other")
	})
}

// TestPodsWithoutACertificateOfTheirOwn are those of earlier versions, and those of agents without TLS.
func TestPodsWithoutACertificateOfTheirOwn(t *testing.T) {
	f, _ := secured(t)
	old := agentPod("old")
	require.NoError(t, f.client.Create(t.Context(), old))
	f.reconcile()
	require.False(t, mountsOwn(old))
	require.Error(t, f.client.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: "old-tls"}, &corev1.Secret{}))
	f = newFixture(t, testPool(poolMin(1)))
	f.reconcile()
	require.Zero(t, f.api.writes("create Secret"))
}

func TestCertificatesOfRemovedPodsAreForgotten(t *testing.T) {
	f, _ := secured(t)
	f.reconcile()
	require.Len(t, f.certs.due[poolID], 1)
	require.NoError(t, f.client.Delete(t.Context(), f.onlyPod()))
	f.clock.Step(certificateCheck)
	f.reconcile()
	require.Len(t, f.certs.due[poolID], 1, "the successor's")
}
