package app

import (
	"context"
	"fmt"
	"net/http"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
)

// kinds maps the kinds that the janitor uses, so that it needs no discovery and starts without an API server.
func kinds() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	m.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	// The mapper would guess a wrong plural for Sandbox.
	m.AddSpecific(v1alpha1.GroupVersion.WithKind("Sandbox"), v1alpha1.GroupVersion.WithResource("sandboxes"),
		v1alpha1.GroupVersion.WithResource("sandbox"), meta.RESTScopeNamespace)
	return m
}

// sandboxMeta returns a Sandbox of which only the metadata is requested.
func sandboxMeta() *metav1.PartialObjectMetadata {
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("Sandbox"))
	return m
}

// source feeds the node state with the Pods of the node and the Sandboxes that are assigned to it.
type source struct {
	state *observe.NodeState
	cache cache.Cache
}

func newSource(state *observe.NodeState, c *rest.Config, scheme *runtime.Scheme, httpClient *http.Client, node string) (*source, error) {
	sandboxes := labels.SelectorFromSet(labels.Set{v1alpha1.LabelNode: node})
	if len(validation.IsValidLabelValue(node)) > 0 {
		sandboxes = labels.Everything() // a node's name may be too long for a label value; then no Sandbox has the label
	}
	informers, err := cache.New(c, cache.Options{
		HTTPClient: httpClient, Scheme: scheme, Mapper: kinds(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {Field: fields.OneTermEqualSelector("spec.nodeName", node), Transform: stripPod},
			sandboxMeta(): {Label: sandboxes, Transform: cache.TransformStripManagedFields()},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("creating the informers: %w", err)
	}
	return &source{state: state, cache: informers}, nil
}

// stripPod keeps the fields of a Pod that are used.
func stripPod(in any) (any, error) {
	if p, ok := in.(*corev1.Pod); ok {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion},
			Spec:       corev1.PodSpec{NodeName: p.Spec.NodeName}, Status: corev1.PodStatus{Phase: p.Status.Phase},
		}, nil
	}
	return in, nil
}

// run feeds the node state until ctx ends. An API server that does not answer is retried.
func (s *source) run(ctx context.Context) error {
	var synced []toolscache.InformerSynced
	for object, handler := range map[client.Object]toolscache.ResourceEventHandler{
		&corev1.Pod{}: handle(
			func(p *corev1.Pod) { s.state.SetPod(string(p.UID), observe.Ended(p)) },
			func(p *corev1.Pod) { s.state.RemovePod(string(p.UID)) }),
		sandboxMeta(): handle(
			func(m *metav1.PartialObjectMetadata) { s.state.SetSandbox(&m.ObjectMeta) },
			func(m *metav1.PartialObjectMetadata) { s.state.RemoveSandbox(&m.ObjectMeta) }),
	} {
		informer, err := s.cache.GetInformer(ctx, object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("creating an informer: %w", err)
		}
		registration, err := informer.AddEventHandler(handler)
		if err != nil {
			return fmt.Errorf("adding a handler to an informer: %w", err)
		}
		synced = append(synced, registration.HasSynced)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if toolscache.WaitForCacheSync(ctx.Done(), synced...) {
			s.state.SetSynced()
			logr.FromContextOrDiscard(ctx).Info("synced with the API server")
		}
	}()
	err := s.cache.Start(ctx)
	<-ended
	return err
}

// handle returns an event handler with functions for existing and for removed objects. An object that was recreated under its name
// between two events counts as removed too.
func handle[T client.Object](seen, gone func(T)) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { seen(obj.(T)) },
		UpdateFunc: func(old, obj any) {
			if before, now := old.(T), obj.(T); before.GetUID() != now.GetUID() {
				gone(before)
			}
			seen(obj.(T))
		},
		DeleteFunc: func(obj any) {
			if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = last.Obj
			}
			gone(obj.(T))
		},
	}
}
