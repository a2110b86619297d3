package app_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
)

// TestRecreatedPod: a Pod was deleted and created again under its name between two events. The old uid is gone.
func TestRecreatedPod(t *testing.T) {
	var reported []string
	h := app.HandlePods(
		func(p *corev1.Pod) { reported = append(reported, "seen "+string(p.UID)) },
		func(p *corev1.Pod) { reported = append(reported, "gone "+string(p.UID)) })
	pod := func(uid string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "agent", UID: types.UID(uid)}}
	}
	h.OnAdd(pod("a"), true)
	h.OnUpdate(pod("a"), pod("a"))
	h.OnUpdate(pod("a"), pod("b"))
	h.OnDelete(toolscache.DeletedFinalStateUnknown{Key: "ns/agent", Obj: pod("b")})
	h.OnDelete(pod("c"))
	require.Equal(t, []string{"seen a", "seen a", "gone a", "seen b", "gone b", "gone c"}, reported)
}
