package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Mount is one line of mountinfo.
type Mount struct {
	Point string
	Type  string
	// Root is the directory of the file system that is mounted: "/" for all of it, anything else for a bind mount.
	Root string
	// Shared is true if mounts made below it propagate to its copies in other mount namespaces.
	Shared bool
	// Super holds the superblock's options: for a cgroup v1 mount the controllers among others.
	Super []string
}

// Mounts lists the mounts that this process sees, in the order they were made.
func Mounts() ([]Mount, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("listing mounts: %w", err)
	}
	return parseMountinfo(string(raw)), nil
}

// parseMountinfo reads proc_pid_mountinfo(5): "ID PARENT DEV ROOT POINT OPTIONS [TAG...] - TYPE SOURCE SUPER".
func parseMountinfo(text string) []Mount {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var mounts []Mount
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(strings.TrimSpace(line), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 6 || len(right) < 2 {
			continue
		}
		mount := Mount{Point: strings.TrimSuffix(unescape.Replace(left[4]), "//deleted"), Type: right[0], Root: left[3]}
		mount.Shared = slices.ContainsFunc(left[6:], func(tag string) bool { return strings.HasPrefix(tag, "shared:") })
		if len(right) > 2 {
			mount.Super = strings.Split(right[2], ",")
		}
		mounts = append(mounts, mount)
	}
	return mounts
}

// Share makes a directory, if need be by mounting it on itself, such that mounts below it appear in containers that have
// it as a volume with mount propagation. Many machines' root is that already. Mounts that exist below it would vanish from
// sight under the new one, so then it refuses.
func Share(dir string) error {
	mounts, err := Mounts()
	if err != nil {
		return err
	}
	if shared(mounts, dir) {
		return nil
	}
	own := slices.ContainsFunc(mounts, func(mount Mount) bool { return mount.Point == dir })
	if !own {
		if len(pick(mounts, nil, []string{dir})) > 0 {
			return fmt.Errorf("sharing %s: mounts below it are in use; take the cluster down once", dir)
		}
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting %s on itself: %w", dir, err)
		}
	}
	if err := unix.Mount("", dir, "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("sharing %s: %w", dir, err)
	}
	return nil
}

// InMemory makes an empty directory one in memory, by a tmpfs on it unless it is on one already. A directory with contents is
// left as it is and is an error: the new mount would hide them from the programs that use them.
func InMemory(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("reading the file system of %s: %w", dir, err)
	}
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("reading %s: %w", dir, err)
	}
	if len(entries) > 0 {
		return fmt.Errorf("%s stays on a disk, because it is in use; take the cluster down once", dir)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0711"); err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// shared reports whether the mount that holds the directory is shared: the longest mount point above it, and of several on
// one point the last.
func shared(mounts []Mount, dir string) bool {
	var holds Mount
	for _, mount := range mounts {
		above := mount.Point == "/" || dir == mount.Point || strings.HasPrefix(dir, mount.Point+"/")
		if above && len(mount.Point) >= len(holds.Point) {
			holds = mount
		}
	}
	return holds.Shared
}

// SelfMounted picks those of the directories that are mounted on themselves, as Share does it, and not a disk.
func SelfMounted(dirs ...string) ([]string, error) {
	mounts, err := Mounts()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(dirs), func(dir string) bool {
		return !slices.ContainsFunc(mounts, func(mount Mount) bool { return mount.Point == dir && mount.Root != "/" })
	}), nil
}

// pick returns the mount points that are one of at, or strictly below one of below, the last made first, as they must
// be unmounted.
func pick(mounts []Mount, at, below []string) []string {
	var points []string
	for _, mount := range slices.Backward(mounts) {
		inside := func(dir string) bool { return strings.HasPrefix(mount.Point, dir+"/") }
		if slices.Contains(at, mount.Point) || slices.ContainsFunc(below, inside) {
			points = append(points, mount.Point)
		}
	}
	return points
}

// Unmount unmounts everything that is mounted on one of at, or strictly below one of below, including points that are mounted
// several times. What is mounted on one of below itself may be a disk of the user's and stays.
func Unmount(ctx context.Context, at, below []string) error {
	return Poll(ctx, 50*time.Millisecond, func(context.Context) error {
		mounts, err := Mounts()
		if err != nil {
			return Permanent(err)
		}
		points := pick(mounts, at, below)
		if len(points) == 0 {
			return nil
		}
		failed := fmt.Errorf("unmounting: %d mounts are left", len(points))
		for _, point := range points {
			err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EBUSY) {
				err = unix.Unmount(point, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
			}
			if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				failed = errors.Join(failed, fmt.Errorf("unmounting %s: %w", point, err))
			}
		}
		return failed
	})
}
