package gc

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

const (
	// depth of the tree.
	depth = 3
	// role is a label's key; the values follow.
	role           = "bench.fast-sandbox.io/role"
	treeOwner      = "tree-owner"
	treeDependents = "tree-dependent"
	pairOwners     = "pair-owner"
	pairDependents = "pair-dependent"
	// clearTime is how long it may take to remove what a collector has left.
	clearTime = 5 * time.Minute
)

// set is the objects that one candidate works on, in a namespace of their own.
type set struct {
	*testbed
	namespace string
}

func (w *testbed) newSet(ctx context.Context, name string) (*set, error) {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "bench-" + name}}
	if _, err := w.kube.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
		return nil, fmt.Errorf("making a namespace: %w", err)
	}
	return &set{testbed: w, namespace: namespace.Name}, nil
}

// Fanout is the least number of dependents of each object with which a tree of that depth has room for n of them.
func Fanout(n, depth int) int {
	for f := 1; ; f++ {
		room, level := 0, 1
		for range depth {
			level *= f
			room += level
		}
		if room >= n {
			return f
		}
	}
}

// populate makes the tree, owners before dependents, and the pairs.
func (s *set) populate(ctx context.Context) error {
	began := time.Now()
	tree := make([]*corev1.ConfigMap, 1+s.Dependents) // the root, and level after level
	var err error
	if tree[0], err = s.create(ctx, "tree-0", treeOwner, nil); err != nil {
		return err
	}
	fanout := Fanout(s.Dependents, depth)
	for first := 1; first < len(tree); {
		after := min(fanout*first+1, len(tree)) // those whose owners exist: the owner of i is (i-1)/fanout
		if err := apiserver.Each(ctx, after-first, func(ctx context.Context, i int) (err error) {
			i += first
			tree[i], err = s.create(ctx, fmt.Sprintf("tree-%d", i), treeDependents, tree[(i-1)/fanout])
			return err
		}); err != nil {
			return err
		}
		first = after
	}
	if err := apiserver.Each(ctx, s.Pairs, func(ctx context.Context, i int) error {
		owner, err := s.create(ctx, pairOwner(i), pairOwners, nil)
		if err != nil {
			return err
		}
		_, err = s.create(ctx, fmt.Sprintf("pair-dependent-%d", i), pairDependents, owner)
		return err
	}); err != nil {
		return err
	}
	s.Say("%d objects exist after %.1f s", 1+s.Dependents+2*s.Pairs, time.Since(began).Seconds())
	return nil
}

func pairOwner(i int) string { return fmt.Sprintf("pair-owner-%d", i) }

func (s *set) create(ctx context.Context, name, as string, owner *corev1.ConfigMap) (*corev1.ConfigMap, error) {
	o := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{role: as, "app.kubernetes.io/name": "bench"},
			Annotations: map[string]string{"bench.fast-sandbox.io/purpose": "an object to be collected"}},
		Data: map[string]string{"setting": "value"},
	}
	if owner != nil {
		o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID,
			Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}}
	}
	made, err := s.kube.CoreV1().ConfigMaps(s.namespace).Create(ctx, o, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("making %s: %w", name, err)
	}
	return made, nil
}

// dropTree deletes the tree's owner.
func (s *set) dropTree(ctx context.Context) (requests int, err error) {
	return 1, s.drop(ctx, "tree-0")
}

// dropPairs deletes the pairs' owners.
func (s *set) dropPairs(ctx context.Context) (requests int, err error) {
	return s.Pairs, apiserver.Each(ctx, s.Pairs, func(ctx context.Context, i int) error { return s.drop(ctx, pairOwner(i)) })
}

func (s *set) drop(ctx context.Context, name string) error {
	err := s.kube.CoreV1().ConfigMaps(s.namespace).Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
	if err != nil {
		return fmt.Errorf("deleting %s: %w", name, err)
	}
	return nil
}

// clear removes the objects that are left. No collector runs.
func (s *set) clear(ctx context.Context) error {
	return mesh.Poll(ctx, 100*time.Millisecond, clearTime, func(ctx context.Context) error {
		maps := s.kube.CoreV1().ConfigMaps(s.namespace)
		if err := maps.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: role}); err != nil {
			return fmt.Errorf("removing what is left: %w", err)
		}
		left, err := maps.List(ctx, metav1.ListOptions{LabelSelector: role, Limit: 1})
		if err != nil {
			return fmt.Errorf("listing the objects that are left: %w", err)
		}
		if len(left.Items) > 0 {
			return fmt.Errorf("objects are left in %s", s.namespace)
		}
		return nil
	})
}
