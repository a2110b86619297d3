package ctrd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ProcOfContainerd is the HostProc that stands for containerd's own process.
const ProcOfContainerd = "containerd"

// bundles is the directory in which containerd has a bundle for each container with a task.
type bundles struct {
	dir string
	// proc is the /proc directory of a process in containerd's mount namespace, in which the directory's path is valid. Empty: the
	// directory is not visible, and counts as empty.
	proc string
}

// bundles returns the bundles of containerd's namespace.
func (r *Remover) bundles(ctx context.Context) (bundles, error) {
	proc, err := r.hostProc(ctx)
	dir := filepath.Join(cmp.Or(r.StateDir, DefaultStateDir), "io.containerd.runtime.v2.task", r.Client.DefaultNamespace())
	return bundles{dir: dir, proc: proc}, err
}

// hostProc returns the /proc directory whose mount namespace is searched; "" for none. containerd is asked for its process each
// time, because it may have been restarted; if that process is not visible here, the host's first process is used.
func (r *Remover) hostProc(ctx context.Context) (string, error) {
	if r.HostProc != ProcOfContainerd {
		return r.HostProc, nil
	}
	step, cancel := r.step(ctx)
	defer cancel()
	server, err := r.Client.IntrospectionService().Server(step)
	if err != nil {
		return "", fmt.Errorf("asking containerd for its process: %w", err)
	}
	seen, err := os.Readlink(filepath.Join(r.ProcRoot, "self", "ns", "pid"))
	if err != nil || server.GetPid() == 0 || seen != fmt.Sprintf("pid:[%d]", server.GetPidns()) {
		return filepath.Join(r.ProcRoot, "1"), nil
	}
	return filepath.Join(r.ProcRoot, strconv.FormatUint(server.GetPid(), 10)), nil
}

func (r *Remover) unmount(ctx context.Context, id string) error {
	b, err := r.bundles(ctx)
	if err != nil {
		return err
	}
	return b.unmount(id)
}

// unmount detaches the mounts of a container's root file system that its shim has left.
func (b bundles) unmount(id string) error {
	points, err := b.mountPoints(func(owner string) bool { return owner == id })
	if err != nil {
		return fmt.Errorf("listing the mounts of container %s: %w", id, err)
	}
	if len(points) == 0 {
		return nil
	}
	slices.Reverse(points) // the last mount first
	err = inMountNamespace(filepath.Join(b.proc, "ns", "mnt"), func() error {
		for _, p := range points {
			err := unix.Unmount(p.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // unmounted concurrently
				return &fs.PathError{Op: "unmount", Path: p.path, Err: err}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("unmounting the root of container %s: %w", id, err)
	}
	return nil
}

// mountPoint is a mount point in a container's bundle.
type mountPoint struct{ id, path string }

// mountPoints returns the mount points in the bundles of the wanted containers, in the order in which they were mounted.
func (b bundles) mountPoints(want func(id string) bool) ([]mountPoint, error) {
	if b.proc == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(filepath.Join(b.proc, "mountinfo"))
	if err != nil {
		return nil, err
	}
	var out []mountPoint
	for line := range strings.Lines(string(raw)) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		path := unescape(fields[4])
		rest, within := strings.CutPrefix(path, b.dir+"/")
		if id, _, _ := strings.Cut(rest, "/"); within && want(id) {
			out = append(out, mountPoint{id, path})
		}
	}
	return out, nil
}

// unescape undoes the kernel's octal escapes (\040 for a space).
func unescape(path string) string {
	var out strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] == '\\' && i+3 < len(path) {
			if n, err := strconv.ParseUint(path[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		out.WriteByte(path[i])
	}
	return out.String()
}

// inMountNamespace calls do in a mount namespace. If that is not this process's, do runs on a thread of its own, which ends
// afterwards.
func inMountNamespace(path string, do func() error) error {
	there, err := os.Readlink(path)
	if err != nil {
		return err
	}
	if here, err := os.Readlink("/proc/self/ns/mnt"); err == nil && here == there {
		return do()
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		// A thread that shares its root and working directory with others cannot enter another mount namespace.
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNS)
		}
		if err != nil {
			done <- &fs.PathError{Op: "entering", Path: path, Err: err}
			return
		}
		done <- do()
	}()
	return <-done
}
