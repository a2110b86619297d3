package ctrd

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

type userKey struct{ chain, user string }

type resolvedUser struct {
	user specs.User
	home string
}

// user returns the image's user in numbers, with its groups according to the image's own files. They are read once for each
// image, without mounting anything: see layers.go.
func (r *imageStore) user(ctx context.Context, img *image) (specs.User, string, error) {
	key := userKey{img.chain, img.config.User}
	c := r.cache
	c.mu.Lock()
	known, ok := c.users[key]
	c.mu.Unlock()
	if ok {
		return known.user, known.home, nil
	}
	passwd, group, err := r.userFiles(ctx, img)
	if err != nil {
		return specs.User{}, "", err
	}
	found, err := resolveUser(img.config.User, passwd, group)
	if err != nil {
		return specs.User{}, "", fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.UserNotFound,
			"image %s has no user %q", img.name, img.config.User).With("user", img.config.User)
	}
	c.mu.Lock()
	if len(c.users) >= maxCached {
		clear(c.users)
	}
	c.users[key] = found
	c.mu.Unlock()
	return found.user, found.home, nil
}

// userFiles reads /etc/passwd and /etc/group of an image, through a read-only view of its layers. A file that does not exist
// is empty.
func (r *imageStore) userFiles(ctx context.Context, img *image) (passwd, group string, err error) {
	// The lease expires, so that the view is removed even if this process dies before it removes it.
	manager := r.client.LeasesService()
	lease, err := manager.Create(ctx, leases.WithRandomID(), leases.WithExpiration(time.Minute))
	if err != nil {
		return "", "", classify(err, "leasing a view of image %s", img.name)
	}
	leased := leases.WithLease(ctx, lease.ID)
	defer func() { _ = manager.Delete(context.WithoutCancel(ctx), lease) }()
	snapshotter, view := r.client.SnapshotService(r.config.Snapshotter), "fsb-view-"+uuid.NewString()
	mounts, err := snapshotter.View(leased, view, img.chain)
	if errdefs.IsNotFound(err) {
		if err := r.unpack(ctx, img); err != nil {
			return "", "", err
		}
		mounts, err = snapshotter.View(leased, view, img.chain)
	}
	if err != nil {
		return "", "", classify(err, "viewing image %s", img.name)
	}
	defer func() { _ = snapshotter.Remove(context.WithoutCancel(ctx), view) }()
	files, err := readFiles(ctx, mounts, "etc/passwd", "etc/group")
	if err != nil {
		return "", "", classify(err, "reading the users of image %s", img.name)
	}
	return files[0], files[1], nil
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
			found.home = entry[5]
		}
	case numeric:
		found.user.UID = uid
	default:
		return resolvedUser{}, errNoUser
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
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 {
			continue
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if gid, ok := parseID(f[2]); ok && member == entry[0] && gid != found.user.GID {
				found.user.AdditionalGids = append(found.user.AdditionalGids, gid)
			}
		}
	}
	return found, nil
}

// lookup returns the line of a colon-separated file whose name, or number in the column, is key. A name takes precedence.
func lookup(file, key string, column int) []string {
	var byNumber []string
	for line := range strings.Lines(file) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if f[0] == key && key != "" && len(f) > column {
			return f
		}
		if byNumber == nil && len(f) > column && f[column] == key {
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

var _ fs.FS = layers(nil)
