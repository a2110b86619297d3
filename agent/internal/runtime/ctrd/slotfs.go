package ctrd

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
)

// prepareMountpoints creates, in a root that a claim will mount into, the mount points that the image lacks, as sandbox-init
// would. Each takes an inode of the snapshot's file system, and finding a free one can take longer than the rest of the
// claim: ext4 skips all that were deleted within the last minute, one by one. Errors are ignored: sandbox-init creates what
// is missing, and reports what it cannot create. owner is the root of the sandbox.
func prepareMountpoints(root *os.File, owner int) {
	dir, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
	if err != nil {
		return
	}
	defer dir.Close()
	for _, name := range append(layout.RootDirs(), "etc") {
		if dir.Mkdir(name, 0o755) == nil {
			_ = dir.Lchown(name, owner, owner)
		}
	}
	for _, name := range layout.RootFiles() {
		if f, err := dir.OpenFile(path.Join("etc", name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755); err == nil {
			_ = f.Chown(owner, owner)
			_ = f.Close()
		}
	}
}

// slotRoots is the directory for the root of slots.
type slotRoots struct {
	// dir is Config.SlotRoot; init is Config.SandboxInit, with the helper beside it, and shim Config.Shim.
	dir, init, shim string

	mu        sync.Mutex
	rootfs    string          // created once
	installed *shim.Installed // installed once
}

// get creates the root of slots on the host, once for each version of sandbox-init: other agents on the node, of
// this version or another, do the same beside it.
func (s *slotRoots) get() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rootfs != "" {
		return s.rootfs, nil
	}
	programs := map[string][]byte{}
	hash := sha256.New()
	for _, path := range []string{layout.InitPath, layout.HelperPath} {
		from := s.init
		if path == layout.HelperPath {
			from = filepath.Join(filepath.Dir(s.init), path)
		}
		binary, err := os.ReadFile(from)
		if err != nil {
			return "", fmt.Errorf("reading a program of slots: %w", err)
		}
		programs[path] = binary
		sum := sha256.Sum256(binary)
		_, _ = hash.Write(sum[:])
	}
	dir := filepath.Join(s.dir, hex.EncodeToString(hash.Sum(nil)[:8]))
	if _, err := os.Stat(dir); err == nil {
		s.rootfs = dir
		return dir, nil
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil { //nolint:gosec // slots of any user read it
		return "", fmt.Errorf("creating the root of slots: %w", err)
	}
	tmp, err := os.MkdirTemp(s.dir, ".new-")
	if err != nil {
		return "", fmt.Errorf("creating the root of slots: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := fillRootfs(tmp, programs); err != nil {
		return "", fmt.Errorf("creating the root of slots: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("creating the root of slots: %w", err)
	}
	s.rootfs = dir
	return dir, nil
}

// installShim installs our shim on the host, once for each version. This process uses the version until closeShim is called.
// Others stay as long as they are in use: containerd executes them for the containers that they have started.
func (s *slotRoots) installShim() (*shim.Installed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.installed != nil {
		return s.installed, nil
	}
	program, err := os.ReadFile(s.shim)
	if err != nil {
		return nil, fmt.Errorf("reading the shim: %w", err)
	}
	member, err := os.ReadFile(filepath.Join(filepath.Dir(s.shim), shim.Member))
	if err != nil {
		return nil, fmt.Errorf("reading the shim: %w", err)
	}
	installed, err := shim.Install(s.dir, program, member)
	if errdefs.IsUnavailable(err) {
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the janitor is checking whether the installed shim is in use; try again")
	}
	if err != nil {
		return nil, err
	}
	s.installed = installed
	return installed, nil
}

// shimPath returns the path of our shim on the host.
func (s *slotRoots) shimPath() (string, error) {
	installed, err := s.installShim()
	if err != nil {
		return "", err
	}
	return installed.Path, nil
}

// memberPath returns the path, on the host, of what the records of containers in a shim of ours name as their runtime.
func (s *slotRoots) memberPath() (string, error) {
	installed, err := s.installShim()
	if err != nil {
		return "", err
	}
	return installed.MemberPath(), nil
}

// closeShim ends the use of the installed shim.
func (s *slotRoots) closeShim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.installed != nil {
		s.installed.Close()
		s.installed = nil
	}
}

// tryMount mounts an empty overlay.
func (s *slotRoots) tryMount() error {
	root, err := s.tryOverlay(nil)
	if err != nil {
		return err
	}
	return root.Close()
}

// tryOverlay mounts an empty overlay, with the owners of a user namespace if users is not nil.
func (s *slotRoots) tryOverlay(users *os.File) (*os.File, error) {
	dir, err := os.MkdirTemp(s.dir, ".try-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	options := make([]string, 0, 3)
	for _, name := range []string{"lowerdir", "upperdir", "workdir"} {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			return nil, err
		}
		options = append(options, name+"="+path)
	}
	mounts := []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}
	if users == nil {
		return detached(mounts)
	}
	return mapped(mounts, users, 0)
}

func fillRootfs(dir string, programs map[string][]byte) error {
	for _, d := range append(layout.RootDirs(), layout.PrivateDir, layout.FilesDir, layout.NewRootDir) {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil { //nolint:gosec // as any root directory
			return err
		}
	}
	for _, f := range layout.RootFiles() {
		if err := os.WriteFile(filepath.Join(dir, layout.FilesDir, f), nil, 0o644); err != nil { //nolint:gosec // mount points
			return err
		}
	}
	for path, binary := range programs {
		if err := os.WriteFile(filepath.Join(dir, path), binary, 0o755); err != nil { //nolint:gosec // it is executed
			return err
		}
	}
	return os.Chmod(dir, 0o755) //nolint:gosec // as any root directory
}
