package janitor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

const (
	// clearTime bounds clear, and clearEvery is the interval at which it checks.
	clearTime  = time.Minute
	clearEvery = 50 * time.Millisecond
)

// workspace holds everything of a run. Its paths are fixed, so that a run finds what a killed one left; one run at a time
// may have it.
type workspace struct {
	// dir has sockets, whose paths have little room, and logs; content is on a file system that carries overlays.
	dir, content string
	// cgroup is the path of a cgroup of its own, below the roots of the hierarchies.
	cgroup string
	lock   *os.File
}

// fixedWorkspace returns the workspace of all runs.
func fixedWorkspace() *workspace {
	return &workspace{dir: "/run/fsb-bench-janitor", content: "/var/tmp/fsb-bench-janitor", cgroup: "/fsb-bench-janitor"}
}

// acquire locks the workspace and clears it.
func (p *workspace) acquire() error {
	lock, err := os.OpenFile(p.dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("locking %s: %w", p.dir, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return errors.Join(fmt.Errorf("locking %s, which another run may hold: %w", p.dir, err), lock.Close())
	}
	p.lock = lock
	if err := p.clear(); err != nil {
		return errors.Join(err, lock.Close())
	}
	for _, dir := range []string{p.dir, p.content} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return errors.Join(fmt.Errorf("making a directory: %w", err), lock.Close())
		}
	}
	return nil
}

// release clears the workspace and unlocks it.
func (p *workspace) release() error { return errors.Join(p.clear(), p.lock.Close()) }

// clear ends every process that a run has started, and removes everything that it has created.
func (p *workspace) clear() error {
	until := time.Now().Add(clearTime)
	for {
		left := p.processes()
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended since
		}
		p.removeCgroups()
		if len(left) == 0 && len(p.cgroups()) == 0 {
			break
		}
		if time.Now().After(until) {
			return fmt.Errorf("clearing %s: %d processes and %d cgroups stay", p.dir, len(left), len(p.cgroups()))
		}
		time.Sleep(clearEvery)
	}
	var errs []error
	for _, dir := range []string{p.dir, p.content} {
		errs = append(errs, unmountBelow(dir), os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// processes returns those that use the workspace's directory, or run in its cgroup.
func (p *workspace) processes() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// All are empty if the process has ended meanwhile.
		exe, _ := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		cmdline, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		cgroups, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if p.has(exe, string(cmdline), string(cgroups)) {
			out = append(out, pid)
		}
	}
	return out
}

// programs are the files that a run executes, or what it executes does. The last is kube-apiserver and etcd in one.
func programs() []string {
	return []string{"janitor", "containerd", shimName, "runc", "kube-apiserver", "etcd", "fsb-local"}
}

// has reports whether a process belongs to the workspace: by its cgroups, or by the program that the kernel executes and its arguments.
func (p *workspace) has(exe, cmdline, cgroups string) bool {
	for line := range strings.Lines(cgroups) {
		if strings.Contains(strings.TrimSpace(line)+"/", ":"+p.cgroup+"/") {
			return true
		}
	}
	args := strings.Split(cmdline, "\x00")
	return slices.Contains(programs(), filepath.Base(strings.TrimSuffix(exe, " (deleted)"))) &&
		slices.ContainsFunc(args, func(arg string) bool { return strings.Contains(arg, p.dir+"/") })
}

// cgroups returns the directories of the workspace's cgroup and of those below it, the innermost first.
func (p *workspace) cgroups() []string {
	roots := []string{ctrd.DefaultCgroupRoot}
	if entries, err := os.ReadDir(ctrd.DefaultCgroupRoot); err == nil {
		for _, e := range entries {
			roots = append(roots, filepath.Join(ctrd.DefaultCgroupRoot, e.Name()))
		}
	}
	var out []string
	for _, root := range roots {
		_ = filepath.WalkDir(filepath.Join(root, p.cgroup), func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				out = append(out, path)
			}
			return nil // a missing directory needs no removal
		})
	}
	slices.Reverse(out)
	return out
}

func (p *workspace) removeCgroups() {
	for _, dir := range p.cgroups() {
		_ = syscall.Rmdir(dir) // one in which something still ends is tried again
	}
}

// unmountBelow removes all mounts below a directory, the last one first.
func unmountBelow(dir string) error {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("reading the mounts: %w", err)
	}
	mounts := mountsBelow(string(raw), dir)
	slices.Reverse(mounts)
	for _, m := range mounts {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmounting %s: %w", m, err)
		}
	}
	return nil
}

// mountsBelow reads /proc/PID/mountinfo (proc(5)).
func mountsBelow(mountinfo, dir string) []string {
	var out []string
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			out = append(out, f[4])
		}
	}
	return out
}
