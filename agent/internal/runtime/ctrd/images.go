package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// image is what a create needs of an image. It follows from the digest alone and never changes, but for name.
type image struct {
	name   string
	target digest.Digest
	config ocispec.ImageConfig
	// chain is the key of the committed snapshot of all layers.
	chain string
}

// imageCache keeps what was read of images, by the digest of their target, and what name had which target when it was last
// looked at.
type imageCache struct {
	mu     sync.Mutex
	images map[digest.Digest]image
	names  map[string]digest.Digest
	users  map[userKey]resolvedUser
}

// maxCached bounds each of the cache's maps; past it the map is emptied, which costs a few reads.
const maxCached = 1024

func newImageCache() *imageCache {
	return &imageCache{images: map[digest.Digest]image{}, names: map[string]digest.Digest{}, users: map[userKey]resolvedUser{}}
}

// named is the image that had the name last; false if that is not known.
func (c *imageCache) named(name string) (*image, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	img, ok := c.images[c.names[name]]
	img.name = name
	return &img, ok
}

// found notes what a name means, and returns the image if it was read before.
func (c *imageCache) found(name string, target digest.Digest) (*image, bool) {
	c.mu.Lock()
	if len(c.names) >= maxCached {
		clear(c.names)
	}
	c.names[name] = target
	c.mu.Unlock()
	return c.named(name)
}

func (c *imageCache) lost(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.names, name)
}

func (c *imageCache) put(img *image) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.images) >= maxCached {
		clear(c.images)
	}
	c.images[img.target] = *img
}

// expectImage returns an image as its name was last seen to mean it, without waiting, and looks meanwhile: who uses it must
// call sure before anything of it runs, and before blaming it. Without an earlier look it is ensureImage.
func (r *Runtime) expectImage(ctx context.Context, ref string) (img *image, sure func() error, err error) {
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return nil, nil, err
	}
	img, ok := r.images.named(name)
	if !ok {
		img, err = r.ensureImage(ctx, ref)
		return img, func() error { return nil }, err
	}
	looked := make(chan error, 1)
	go func() {
		ctx, span := obs.Tracer().Start(ctx, "image")
		defer span.End()
		now, err := r.localImage(ctx, name)
		if err == nil && now.target != img.target {
			err = fmt.Errorf("image %s is another one now", name)
		}
		looked <- err
	}()
	return img, sync.OnceValue(func() error { return <-looked }), nil
}

// ensureImage returns the image, pulling it if it is not there.
func (r *Runtime) ensureImage(ctx context.Context, ref string) (*image, error) {
	ctx, span := obs.Tracer().Start(ctx, "image")
	defer span.End()
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return nil, err
	}
	img, err := r.localImage(ctx, name)
	if err == nil || !errdefs.IsNotFound(err) {
		return img, err
	}
	if err := r.pulls.do(ctx, name, nil); err != nil {
		return nil, err
	}
	img, err = r.localImage(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.ImagePullFailed, "image %s went away after it was pulled", name)
	}
	return img, err
}

// localImage reads an image that is there, with its configuration. NotFound: it is not there, or not all of it.
func (r *Runtime) localImage(ctx context.Context, name string) (*image, error) {
	meta, err := r.client.ImageService().Get(ctx, name)
	if err != nil {
		if errdefs.IsNotFound(err) {
			r.images.lost(name)
			return nil, err
		}
		return nil, classify(err, "reading image %s", name)
	}
	if img, ok := r.images.found(name, meta.Target.Digest); ok {
		return img, nil
	}
	img, err := r.readImage(ctx, meta)
	if err != nil {
		return nil, err
	}
	r.images.put(img)
	return img, nil
}

func (r *Runtime) readImage(ctx context.Context, meta images.Image) (*image, error) {
	store := r.client.ContentStore()
	desc, err := meta.Config(ctx, store, platforms.Default())
	if err != nil {
		if errdefs.IsNotFound(err) {
			return nil, err
		}
		return nil, classify(err, "reading the manifest of image %s", meta.Name)
	}
	raw, err := content.ReadBlob(ctx, store, desc)
	if err != nil {
		if errdefs.IsNotFound(err) {
			return nil, err
		}
		return nil, classify(err, "reading the configuration of image %s", meta.Name)
	}
	var parsed ocispec.Image
	if err := json.Unmarshal(raw, &parsed); err != nil {
		return nil, fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.ImageInvalid, "the configuration of image %s cannot be read", meta.Name)
	}
	img := &image{
		name: meta.Name, target: meta.Target.Digest, config: parsed.Config,
		chain: identity.ChainID(parsed.RootFS.DiffIDs).String(),
	}
	return img, nil
}

// unpack makes the snapshots of an image's layers. Concurrent calls for one image share the work of one.
func (r *Runtime) unpack(ctx context.Context, img *image) error {
	ch := r.unpacks.DoChan(img.chain, func() (any, error) {
		// Not the caller's context: others wait for the same work.
		ctx := context.WithoutCancel(ctx)
		meta, err := r.client.ImageService().Get(ctx, img.name)
		if err != nil {
			return nil, err
		}
		return nil, client.NewImage(r.client, meta).Unpack(ctx, r.config.Snapshotter)
	})
	select {
	case <-ctx.Done():
		return ctx.Err()
	case res := <-ch:
		if errdefs.IsNotFound(res.Err) {
			// Some content is gone: the image has to be pulled again.
			return r.pulls.do(ctx, img.name, nil)
		}
		if isBroken(res.Err) {
			return errBroken(res.Err, img.name)
		}
		return classify(res.Err, "unpacking image %s", img.name)
	}
}

// Images lists the names that are references; the CRI plugin's bare ids are no names for anyone.
func (r *Runtime) Images(ctx context.Context) ([]string, error) {
	list, err := r.client.ImageService().List(ctx)
	if err != nil {
		return nil, classify(err, "listing images")
	}
	names := make([]string, 0, len(list))
	for _, img := range list {
		if strings.HasPrefix(img.Name, "sha256:") {
			continue
		}
		if named, err := reference.ParseDockerRef(img.Name); err == nil {
			names = append(names, named.String())
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// WatchImages follows containerd's image events.
func (r *Runtime) WatchImages(ctx context.Context, changed func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, errs := r.client.EventService().Subscribe(ctx, `topic~="^/images/"`)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-errs:
			if ctx.Err() != nil {
				return nil
			}
			if err == nil {
				err = errors.New("the stream ended")
			}
			return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd's events ended")
		case e, ok := <-events:
			if !ok {
				return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd's events ended")
			}
			if e != nil {
				changed()
			}
		}
	}
}

// Pull asks the registry for the image.
func (r *Runtime) Pull(ctx context.Context, ref string, progress func(runtime.Progress)) (string, error) {
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return "", err
	}
	if err := r.pulls.do(ctx, name, progress); err != nil {
		return "", err
	}
	return name, nil
}

// String names the image, for logs.
func (i *image) String() string { return fmt.Sprintf("%s@%s", i.name, i.target) }
