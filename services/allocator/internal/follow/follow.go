// Package follow reads the custom resources of all sandboxes from the API server and follows their changes, for a store that keeps them
// in its own way. An informer would keep them a second time, and reads them one after the other: a list of 100,000 took half a minute.
// A Follower decodes a list on all processors while it arrives, and keeps nothing. Run is called once; the other methods may be called concurrently.
//
// The first list has metadata alone, in protobuf: it takes the API server a third of the time of whole objects, which there is no protobuf
// for. Whole objects follow in the background, once Config.Fill is closed. Changes are watched from the first list on.
//
// A Follower lists in pages only if the API server cannot make the whole list in one request: each page but the first took five times as long for
// as many objects, because the API server does not make it from memory.
package follow

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/informer"
)

// Sink receives the sandboxes, which it may keep. Calls for different sandboxes are concurrent.
type Sink interface {
	// Outlined is called with the metadata of each sandbox that existed at the start: spec and status are empty.
	Outlined(sb *v1alpha1.Sandbox)
	// Filled is called with each sandbox that existed some time after that. It is no evidence that the sandbox exists now, or is
	// newer than what was seen.
	Filled(sb *v1alpha1.Sandbox)
	// Seen is called with each change, and each sandbox that exists when the changes were not watched.
	Seen(sb *v1alpha1.Sandbox)
	// Gone is called when a sandbox was deleted, with its last state.
	Gone(sb *v1alpha1.Sandbox)
	// Known returns the sandboxes that are known and not listed, as of a resource version.
	Known(listed map[types.UID]struct{}, version string) []*v1alpha1.Sandbox
}

// Config is what a Follower needs.
type Config struct {
	REST   *rest.Config
	HTTP   *http.Client
	Scheme *apiruntime.Scheme
	Sink   Sink
	Clock  clock.Clock
	// Fill is closed when the sandboxes that were outlined may be read: that takes the API server a while.
	Fill <-chan struct{}
}

// Follower follows the custom resources.
type Follower struct {
	config  Config
	client  rest.Interface
	params  apiruntime.ParameterCodec
	synced  chan struct{}
	filled  chan struct{}
	version string // of the first list; written before synced is closed

	// listed are the sandboxes of the list that was made last; only the reflector's goroutine uses it.
	listed map[types.UID]struct{}
}

// New returns a follower that is not running.
func New(cfg Config) (*Follower, error) {
	config := rest.CopyConfig(cfg.REST)
	config.APIPath, config.GroupVersion = "/apis", &v1alpha1.GroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(cfg.Scheme).WithoutConversion()
	client, err := rest.RESTClientForConfigAndClient(config, cfg.HTTP)
	if err != nil {
		return nil, fmt.Errorf("creating the client for sandboxes: %w", err)
	}
	return &Follower{config: cfg, client: client, params: apiruntime.NewParameterCodec(cfg.Scheme), synced: make(chan struct{}), filled: make(chan struct{})}, nil
}

// Run follows until ctx ends. While the API server is unreachable, it retries.
func (f *Follower) Run(ctx context.Context) {
	var filling sync.WaitGroup
	defer filling.Wait()
	filling.Go(func() { f.fill(ctx) })
	reflector := cache.NewReflectorWithOptions(informer.Retrying(source{f}), &v1alpha1.Sandbox{}, sink{f}, cache.ReflectorOptions{Name: "sandboxes"})
	reflector.RunWithContext(ctx)
}

// Synced returns a channel that is closed once the sink has all sandboxes, be it in outline.
func (f *Follower) Synced() <-chan struct{} { return f.synced }

// Filled returns a channel that is closed once the sink has read the sandboxes that were outlined.
func (f *Follower) Filled() <-chan struct{} { return f.filled }

// source is a cache.ListerWatcherWithContext whose lists go to the sink and are returned empty.
type source struct{ *Follower }

// IsWatchListSemanticsUnSupported keeps the reflector from streaming the list.
func (source) IsWatchListSemanticsUnSupported() bool { return true }

// List implements cache.ListerWatcher, which the reflector does not use.
func (s source) List(options metav1.ListOptions) (apiruntime.Object, error) {
	return s.ListWithContext(context.Background(), options)
}

// Watch implements cache.ListerWatcher, which the reflector does not use.
func (s source) Watch(options metav1.ListOptions) (watch.Interface, error) {
	return s.WatchWithContext(context.Background(), options)
}

// WatchWithContext implements cache.ListerWatcherWithContext.
func (s source) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	options.Watch = true
	return s.client.Get().Resource("sandboxes").VersionedParams(&options, s.params).Watch(ctx)
}

// ListWithContext implements cache.ListerWatcherWithContext.
func (s source) ListWithContext(ctx context.Context, options metav1.ListOptions) (apiruntime.Object, error) {
	f := outlines(s.config.Sink.Outlined)
	select {
	case <-s.synced:
		f = objects(s.config.Sink.Seen)
	default:
	}
	options.Limit = 0
	listed, version, err := s.list(ctx, options, f)
	if err != nil {
		return nil, err
	}
	s.listed = listed
	return &v1alpha1.SandboxList{ListMeta: metav1.ListMeta{ResourceVersion: version}}, nil
}

// sink is the cache.ReflectorStore of a reflector.
type sink struct{ *Follower }

// Add implements cache.ReflectorStore.
func (s sink) Add(obj any) error { return s.Update(obj) }

// Update implements cache.ReflectorStore.
func (s sink) Update(obj any) error {
	s.config.Sink.Seen(obj.(*v1alpha1.Sandbox))
	return nil
}

// Delete implements cache.ReflectorStore.
func (s sink) Delete(obj any) error {
	s.config.Sink.Gone(obj.(*v1alpha1.Sandbox))
	return nil
}

// Replace implements cache.ReflectorStore after a list, which the sink has already.
func (s sink) Replace(_ []any, version string) error {
	for _, sb := range s.config.Sink.Known(s.listed, version) {
		s.config.Sink.Gone(sb)
	}
	s.listed = nil
	if s.version == "" {
		s.version = version
		close(s.synced)
	}
	return nil
}

// Resync implements cache.ReflectorStore.
func (sink) Resync() error { return nil }
