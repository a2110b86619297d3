package app

import (
	"context"
	"fmt"
	"net/http"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/informer"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// source feeds the parts from the API server: agent Pods, pools, quotas and sandboxes of all namespaces.
type source struct {
	parts *parts
	cache cache.Cache
}

func newSource(a *App, p *parts, scheme *runtime.Scheme, mapper meta.RESTMapper, httpClient *http.Client) (*source, error) {
	c, err := cache.New(a.rest, cache.Options{
		HTTPClient: httpClient, Scheme: scheme, Mapper: mapper, NewInformer: informer.New, DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}:       {Label: labels.SelectorFromSet(labels.Set{v1alpha1.LabelComponent: v1alpha1.ComponentAgent})},
			&v1alpha1.Sandbox{}: {Transform: compact},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("creating the informers: %w", err)
	}
	return &source{parts: p, cache: c}, nil
}

// run feeds the parts until ctx ends, and calls synced once the informers have listed all objects. While the API server is
// unreachable, the informers retry.
func (s *source) run(ctx context.Context, synced func()) error {
	log := logr.FromContextOrDiscard(ctx)
	handlers := []struct {
		object  client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&v1alpha1.SandboxPool{}, handle(
			func(p *v1alpha1.SandboxPool) { s.parts.pools.Set(p); s.parts.members.SetPool(p) },
			func(p *v1alpha1.SandboxPool) { s.parts.pools.Remove(p); s.parts.members.RemovePool(p) })},
		// Whole objects: an informer of metadata alone leaves a goroutine of watch.Filter behind when it stops.
		{&corev1.Namespace{}, handle(s.parts.pools.SetNamespace, s.parts.pools.RemoveNamespace)},
		{&corev1.ResourceQuota{}, handle(s.parts.quotas.Set, s.parts.quotas.Remove)},
		{&v1alpha1.Sandbox{}, handle(s.parts.fastpath.ResourceSeen, s.parts.fastpath.ResourceGone)},
		{&corev1.Pod{}, handle(s.parts.members.SetPod, s.parts.members.RemovePod)},
	}
	var synchronized []toolscache.InformerSynced
	for _, h := range handlers {
		informer, err := s.cache.GetInformer(ctx, h.object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("creating an informer: %w", err)
		}
		registration, err := informer.AddEventHandler(h.handler)
		if err != nil {
			return fmt.Errorf("adding a handler to an informer: %w", err)
		}
		synchronized = append(synchronized, registration.HasSynced)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if toolscache.WaitForCacheSync(ctx.Done(), synchronized...) {
			s.parts.feed.SetSynced()
			s.parts.pools.SetSynced()
			log.Info("synced with the API server", obs.KeySandboxes, s.parts.store.Len())
			synced()
		}
	}()
	err := s.cache.Start(ctx)
	<-ended
	return err
}

// handle returns an event handler that calls seen for existing objects and gone for deleted ones.
func handle[T client.Object](seen, gone func(T)) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { seen(obj.(T)) },
		UpdateFunc: func(_, obj any) { seen(obj.(T)) },
		DeleteFunc: func(obj any) {
			if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = last.Obj
			}
			gone(obj.(T))
		},
	}
}
