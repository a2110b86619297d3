package ctrd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/passwd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/rootfs"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// cleanupTimeout bounds the removal of a view. If it takes longer, containerd's garbage collector removes the view.
const cleanupTimeout = 5 * time.Second

type userKey struct{ chain, user string }

type resolvedUser struct {
	user specs.User
	home string
	// foreign is a file of the image with an owner that a user namespace does not have.
	foreign *rootfs.FileError
}

// user returns the image's user in numbers, with its groups according to the image's own files. They are read once for each
// image.
func (r *imageStore) user(ctx context.Context, img *image) (specs.User, string, error) {
	key := userKey{img.chain, img.config.User}
	c := r.cache
	c.mu.Lock()
	known, ok := c.users[key]
	c.mu.Unlock()
	if ok {
		return known.user, known.home, known.unmapped(img.name)
	}
	users, groups, foreign, err := r.userFiles(ctx, img)
	if err != nil {
		return specs.User{}, "", err
	}
	found, err := findUser(img.config.User, users, groups)
	if !errors.Is(err, passwd.ErrNoUser) && err != nil {
		return specs.User{}, "", fileFault(err, img.name)
	}
	if err != nil {
		return specs.User{}, "", fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.UserNotFound,
			"image %s has no user %q", img.name, img.config.User).With("user", img.config.User)
	}
	found.foreign = foreign
	if r.users.on() {
		found.checkUser()
	}
	c.mu.Lock()
	c.reserve(len(key.chain) + len(key.user) + len(found.home) + 4*len(found.user.AdditionalGids))
	c.users[key] = found
	c.mu.Unlock()
	return found.user, found.home, found.unmapped(img.name)
}

// checkUser notes that the image's user has an id that a user namespace does not have.
func (u *resolvedUser) checkUser() {
	for _, id := range append([]uint32{u.user.UID, u.user.GID}, u.user.AdditionalGids...) {
		if id >= idrange.Size && u.foreign == nil {
			u.foreign = &rootfs.FileError{Path: "/etc/passwd", Problem: fmt.Sprintf("gives the image's user the id %d", id)}
		}
	}
}

// unmapped returns an error if the image cannot be used in a user namespace.
func (u *resolvedUser) unmapped(image string) error {
	if u.foreign == nil {
		return nil
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.ImageInvalid,
		"image %s cannot be used: %s, and sandboxes have the ids below %d; use a pool with userNamespace: Disabled, or change the image", image, u.foreign, idrange.Size).
		With("image", image).With("path", u.foreign.Path)
}

// userFiles reads /etc/passwd and /etc/group of an image, through a read-only view of its layers. A file that does not exist
// is empty. foreign is a file whose owner a user namespace does not have, if containers have one.
func (r *imageStore) userFiles(ctx context.Context, img *image) (users, groups string, foreign *rootfs.FileError, err error) {
	// The lease expires, so that the view is removed even if this process dies before it removes it.
	manager := r.client.LeasesService()
	lease, err := manager.Create(ctx, leases.WithRandomID(), leases.WithExpiration(time.Minute))
	if err != nil {
		return "", "", nil, classify(err, "leasing a view of image %s", img.name)
	}
	leased := leases.WithLease(ctx, lease.ID)
	defer cleanup(ctx, func(ctx context.Context) { _ = manager.Delete(ctx, lease) })
	snapshotter, view := r.client.SnapshotService(r.config.Snapshotter), "fsb-view-"+uuid.NewString()
	mounts, err := snapshotter.View(leased, view, img.chain)
	if errdefs.IsNotFound(err) {
		if err := r.unpack(ctx, img); err != nil {
			return "", "", nil, err
		}
		mounts, err = snapshotter.View(leased, view, img.chain)
	}
	if err != nil {
		return "", "", nil, classify(err, "viewing image %s", img.name)
	}
	defer cleanup(ctx, func(ctx context.Context) { _ = snapshotter.Remove(ctx, view) })
	files, err := rootfs.ReadFiles(ctx, mounts, passwd.MaxFile, "/etc/passwd", "/etc/group")
	if err != nil {
		return "", "", nil, fileFault(err, img.name)
	}
	if r.users.on() {
		if err := rootfs.CheckOwners(ctx, mounts, idrange.Size); err != nil && !errors.As(err, &foreign) {
			return "", "", nil, fileFault(err, img.name)
		}
	}
	return files[0], files[1], foreign, nil
}

// cleanup removes something that expires by itself, even if ctx has ended.
func cleanup(ctx context.Context, remove func(context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	remove(ctx)
}

// fileFault says which file of the image is at fault, if that is the cause.
func fileFault(err error, image string) error {
	var file *rootfs.FileError
	if !errors.As(err, &file) {
		return classify(err, "reading the users of image %s", image)
	}
	return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.ImageInvalid, "image %s cannot be used: %s", image, file).
		With("image", image).With("path", file.Path)
}

// findUser finds an image's user in the image's files.
func findUser(spec, users, groups string) (resolvedUser, error) {
	found, err := passwd.Find(spec, users, groups)
	if invalid, ok := errors.AsType[*passwd.InvalidError](err); ok {
		err = &rootfs.FileError{Path: invalid.Path, Problem: invalid.Problem}
	}
	return resolvedUser{user: specs.User{UID: found.UID, GID: found.GID, AdditionalGids: found.Groups}, home: found.Home}, err
}
