package ownergc

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// reasonInvalidNamespace is the reason of the Event that Kubernetes documents.
const reasonInvalidNamespace = "OwnerRefInvalidNamespace"

// outcome is the result of processing an item.
type outcome uint8

const (
	done  outcome = iota
	again         // retry later, with backoff
)

func (c *Collector) work(ctx context.Context, queue workqueue.TypedRateLimitingInterface[graph.Item]) {
	for {
		item, down := queue.Get()
		if down {
			return
		}
		result, err := c.process(ctx, item)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			c.metrics.errors.Inc()
			logr.FromContextOrDiscard(ctx).V(2).Info("processing an item failed, retrying", obs.KeyUID, item.UID, obs.KeyOwner, item.Owner.Name, obs.KeyError, err.Error())
			queue.AddRateLimited(item)
		case result == again:
			queue.AddRateLimited(item)
		default:
			queue.Forget(item)
			c.mu.Lock()
			delete(c.since, item)
			c.mu.Unlock()
		}
		queue.Done(item)
	}
}

func (c *Collector) decide(i graph.Item, live *graph.Object) graph.Action {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.graph.Decide(i, live)
}

func (c *Collector) process(ctx context.Context, item graph.Item) (outcome, error) {
	action := c.decide(item, nil)
	switch action.Verb {
	case graph.Keep:
		return done, nil
	case graph.Lookup:
		return c.lookup(ctx, action.Ref)
	case graph.Verify:
		return c.verify(ctx, action.Object)
	case graph.Finalize:
		if c.incomplete() {
			return again, nil
		}
	}
	// After a conflict, decide again for the live object. Once: if it changes that often, the watch will trigger another attempt.
	err := c.write(ctx, item, action)
	if !apierrors.IsConflict(err) {
		return done, err
	}
	live, err := c.get(ctx, action.Object)
	if err != nil || live == nil {
		return done, err
	}
	if action = c.decide(item, live); action.Verb == graph.Keep {
		return done, nil
	}
	err = c.write(ctx, item, action)
	if apierrors.IsConflict(err) {
		return again, nil
	}
	return done, err
}

// incomplete reports whether a resource is still being listed for the first time: an owner may have dependents there that were
// not observed, and must not be finalized as if it had none. A resource that fails blocks nothing.
func (c *Collector) incomplete() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.monitors {
		select {
		case <-m.synced:
		default:
			if c.failing[m.GroupResource()] == "" {
				return true
			}
		}
	}
	return false
}

func (c *Collector) api(r resource, namespace string) metadata.ResourceInterface {
	if r.namespaced {
		return c.Metadata.Resource(r.GroupVersionResource).Namespace(namespace)
	}
	return c.Metadata.Resource(r.GroupVersionResource)
}

// lookup asks the API server for an owner. Only an unambiguous answer makes it absent.
func (c *Collector) lookup(ctx context.Context, ref graph.Ref) (outcome, error) {
	r, ok := c.resolve(ref.Kind, ref.Version)
	if !ok {
		c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Unresolved(ref) })
		return done, nil
	}
	found, err := c.api(r, ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	switch {
	case isGone(err) || err == nil && string(found.UID) != ref.UID:
		c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Missing(ref) })
		return done, nil
	case err != nil:
		return again, fmt.Errorf("getting owner %s %s: %w", ref.Kind, ref.Name, err)
	}
	c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Found(ref, observed(ref.Kind, found)) })
	return again, nil // until a watch shows it
}

// isGone reports whether an error says that an object does not exist. A resource that does not exist is something else, although
// the status code is the same.
func isGone(err error) bool {
	if !apierrors.IsNotFound(err) {
		return false
	}
	_, generic := apierrors.StatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
	return !generic
}

// get reads an observed object. It returns nil if the object is gone, and removes it from the graph.
func (c *Collector) get(ctx context.Context, o graph.Object) (*graph.Object, error) {
	r, ok := c.resolve(o.Kind, "")
	if !ok {
		return nil, nil // the kind is no longer served
	}
	found, err := c.api(r, o.Namespace).Get(ctx, o.Name, metav1.GetOptions{})
	switch {
	case isGone(err) || err == nil && string(found.UID) != o.UID:
		c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Remove(o) })
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading %s %s: %w", o.Kind, o.Name, err)
	}
	live := observed(o.Kind, found)
	return &live, nil
}

// verify checks an object that a list no longer contains.
func (c *Collector) verify(ctx context.Context, o graph.Object) (outcome, error) {
	live, err := c.get(ctx, o)
	if err != nil || live == nil {
		return done, err
	}
	c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Confirm(o.UID) })
	return again, nil // until a watch shows it
}

// write performs a write if that is permitted. A conflict is returned unchanged.
func (c *Collector) write(ctx context.Context, item graph.Item, a graph.Action) error {
	r, ok := c.resolve(a.Object.Kind, "")
	if !ok {
		return nil
	}
	log := logr.FromContextOrDiscard(ctx).V(2)
	if log.Enabled() { // these values cost five percent of a deletion
		log = log.WithValues(obs.KeyKind, a.Object.Kind.String(), obs.KeyNamespace, a.Object.Namespace, obs.KeyName, a.Object.Name,
			obs.KeyUID, a.Object.UID, obs.KeyCause, string(a.Cause))
	}
	if !c.InScope(a.Object.Kind.Group) || c.Spares(a.Object) {
		return nil
	}
	if err := c.Permit(c.intent(a)); err != nil {
		log.Info("write not permitted", obs.KeyError, err.Error())
		return nil
	}
	err := c.send(ctx, r, a)
	if isGone(err) {
		c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Remove(a.Object) })
		return nil
	}
	if apierrors.IsConflict(err) {
		c.metrics.conflicts.Inc()
		return err
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", a.Object.Kind, a.Object.Name, err)
	}
	log.Info("object written", obs.KeyVerb, verbs[a.Verb], obs.KeyPolicy, string(a.Policy), obs.KeyFinalizer, a.Finalizer, obs.KeyOwners, len(a.Owners))
	c.metrics.written(c, item, a)
	if a.Verb == graph.Delete && c.Deleted != nil {
		c.Deleted(Deletion{Object: a.Object, Policy: a.Policy, Cause: a.Cause, Time: c.Clock.Now()})
	}
	return nil
}

// intent returns what a write means for the circuit breaker.
func (c *Collector) intent(a graph.Action) *breaker.Intent {
	if a.Verb != graph.Delete {
		return nil
	}
	return &breaker.Intent{Objects: c.Size().Objects, Waiting: c.toDelete.Len() + c.Workers, Doomed: func() (n int) {
		c.Query(func(g *graph.Graph) { n = g.Doomed(func(k graph.Kind) bool { return c.InScope(k.Group) }) })
		return n
	}}
}

func (c *Collector) send(ctx context.Context, r resource, a graph.Action) error {
	api := c.api(r, a.Object.Namespace)
	if a.Verb == graph.Delete {
		return api.Delete(ctx, a.Object.Name, metav1.DeleteOptions{
			PropagationPolicy: ptr.To(metav1.DeletionPropagation(a.Policy)),
			Preconditions:     &metav1.Preconditions{UID: ptr.To(types.UID(a.Object.UID)), ResourceVersion: ptr.To(a.Object.ResourceVersion)},
		})
	}
	body, err := patch(a)
	if err != nil {
		return err
	}
	_, err = api.Patch(ctx, a.Object.Name, types.MergePatchType, body, metav1.PatchOptions{})
	return err
}

// warn writes an Event about a reference that can never work. Only a collector that is permitted to write does so.
func (c *Collector) warn(ctx context.Context, i graph.Invalid) {
	d := i.Dependent
	r, ok := c.resolve(d.Kind, "")
	if !ok || c.Permit(nil) != nil {
		return
	}
	logr.FromContextOrDiscard(ctx).V(2).Info("owner reference across namespaces", obs.KeyKind, d.Kind.String(), obs.KeyNamespace, d.Namespace, obs.KeyName, d.Name)
	c.Recorder.Eventf(&corev1.ObjectReference{
		APIVersion: r.GroupVersion().String(), Kind: d.Kind.Kind, Namespace: d.Namespace, Name: d.Name, UID: types.UID(d.UID),
	}, nil, corev1.EventTypeWarning, reasonInvalidNamespace, "Collect", "ownerRef [%s/%s, namespace: %s, name: %s, uid: %s] does not exist in namespace %q",
		i.Owner.Kind.Group, i.Owner.Kind.Kind, d.Namespace, i.Owner.Name, i.Owner.UID, d.Namespace)
}
