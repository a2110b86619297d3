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
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/singleflight"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// image is what a create needs of an image. All but name follows from the digest and never changes.
type image struct {
	name   string
	target digest.Digest
	config ocispec.ImageConfig
	// chain is the key of the committed snapshot of all layers.
	chain string
}

// imageStore pulls, reads and pins images. It is the part of a Runtime that knows registries.
type imageStore struct {
	config  Config
	client  *client.Client
	users   *userNamespaces
	cache   *imageCache
	pulls   *pulls
	unpacks singleflight.Group
}

func newImageStore(cfg Config, users *userNamespaces) *imageStore {
	s := &imageStore{config: cfg, client: cfg.Client, users: users, cache: newImageCache()}
	s.pulls = newPulls(s.pull)
	return s
}

// imageCache holds what was read of images, by the digest of their target.
type imageCache struct {
	mu     sync.Mutex
	images map[digest.Digest]image
	names  map[string]digest.Digest // as they were when they were read last
	users  map[userKey]resolvedUser
	bytes  int
}

// maxCached and maxCachedBytes bound the cache: its entries, and what they keep of images. A full cache is cleared, which costs
// a few reads.
const (
	maxCached      = 1024
	maxCachedBytes = 32 << 20
)

func newImageCache() *imageCache {
	return &imageCache{images: map[digest.Digest]image{}, names: map[string]digest.Digest{}, users: map[userKey]resolvedUser{}}
}

// reserve makes room for one more entry. mu is held.
func (c *imageCache) reserve(bytes int) {
	if c.bytes += bytes; c.bytes > maxCachedBytes || len(c.images)+len(c.names)+len(c.users) >= maxCached {
		clear(c.images)
		clear(c.names)
		clear(c.users)
		c.bytes = bytes
	}
}

// named returns the image that had a name when it was read last; nil if it is not known.
func (c *imageCache) named(name string) *image {
	c.mu.Lock()
	defer c.mu.Unlock()
	img, ok := c.images[c.names[name]]
	if !ok {
		return nil
	}
	img.name = name
	return &img
}

// name records the target of a name; an empty one is none.
func (c *imageCache) name(name string, target digest.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if target == "" {
		delete(c.names, name)
	} else if c.names[name] != target {
		c.reserve(0)
		c.names[name] = target
	}
}

// errImageChanged means that a name has another image than it had, or none.
var errImageChanged = errors.New("the image has changed")

// presumeImage is ensureImage for a caller that can turn back: it returns the image that the name had when it was read last, if there is one, while
// containerd is asked. The caller calls confirm before anything of the image is run.
func (r *imageStore) presumeImage(ctx context.Context, ref string) (img *image, confirm func() error, err error) {
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return nil, nil, err
	}
	if img = r.cache.named(name); img == nil || r.config.VerifyImages {
		img, err = r.ensureImage(ctx, ref)
		return img, func() error { return nil }, err
	}
	answer := make(chan error, 1)
	go func() {
		ctx, span := obs.Tracer().Start(ctx, "image")
		defer span.End()
		now, err := r.localImage(ctx, name)
		if errdefs.IsNotFound(err) {
			r.cache.name(name, "") // also if only its content is gone: the next call has to find out, or pull it
		}
		if err == nil && now.target != img.target || errdefs.IsNotFound(err) {
			err = fmt.Errorf("%w: %s", errImageChanged, name)
		}
		answer <- err
	}()
	return img, func() error { return <-answer }, nil
}

// ensureImage returns the image, and pulls it if it is not on the node. With VerifyImages, one that is there is used only if the
// registry has it under this name and lets the agent's credentials have it.
func (r *imageStore) ensureImage(ctx context.Context, ref string) (*image, error) {
	ctx, span := obs.Tracer().Start(ctx, "image")
	defer span.End()
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return nil, err
	}
	img, err := r.localImage(ctx, name)
	if err == nil && r.config.VerifyImages {
		err = r.verify(ctx, img)
	}
	if err == nil || !errdefs.IsNotFound(err) || fault.ReasonOf(err) != "" {
		return img, err
	}
	if err := r.pulls.do(ctx, name, nil); err != nil {
		return nil, err
	}
	img, err = r.localImage(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.ImagePullFailed, "image %s was removed after it was pulled", name)
	}
	return img, err
}

// localImage returns an image that is on the node, with its configuration. NotFound: it is not, or not completely.
func (r *imageStore) localImage(ctx context.Context, name string) (_ *image, err error) {
	meta, err := r.client.ImageService().Get(ctx, name)
	if err != nil {
		if errdefs.IsNotFound(err) {
			r.cache.name(name, "")
			return nil, err
		}
		return nil, classify(err, "reading image %s", name)
	}
	c := r.cache
	defer func() {
		if err == nil {
			c.name(name, meta.Target.Digest)
		}
	}()
	c.mu.Lock()
	img, ok := c.images[meta.Target.Digest]
	c.mu.Unlock()
	if ok {
		img.name = name
		return &img, nil
	}
	read, bytes, err := r.readImage(ctx, meta)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.reserve(bytes)
	c.images[meta.Target.Digest] = *read
	c.mu.Unlock()
	return read, nil
}

// readImage reads an image's manifest and configuration. bytes is what the result may keep in memory.
func (r *imageStore) readImage(ctx context.Context, meta images.Image) (img *image, bytes int, err error) {
	store := r.client.ContentStore()
	manifest, err := images.Manifest(ctx, store, meta.Target, platforms.Default())
	if err != nil {
		if errdefs.IsNotFound(err) {
			return nil, 0, err
		}
		return nil, 0, contentFault(err, meta.Name, "the manifest")
	}
	raw, err := content.ReadBlob(ctx, store, manifest.Config)
	if err != nil {
		if errdefs.IsNotFound(err) {
			return nil, 0, err
		}
		return nil, 0, contentFault(err, meta.Name, "the configuration")
	}
	var parsed ocispec.Image
	if err := json.Unmarshal(raw, &parsed); err != nil {
		return nil, 0, fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.ImageInvalid, "the configuration of image %s cannot be read", meta.Name)
	}
	if n := max(len(manifest.Layers), len(parsed.RootFS.DiffIDs)); n > maxLayers {
		return nil, 0, errImage(meta.Name, "it has %d layers, more than %d", n, maxLayers)
	}
	c := parsed.Config
	for _, list := range [][]string{c.Env, c.Entrypoint, c.Cmd, {c.WorkingDir, c.User}} {
		if slices.ContainsFunc(list, func(s string) bool { return strings.ContainsRune(s, 0) }) {
			return nil, 0, errImage(meta.Name, "its configuration has a zero byte in a string")
		}
	}
	return &image{
		name: meta.Name, target: meta.Target.Digest, chain: identity.ChainID(parsed.RootFS.DiffIDs).String(),
		config: ocispec.ImageConfig{User: c.User, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd, WorkingDir: c.WorkingDir},
	}, len(raw), nil
}

// unpack creates the snapshots of an image's layers. Concurrent calls for one image share the work.
func (r *imageStore) unpack(ctx context.Context, img *image) error {
	ch := r.unpacks.DoChan(img.chain, func() (any, error) {
		// Not the caller's context: other callers may wait for the same work.
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
			// Some content was removed: the image has to be pulled again.
			return r.pulls.do(ctx, img.name, nil)
		}
		if isBroken(res.Err) {
			return errBroken(res.Err, img.name)
		}
		return classify(res.Err, "unpacking image %s", img.name)
	}
}

// Images lists the names that are references; the CRI plugin's bare ids are skipped.
func (r *imageStore) Images(ctx context.Context) ([]string, error) {
	list, err := r.client.ImageService().List(ctx)
	if err != nil {
		return nil, classify(err, "listing images")
	}
	names := make([]string, 0, len(list))
	for _, img := range list {
		if strings.HasPrefix(img.Name, "sha256:") {
			continue
		}
		if name, err := runtime.NormalizeImage(img.Name); err == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// WatchImages follows containerd's image events.
func (r *imageStore) WatchImages(ctx context.Context, changed func()) error {
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
func (r *imageStore) Pull(ctx context.Context, ref string, progress func(runtime.Progress)) (string, error) {
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		return "", err
	}
	if err := r.pulls.do(ctx, name, progress); err != nil {
		return "", err
	}
	return name, nil
}

// String returns the image's name and digest, for logs.
func (i *image) String() string { return fmt.Sprintf("%s@%s", i.name, i.target) }
