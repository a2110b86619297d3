package ctrd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	progressInterval = 100 * time.Millisecond
	parallelLayers   = 3
)

// pull fetches and unpacks an image.
func (r *imageStore) pull(ctx context.Context, name string, progress func(runtime.Progress)) error {
	ctx, span := obs.Tracer().Start(ctx, "image.pull")
	defer span.End()
	resolver, err := r.resolver()
	if err != nil {
		return pullFault(err, name)
	}
	t := &tracker{store: r.client.ContentStore(), image: name, maxBytes: r.config.MaxImageBytes}
	progress(runtime.Progress{Phase: runtime.PhaseResolving})
	watchCtx, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		ticker := r.config.Clock.NewTicker(progressInterval)
		defer ticker.Stop()
		for {
			select {
			case <-watchCtx.Done():
				return
			case <-ticker.C():
				progress(t.progress(watchCtx))
			}
		}
	})
	_, err = r.client.Pull(ctx, name,
		client.WithResolver(resolver), client.WithPullUnpack, client.WithPullSnapshotter(r.config.Snapshotter),
		client.WithMaxConcurrentDownloads(parallelLayers), client.WithImageHandlerWrapper(t.wrap))
	stop()
	watching.Wait()
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		return pullFault(classifyPull(err), name)
	}
	final := t.progress(ctx)
	final.Phase, final.Downloaded = runtime.PhaseDone, final.Total
	progress(final)
	return nil
}

// verify asks the registry for the image's digest, with the credentials of a pull: a HEAD of the manifest. NotFound without a
// reason: the registry has another image under this name by now.
func (r *imageStore) verify(ctx context.Context, img *image) error {
	ctx, span := obs.Tracer().Start(ctx, "image.verify")
	defer span.End()
	resolver, err := r.resolver()
	if err != nil {
		return pullFault(err, img.name)
	}
	_, desc, err := resolver.Resolve(ctx, img.name)
	switch {
	case err != nil && ctx.Err() != nil:
		return pullFault(errors.Join(ctx.Err(), err), img.name)
	case err != nil:
		return pullFault(classifyPull(err), img.name)
	case desc.Digest != img.target:
		return fmt.Errorf("image %s is %s in the registry: %w", img, desc.Digest, errdefs.ErrNotFound)
	}
	return nil
}

// resolver returns a resolver with the credentials that the file has now.
func (r *imageStore) resolver() (remotes.Resolver, error) {
	creds := func(string) (string, string, error) { return "", "", nil }
	if r.config.DockerConfig != "" {
		auths, err := readDockerConfig(r.config.DockerConfig)
		if err != nil {
			return nil, err
		}
		creds = auths.credentials
	}
	plain := func(host string) (bool, error) {
		if bare, _, err := net.SplitHostPort(host); err == nil && slices.Contains(r.config.InsecureRegistries, bare) {
			return true, nil
		}
		if slices.Contains(r.config.InsecureRegistries, host) {
			return true, nil
		}
		return docker.MatchLocalhost(host)
	}
	return docker.NewResolver(docker.ResolverOptions{
		Hosts: docker.ConfigureDefaultRegistries(
			docker.WithPlainHTTP(plain),
			docker.WithAuthorizer(docker.NewDockerAuthorizer(docker.WithAuthCreds(creds))),
		),
	}), nil
}

// tracker records what a pull needs, refuses it if it is too much, and asks the content store how much of it exists.
type tracker struct {
	store    content.Store
	image    string
	maxBytes int64

	mu    sync.Mutex
	want  []ocispec.Descriptor
	bytes int64 // of want
}

func (t *tracker) wrap(h images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		// Before it is fetched, and before its children are.
		if err := t.add(desc); err != nil {
			return nil, err
		}
		children, err := h.Handle(ctx, desc)
		if err == nil {
			err = t.add(children...)
		}
		return children, err
	})
}

// add records blobs that the image consists of.
func (t *tracker) add(descs ...ocispec.Descriptor) error {
	if err := checkBlobs(t.image, descs); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range descs {
		if slices.ContainsFunc(t.want, func(w ocispec.Descriptor) bool { return w.Digest == d.Digest && w.Size == d.Size }) {
			continue
		}
		if len(t.want) >= maxBlobs {
			return errImage(t.image, "it consists of more than %d blobs", maxBlobs)
		}
		if d.Size > t.maxBytes-t.bytes {
			return errImage(t.image, "it is larger than the %d bytes that the agent pulls", t.maxBytes)
		}
		t.want, t.bytes = append(t.want, d), t.bytes+d.Size
	}
	return nil
}

func (t *tracker) progress(ctx context.Context) runtime.Progress {
	t.mu.Lock()
	want := slices.Clone(t.want)
	t.mu.Unlock()
	p := runtime.Progress{Phase: runtime.PhaseResolving}
	if len(want) == 0 {
		return p
	}
	active := map[string]int64{}
	if statuses, err := t.store.ListStatuses(ctx, ""); err == nil {
		for _, s := range statuses {
			active[s.Ref] = s.Offset
		}
	}
	for _, d := range want {
		p.Total += d.Size
		if _, err := t.store.Info(ctx, d.Digest); err == nil {
			p.Downloaded += d.Size
		} else {
			p.Downloaded += active[remotes.MakeRefKey(ctx, d)]
		}
	}
	p.Phase = runtime.PhaseDownloading
	if p.Downloaded >= p.Total {
		p.Phase = runtime.PhaseUnpacking
	}
	return p
}
