package app

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/informer"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/follow"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// source feeds the parts from the API server: agent Pods, pools, quotas and sandboxes of all namespaces.
type source struct {
	parts     *parts
	cache     cache.Cache
	sandboxes *follow.Follower
}

func newSource(a *App, p *parts, scheme *runtime.Scheme, mapper meta.RESTMapper, httpClient *http.Client) (*source, error) {
	c, err := cache.New(a.rest, cache.Options{
		HTTPClient: httpClient, Scheme: scheme, Mapper: mapper, NewInformer: informer.New, DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {Label: labels.SelectorFromSet(labels.Set{v1alpha1.LabelComponent: v1alpha1.ComponentAgent})},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("creating the informers: %w", err)
	}
	sandboxes, err := follow.New(follow.Config{
		REST: a.rest, HTTP: httpClient, Scheme: scheme, Sink: resources{p.fastpath, p.store}, Clock: a.clock, Fill: p.fill,
	})
	if err != nil {
		return nil, err
	}
	return &source{parts: p, cache: c, sandboxes: sandboxes}, nil
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
		if toolscache.WaitForCacheSync(ctx.Done(), synchronized...) && s.listed(ctx) {
			s.parts.feed.SetSynced()
			s.parts.pools.SetSynced()
			log.Info("synced with the API server", obs.KeySandboxes, s.parts.store.Len())
			synced()
		}
	}()
	var following sync.WaitGroup
	following.Go(func() { s.sandboxes.Run(ctx) })
	err := s.cache.Start(ctx)
	<-ended
	following.Wait()
	return err
}

// listed waits until all sandboxes are known, and reports whether they are.
func (s *source) listed(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-s.sandboxes.Synced():
		return true
	}
}

// resources is a follow.Sink.
type resources struct {
	fastpath *fastpath.Server
	store    *store.Store
}

// Outlined implements follow.Sink.
func (r resources) Outlined(sb *v1alpha1.Sandbox) { r.fastpath.ResourceOutlined(sb) }

// Filled implements follow.Sink.
func (r resources) Filled(sb *v1alpha1.Sandbox) { r.store.Fill(sb) }

// Seen implements follow.Sink.
func (r resources) Seen(sb *v1alpha1.Sandbox) { r.fastpath.ResourceSeen(sb) }

// Gone implements follow.Sink.
func (r resources) Gone(sb *v1alpha1.Sandbox) { r.fastpath.ResourceGone(sb) }

// Known implements follow.Sink.
func (r resources) Known(listed map[types.UID]struct{}, version string) []*v1alpha1.Sandbox {
	return r.store.Unlisted(listed, version)
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
