package attack

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

func mounts() []Attack {
	mount := func(name, does string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "mount: " + name, Does: does, Success: "the call returns no error"}, run: run}
	}
	return []Attack{
		mount("a new tmpfs", "mounts a tmpfs on a directory of its own", func(*Env) (string, error) { return mountNew("tmpfs") }),
		mount("a new proc", "mounts another /proc, in which nothing is masked", func(*Env) (string, error) { return mountNew("proc") }),
		mount("a new cgroup hierarchy", "mounts a hierarchy of the legacy cgroups, or the unified one", func(*Env) (string, error) {
			return first([]string{"memory", "devices", ""}, func(options string) (string, error) {
				kind := "cgroup"
				if options == "" {
					kind = "cgroup2"
				}
				return mountAt(kind, options)
			})
		}),
		mount("bind", "mounts / on a directory of its own", func(*Env) (string, error) {
			return within(func(dir string) error { return unix.Mount("/", dir, "", unix.MS_BIND|unix.MS_REC, "") })
		}),
		mount("read-only paths made writable", "remounts /sys without the read-only flag", func(*Env) (string, error) {
			return done(unix.Mount("", "/sys", "", unix.MS_REMOUNT|unix.MS_BIND, ""), "/sys is writable")
		}),
		mount("unmount", "unmounts /dev/mqueue, as it would unmount the mask of a file", func(*Env) (string, error) {
			return done(unix.Unmount("/dev/mqueue", unix.MNT_DETACH), "/dev/mqueue is unmounted")
		}),
		mount("propagation", "makes / shared", func(*Env) (string, error) {
			return done(unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""), "/ is shared")
		}),
		mount("the calls without paths", "uses fsopen and open_tree instead of mount", func(*Env) (string, error) { return mountByDescriptor() }),
		mount("pivot_root", "changes the root", func(*Env) (string, error) {
			return reached("pivot_root", errnoOf(unix.PivotRoot("/nowhere", "/nowhere")))
		}),
		{
			Attempt: suite.Attempt{Name: "mount: out of a chroot", Does: "calls chroot with an open directory outside of it, and walks up",
				Success: "the canary on the node can be read"},
			Unprovable: "the root of the open container is a pivoted one, too",
			run:        func(e *Env) (string, error) { return chrootEscape(e) },
		},
	}
}

func mountNew(kind string) (string, error) { return mountAt(kind, "") }

func mountAt(kind, options string) (string, error) {
	return within(func(dir string) error { return unix.Mount(kind, dir, kind, 0, options) })
}

// within mounts something on a directory, and unmounts it.
func within(mount func(dir string) error) (string, error) {
	dir, err := os.MkdirTemp("", "mount-")
	if err != nil {
		return "", suite.Brokenf("making a directory: %w", err)
	}
	defer func() { _ = os.Remove(dir) }()
	if err := mount(dir); err != nil {
		return "", err
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	return "mounted on " + dir, nil
}

func mountByDescriptor() (string, error) {
	if fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC); err == nil {
		_ = unix.Close(fd)
		return "fsopen of a tmpfs has succeeded", nil
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return "", err
	}
	_ = unix.Close(fd)
	return "open_tree has cloned /", nil
}

// chrootEscape is the old way out of a chroot, which finds the directory above the root of the mount namespace if there is one.
func chrootEscape(e *Env) (string, error) {
	dir, err := os.MkdirTemp("", "chroot-")
	if err != nil {
		return "", suite.Brokenf("making a directory: %w", err)
	}
	if err := unix.Chroot(dir); err != nil {
		return "", err
	}
	for range 64 {
		if err := unix.Chdir(".."); err != nil {
			return "", err
		}
	}
	if err := unix.Chroot("."); err != nil {
		return "", err
	}
	return canary(e, e.Canary)
}

// canary returns evidence if a path leads to the canary.
func canary(e *Env, path string) (string, error) {
	if e.Canary == "" {
		return "", suite.Brokenf("there is no canary")
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if string(raw) != e.Secret {
		return "", fmt.Errorf("%s is another file", path)
	}
	return "the canary of the node is read at " + path, nil
}

// upward returns paths to the canary that begin with a directory and walk up.
func upward(e *Env, dir string) string {
	up := dir
	for range 24 {
		up += "/.."
	}
	return up + "/" + filepath.Clean("/" + e.Canary)[1:]
}

func errnoOf(err error) unix.Errno {
	if errno, ok := err.(unix.Errno); ok { //nolint:errorlint // the calls of x/sys return it as it is
		return errno
	}
	if err != nil {
		return unix.EIO
	}
	return 0
}
