package ctrd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/rootfs"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// maxUserFile is the largest /etc/passwd or /etc/group, in bytes, of an image that is run.
const maxUserFile = 1 << 20

// maxGroups and maxHome bound what is kept of an image's user: the groups that it has, and the length of its home directory.
const (
	maxGroups = 1024
	maxHome   = 4096
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
	passwd, group, foreign, err := r.userFiles(ctx, img)
	if err != nil {
		return specs.User{}, "", err
	}
	found, err := resolveUser(img.config.User, passwd, group)
	if !errors.Is(err, errNoUser) && err != nil {
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
func (r *imageStore) userFiles(ctx context.Context, img *image) (passwd, group string, foreign *rootfs.FileError, err error) {
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
	files, err := rootfs.ReadFiles(ctx, mounts, maxUserFile, "/etc/passwd", "/etc/group")
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

var errNoUser = errors.New("no such user or group")

// resolveUser parses a user as the OCI image specification defines it: user, uid, user:group, uid:gid, uid:group, user:gid.
func resolveUser(spec, passwd, group string) (resolvedUser, error) {
	name, groupName, hasGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "0"
	}
	var found resolvedUser
	entry := lookup(passwd, name, 2)
	uid, numeric := parseID(name)
	switch {
	case len(entry) >= 4:
		id, ok := parseID(entry[2])
		gid, gok := parseID(entry[3])
		if !ok || !gok {
			return resolvedUser{}, errNoUser
		}
		found.user.UID, found.user.GID = id, gid
		if len(entry) >= 6 {
			found.home = strings.Clone(entry[5]) // not the whole file
		}
	case numeric:
		found.user.UID = uid
	default:
		return resolvedUser{}, errNoUser
	}
	if len(found.home) > maxHome || strings.ContainsRune(found.home, 0) {
		return resolvedUser{}, &rootfs.FileError{Path: "/etc/passwd", Problem: "has an invalid home directory for the image's user"}
	}
	if hasGroup {
		gid, ok := parseID(groupName)
		if e := lookup(group, groupName, 2); len(e) >= 3 {
			gid, ok = parseID(e[2])
		}
		if !ok {
			return resolvedUser{}, errNoUser
		}
		found.user.GID = gid
	}
	found.user.AdditionalGids = []uint32{found.user.GID}
	if entry == nil {
		return found, nil
	}
	groups, err := groupsOf(entry[0], group, found.user.GID)
	found.user.AdditionalGids = groups
	return found, err
}

// groupsOf returns the numbers of a user's groups, its primary one first.
func groupsOf(user, group string, primary uint32) ([]uint32, error) {
	gids := []uint32{primary}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 {
			continue
		}
		gid, ok := parseID(f[2])
		if !ok || gid == primary {
			continue
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if member == user {
				gids = append(gids, gid)
			}
		}
		if len(gids) > maxGroups {
			return nil, &rootfs.FileError{Path: "/etc/group", Problem: fmt.Sprintf("has more than %d groups for the image's user", maxGroups)}
		}
	}
	return gids, nil
}

// lookup returns the line of a colon-separated file whose name, or number in the column, is key. A name takes precedence.
func lookup(file, key string, column int) []string {
	number, numeric := parseID(key)
	var byNumber []string
	for line := range strings.Lines(file) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if f[0] == key && key != "" && len(f) > column {
			return f
		}
		if !numeric || byNumber != nil || len(f) <= column {
			continue
		}
		if n, ok := parseID(f[column]); ok && n == number {
			byNumber = f
		}
	}
	return byNumber
}

// parseID accepts what OCI runtimes accept.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n > math.MaxInt32 {
		return 0, false
	}
	return uint32(n), true
}
