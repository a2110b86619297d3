package rival_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/rival"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world looks for a rival in the background.
type world struct {
	client *fake.Clientset
	clock  *clocktesting.FakeClock
	looked chan error
	cancel context.CancelFunc
}

func look(t *testing.T) *world {
	w := &world{client: fake.NewClientset(), clock: clocktesting.NewFakeClock(time.Unix(1_700_000_000, 0)), looked: make(chan error, 1)}
	w.client.PrependReactor("create", "configmaps", func(a k8stesting.Action) (bool, runtime.Object, error) {
		bait := a.(k8stesting.CreateAction).GetObject().(*corev1.ConfigMap)
		bait.Name, bait.UID = "bait", "uid" // the fake makes up no names
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	w.cancel = cancel
	t.Cleanup(cancel)
	go func() { w.looked <- rival.Look(ctx, w.client, "ns", 5*time.Second, w.clock) }()
	// The ticker and the timer.
	require.Eventually(t, func() bool { return w.clock.Waiters() == 2 }, 20*time.Second, time.Millisecond)
	return w
}

func (w *world) bait(t *testing.T) []corev1.ConfigMap {
	list, err := w.client.CoreV1().ConfigMaps("ns").List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	return list.Items
}

func TestNobodyTakesTheBait(t *testing.T) {
	w := look(t)
	require.Len(t, w.bait(t), 1)
	require.Len(t, w.bait(t)[0].OwnerReferences, 1)
	w.clock.Step(5 * time.Second)
	require.NoError(t, <-w.looked)
	require.Empty(t, w.bait(t))
}

func TestSomebodyTakesTheBait(t *testing.T) {
	w := look(t)
	require.NoError(t, w.client.CoreV1().ConfigMaps("ns").Delete(t.Context(), "bait", metav1.DeleteOptions{}))
	w.clock.Step(200 * time.Millisecond)
	require.ErrorIs(t, <-w.looked, rival.ErrFound)
}

func TestSomebodyTakesTheBaitAtTheLastMoment(t *testing.T) {
	w := look(t)
	w.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, &corev1.ConfigMap{}, nil
	})
	require.NoError(t, w.client.CoreV1().ConfigMaps("ns").Delete(t.Context(), "bait", metav1.DeleteOptions{}))
	w.clock.Step(5 * time.Second)
	require.ErrorIs(t, <-w.looked, rival.ErrFound)
}

func TestTheBaitIsTakenAwayInAnyCase(t *testing.T) {
	w := look(t)
	away := errors.New("refused")
	w.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, away })
	w.clock.Step(200 * time.Millisecond)
	require.ErrorIs(t, <-w.looked, away)
	require.Empty(t, w.bait(t))
	w = look(t)
	w.cancel()
	require.ErrorIs(t, <-w.looked, context.Canceled)
	require.Empty(t, w.bait(t))
}
