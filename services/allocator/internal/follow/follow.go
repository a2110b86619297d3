// Package follow reads the custom resources of all sandboxes from the API server and follows their changes, for a store that keeps them
// in its own way. An informer would keep them a second time, and reads them one after the other: a list of 100,000 took half a minute.
// A Follower decodes a list on all processors while it arrives, and keeps nothing. Run is called once; Synced may be called concurrently.
//
// It lists in pages only if the API server cannot make the whole list in one request: each page but the first took five times as long for
// as many objects, because the API server does not make it from memory.
package follow

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/informer"
)

// pageSize is the number of objects of a page.
const pageSize = 5000

// Sink receives the sandboxes, which it may keep.
type Sink interface {
	// Seen is called with each sandbox that exists, and again with each change. Calls for different sandboxes are concurrent.
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
}

// Follower follows the custom resources.
type Follower struct {
	sink   Sink
	client rest.Interface
	params apiruntime.ParameterCodec
	synced chan struct{}
	once   sync.Once

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
	return &Follower{sink: cfg.Sink, client: client, params: apiruntime.NewParameterCodec(cfg.Scheme), synced: make(chan struct{})}, nil
}

// Run follows until ctx ends. While the API server is unreachable, it retries.
func (f *Follower) Run(ctx context.Context) {
	reflector := cache.NewReflectorWithOptions(informer.Retrying(source{f}), &v1alpha1.Sandbox{}, sink{f}, cache.ReflectorOptions{Name: "sandboxes"})
	reflector.RunWithContext(ctx)
}

// Synced returns a channel that is closed once the sink has all sandboxes.
func (f *Follower) Synced() <-chan struct{} { return f.synced }

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

// ListWithContext implements cache.ListerWatcherWithContext. If a list breaks off, because the API server could not make it within the
// time that it allows for a request, it is made in pages.
func (s source) ListWithContext(ctx context.Context, options metav1.ListOptions) (apiruntime.Object, error) {
	options.Limit = 0
	list, err := s.list(ctx, options)
	if errors.As(err, new(brokenOffError)) && ctx.Err() == nil {
		list, err = s.list(ctx, metav1.ListOptions{Limit: pageSize})
	}
	if err != nil {
		return nil, err
	}
	return list, nil
}

// brokenOffError is the error of an answer that was not read to its end.
type brokenOffError struct{ error }

// Unwrap returns the reason.
func (b brokenOffError) Unwrap() error { return b.error }

// list reads one list, which may have several pages.
func (s source) list(ctx context.Context, options metav1.ListOptions) (*v1alpha1.SandboxList, error) {
	items := make(chan []byte, 64)
	decoding, decode := errgroup.WithContext(ctx)
	listed := map[types.UID]struct{}{}
	var mu sync.Mutex
	for range runtime.GOMAXPROCS(0) {
		decoding.Go(func() error {
			uids, err := s.decode(items)
			mu.Lock()
			defer mu.Unlock()
			for _, uid := range uids {
				listed[uid] = struct{}{}
			}
			return err
		})
	}
	var meta metav1.ListMeta
	var err error
	for more := true; more && err == nil; more = meta.Continue != "" {
		meta, err = s.page(ctx, options, func(item []byte) error {
			select {
			case items <- item:
				return nil
			case <-decode.Done():
				return decode.Err()
			}
		})
		options.Continue, options.ResourceVersion = meta.Continue, ""
	}
	close(items)
	if err := errors.Join(decoding.Wait(), err); err != nil {
		return nil, err
	}
	s.listed = listed
	return &v1alpha1.SandboxList{ListMeta: metav1.ListMeta{ResourceVersion: meta.ResourceVersion}}, nil
}

// page reads one answer. It is not compressed, which would cost more than it saves.
func (s source) page(ctx context.Context, options metav1.ListOptions, item func([]byte) error) (metav1.ListMeta, error) {
	body, err := s.client.Get().Resource("sandboxes").VersionedParams(&options, s.params).SetHeader("Accept-Encoding", "identity").Stream(ctx)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	defer func() { _ = body.Close() }()
	meta, err := split(body, item)
	if err != nil {
		return metav1.ListMeta{}, brokenOffError{err}
	}
	return meta, nil
}

// decode has the sink see items, and returns their uids.
func (s source) decode(items <-chan []byte) ([]types.UID, error) {
	var uids []types.UID
	for item := range items {
		item, err := strip(item)
		if err != nil {
			return nil, fmt.Errorf("reading a sandbox: %w", err)
		}
		sb := &v1alpha1.Sandbox{}
		if err := json.Unmarshal(item, sb); err != nil {
			return nil, fmt.Errorf("decoding a sandbox: %w", err)
		}
		s.sink.Seen(sb)
		uids = append(uids, sb.UID)
	}
	return uids, nil
}

// sink is the cache.ReflectorStore of a reflector.
type sink struct{ *Follower }

// Add implements cache.ReflectorStore.
func (s sink) Add(obj any) error { return s.Update(obj) }

// Update implements cache.ReflectorStore.
func (s sink) Update(obj any) error {
	s.sink.Seen(obj.(*v1alpha1.Sandbox))
	return nil
}

// Delete implements cache.ReflectorStore.
func (s sink) Delete(obj any) error {
	s.sink.Gone(obj.(*v1alpha1.Sandbox))
	return nil
}

// Replace implements cache.ReflectorStore after a list, which the sink has already.
func (s sink) Replace(_ []any, version string) error {
	for _, sb := range s.sink.Known(s.listed, version) {
		s.sink.Gone(sb)
	}
	s.listed = nil
	s.once.Do(func() { close(s.synced) })
	return nil
}

// Resync implements cache.ReflectorStore.
func (sink) Resync() error { return nil }
