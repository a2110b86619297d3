package ctrd

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
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
	t := &tracker{store: r.client.ContentStore()}
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

// tracker records what a pull needs and asks the content store how much of it exists.
type tracker struct {
	store content.Store

	mu   sync.Mutex
	want []ocispec.Descriptor
}

func (t *tracker) wrap(h images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		children, err := h.Handle(ctx, desc)
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, d := range append([]ocispec.Descriptor{desc}, children...) {
			if !slices.ContainsFunc(t.want, func(w ocispec.Descriptor) bool { return w.Digest == d.Digest }) {
				t.want = append(t.want, d)
			}
		}
		return children, err
	})
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
