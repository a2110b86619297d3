package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
)

// podInCgroup finds the uid of a Pod in the path of a cgroup, as the kubelet's cgroupfs driver (/kubepods/pod<uid>/...) and its
// systemd driver (kubepods-pod<uid with underscores>.slice) name it.
var podInCgroup = regexp.MustCompile(`pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:[./:]|$)`)

// podOf returns the uid of the Pod that a cgroup belongs to; empty if the path names none.
func podOf(cgroup string) string {
	m := podInCgroup.FindStringSubmatch(cgroup)
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(m[1], "_", "-")
}

// list returns the bundles of the containers that wanted selects. They are listed in containerd's mount namespace.
func (b bundles) list(wanted func(id string) bool) ([]Piece, error) {
	if b.proc == "" {
		return nil, nil
	}
	var out []Piece
	err := inMountNamespace(filepath.Join(b.proc, "ns", "mnt"), func() error {
		entries, err := os.ReadDir(b.dir)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		for _, e := range entries {
			if e.IsDir() && wanted(e.Name()) {
				out = append(out, Piece{ID: e.Name(), Part: PartBundle, Owner: bundleOwner(filepath.Join(b.dir, e.Name()))})
			}
		}
		return err
	})
	return out, err
}

// bundleOwner returns the uid of the agent's Pod in whose cgroup a bundle's container was to run; empty if it cannot be read.
func bundleOwner(bundle string) string {
	raw, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return ""
	}
	return podOf(parseSpec(raw).Linux.CgroupsPath)
}

// removeBundle removes the bundle of a container that has neither a record nor a task, as a create leaves it that is cut short: the
// processes that work on it, its mounts, the directory, and the working directory that belongs to it. Nothing is removed through a
// mount: a bundle in which something is still mounted is an error.
func (r *Remover) removeBundle(ctx context.Context, id string) error {
	b, err := r.bundles(ctx)
	if err != nil || b.proc == "" {
		return err
	}
	if err := r.removeStrays(ctx, id, ""); err != nil {
		return err
	}
	if err := b.unmount(id); err != nil {
		return err
	}
	points, err := b.mountPoints(func(owner string) bool { return owner == id })
	if err != nil {
		return fmt.Errorf("looking for mounts of container %s: %w", id, err)
	}
	if len(points) > 0 {
		return fmt.Errorf("removing the bundle of container %s, in which something is mounted: %w", id, errdefs.ErrUnavailable)
	}
	err = inMountNamespace(filepath.Join(b.proc, "ns", "mnt"), func() error { return removeBundleDir(filepath.Join(b.dir, id)) })
	if err != nil {
		return fmt.Errorf("removing the bundle of container %s: %w", id, err)
	}
	return nil
}

// removeBundleDir removes a bundle as containerd does: the mount point of the root file system has to be empty, and the link to the
// working directory is followed only if it leads to one of the same container.
func removeBundleDir(bundle string) error {
	if err := os.Remove(filepath.Join(bundle, "rootfs")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	work, err := os.Readlink(filepath.Join(bundle, "work"))
	same := err == nil && filepath.Base(work) == filepath.Base(bundle) && filepath.Base(filepath.Dir(work)) == filepath.Base(filepath.Dir(bundle))
	if same && filepath.IsAbs(work) {
		if err := os.RemoveAll(work); err != nil {
			return err
		}
	}
	return os.RemoveAll(bundle)
}
