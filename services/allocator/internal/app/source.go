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

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/informer"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// source feeds the parts from the API server: agent Pods, pools and sandboxes of all namespaces.
type source struct {
	app   *App
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
	return &source{app: a, parts: p, cache: c}, nil
}

// run feeds the parts until ctx ends, and calls synced once the informers have listed all objects. While the API server is
// unreachable, the informers retry.
func (s *source) run(ctx context.Context, synced func()) error {
	log := logr.FromContextOrDiscard(ctx)
	handlers := []struct {
		object  client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&v1alpha1.SandboxPool{}, handle(s.parts.pools.Set, s.parts.pools.Remove)},
		// Whole objects: an informer of metadata alone leaves a goroutine of watch.Filter behind when it stops.
		{&corev1.Namespace{}, handle(s.parts.pools.SetNamespace, s.parts.pools.RemoveNamespace)},
		{&v1alpha1.Sandbox{}, handle(s.parts.fastpath.ResourceSeen, s.parts.fastpath.ResourceGone)},
		{&corev1.Pod{}, handle(s.podSeen, func(pod *corev1.Pod) { s.parts.feed.RemovePod(string(pod.UID)) })},
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

// podSeen adds the agent of a running Pod. A Pod that has ended counts as removed; one that is being deleted still serves its
// sandboxes.
func (s *source) podSeen(pod *corev1.Pod) {
	switch {
	case pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
		s.parts.feed.RemovePod(string(pod.UID))
	case pod.Status.PodIP != "":
		s.parts.feed.SetPod(&agentv1.AgentInfo{
			PodName: pod.Name, PodUid: string(pod.UID), Namespace: pod.Namespace, Pool: pod.Labels[v1alpha1.LabelPool],
			NodeName: pod.Spec.NodeName, PodIp: pod.Status.PodIP,
		}, s.app.agentAddress(pod.Status.PodIP))
	}
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
