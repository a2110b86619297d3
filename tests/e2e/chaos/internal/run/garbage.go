package run

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/truth"
)

// dependents is the number of objects of each owner.
const dependents = 20

// garbage is work for the garbage collector: owners with dependents. Each time the harness kills the leading collector it
// deletes one owner; the audit then expects that the dependents are deleted, by the collector that takes over.
type garbage struct {
	kube   client.Client
	prefix string
	total  int
	wg     sync.WaitGroup

	mu       sync.Mutex
	owners   []*corev1.ConfigMap
	released int
}

func newGarbage(kube client.Client, prefix string, faults []plan.Fault) *garbage {
	g := &garbage{kube: kube, prefix: prefix}
	for _, f := range faults {
		if f.Kind == plan.KillGC {
			g.total++
		}
	}
	return g
}

func (g *garbage) object(name string, owners ...metav1.OwnerReference) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: g.prefix + name, Labels: map[string]string{truth.GarbageLabel: pool}, OwnerReferences: owners,
	}}
}

// create creates one owner, with its dependents, for each time that the collector will be killed.
func (g *garbage) create(ctx context.Context) error {
	for i := range g.total {
		owner := g.object(fmt.Sprintf("owner-%d", i))
		if err := g.kube.Create(ctx, owner); err != nil {
			return fmt.Errorf("creating an owner: %w", err)
		}
		g.owners = append(g.owners, owner)
		for j := range dependents {
			ref := metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}
			if err := g.kube.Create(ctx, g.object(fmt.Sprintf("dependent-%d-%d", i, j), ref)); err != nil {
				return fmt.Errorf("creating a dependent: %w", err)
			}
		}
	}
	return nil
}

// release deletes the next owner, in the background: the API server may be down.
func (g *garbage) release(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.owners) == 0 {
		return
	}
	owner := g.owners[0]
	g.owners = g.owners[1:]
	g.wg.Go(func() {
		err := poll(ctx, time.Minute, func(ctx context.Context) error { return client.IgnoreNotFound(g.kube.Delete(ctx, owner)) })
		if err == nil {
			g.mu.Lock()
			g.released++
			g.mu.Unlock()
		}
	})
}

// wait returns when every owner that was released is deleted, or cannot be.
func (g *garbage) wait() { g.wg.Wait() }

// deleted returns the number of dependents that the garbage collector had to delete.
func (g *garbage) deleted() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.released * dependents
}
