//go:build integration

package ownergc_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// crowd is the number of concurrent users. They work for FSB_GC_STRESS, by default for a few seconds.
const crowd = 20

// TestStress creates and deletes many owners with dependents concurrently, with random policies, and restarts the collector in
// the middle. In the end exactly the expected objects are left, with exactly the expected owners.
func TestStress(t *testing.T) {
	duration := 5 * time.Second
	if given := config.Env("FSB_GC_STRESS"); given != "" {
		var err error
		duration, err = time.ParseDuration(given)
		require.NoError(t, err)
	}
	w := newTestEnv(t)
	w.start(w.rest)
	keeper := w.config("keeper")
	end := time.Now().Add(duration)
	wants := make([]map[string][]string, crowd) // the expected objects with their owners
	var wg sync.WaitGroup
	for i := range crowd {
		wants[i] = map[string][]string{}
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 7))
			for round := 0; time.Now().Before(end); round++ {
				w.tree(random, fmt.Sprintf("s%d-%d", i, round), keeper, wants[i])
			}
		})
	}
	for range 3 {
		waitUntil(time.Now().Add(duration / 5))
		w.stop()
		w.start(w.rest)
	}
	wg.Wait()
	want := map[string][]string{"keeper": {}}
	for _, some := range wants {
		for name, owners := range some {
			want[name] = owners
		}
	}
	left := func() map[string][]string {
		var list corev1.ConfigMapList
		require.NoError(t, w.kube.List(t.Context(), &list, client.InNamespace(w.namespace)))
		out := map[string][]string{}
		for _, c := range list.Items {
			if c.Name == "kube-root-ca.crt" {
				continue
			}
			names := []string{}
			for _, r := range c.OwnerReferences {
				names = append(names, r.Name)
			}
			slices.Sort(names)
			out[c.Name] = names
		}
		return out
	}
	// On a busy machine the collector may lag behind: it may take long, as long as it makes progress.
	wrong, since := differences(want, left()), time.Now()
	for len(wrong) > 0 && time.Since(since) < testkit.Timeout {
		waitUntil(time.Now().Add(500 * time.Millisecond))
		now := differences(want, left())
		if len(now) != len(wrong) {
			since = time.Now()
		}
		wrong = now
	}
	if len(wrong) > 0 {
		require.Fail(t, "not what should be left", "%d of %d: %v", len(wrong), len(want), wrong[:min(len(wrong), 20)])
	}
	t.Logf("%d objects are left, as they should be", len(want))
	waitUntil(time.Now().Add(time.Second))
	require.Empty(t, differences(want, left()), "nothing else is deleted later")
}

func waitUntil(when time.Time) { <-time.After(time.Until(when)) }

func differences(want, got map[string][]string) (out []string) {
	for name, owners := range want {
		if other, ok := got[name]; !ok {
			out = append(out, name+" is gone")
		} else if !slices.Equal(owners, other) {
			out = append(out, fmt.Sprintf("%s has owners %v, want %v", name, other, owners))
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			out = append(out, name+" is still there")
		}
	}
	slices.Sort(out)
	return out
}

// tree creates an owner with two levels of dependents, deletes it, and records what must be left.
func (w *testEnv) tree(random *rand.Rand, name string, keeper *corev1.ConfigMap, want map[string][]string) {
	ctx := w.t.Context()
	make1 := func(name string, owners ...metav1.OwnerReference) *corev1.ConfigMap {
		c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, OwnerReferences: owners}}
		if err := w.kube.Create(ctx, c); err != nil {
			w.t.Errorf("creating %s: %v", name, err)
		}
		return c
	}
	policy := []metav1.DeletionPropagation{metav1.DeletePropagationBackground, metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan}[random.IntN(3)]
	orphan := policy == metav1.DeletePropagationOrphan
	root := make1(name)
	block := random.IntN(2) == 0
	for i := range 1 + random.IntN(3) {
		owners := []metav1.OwnerReference{owner(root, block)}
		kept := random.IntN(3) == 0
		if kept {
			owners = append(owners, owner(keeper, false))
		}
		middle := make1(fmt.Sprintf("%s-%d", name, i), owners...)
		switch {
		case kept:
			want[middle.Name] = []string{"keeper"}
		case orphan:
			want[middle.Name] = []string{}
		}
		for j := range random.IntN(3) {
			leaf := make1(fmt.Sprintf("%s-%d-%d", name, i, j), owner(middle, block))
			if kept || orphan {
				want[leaf.Name] = []string{middle.Name}
			}
		}
	}
	if err := w.kube.Delete(ctx, root, client.PropagationPolicy(policy)); err != nil {
		w.t.Errorf("deleting %s: %v", name, err)
	}
}
