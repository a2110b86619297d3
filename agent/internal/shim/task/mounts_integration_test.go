//go:build integration

package task_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/task"
)

const firstID = 1 << 28

// userNamespace returns a user namespace with the ids from firstID on.
func userNamespace(t *testing.T) *os.File {
	t.Helper()
	cmd := exec.Command("cat") //nolint:noctx // it ends with its input
	ids := []syscall.SysProcIDMap{{HostID: firstID, Size: 1 << 16}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	held, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = f.Close()
		require.NoError(t, held.Close())
		require.NoError(t, cmd.Wait())
	})
	return f
}

// unmappable returns a directory whose file system has no id-mapped mounts.
func unmappable(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, unix.Mount("ramfs", dir, "ramfs", 0, "mode=755"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	return dir
}

// TestMapOwners: files of the host appear as those of the container's users. Where the file system cannot do that, what everyone may read and no one
// writes is passed as it is, and the rest is an error that says why.
func TestMapOwners(t *testing.T) {
	users := userNamespace(t)
	const readOnly = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID
	for name, c := range map[string]struct {
		on         func(*testing.T) string
		mode       os.FileMode
		attributes uint64
		owner      uint32
		want       string // in the error
	}{
		"mapped":                   {(*testing.T).TempDir, 0o600, 0, firstID, ""},
		"unmapped, read-only":      {unmappable, 0o644, readOnly, 0, ""},
		"unmapped, written":        {unmappable, 0o666, unix.MOUNT_ATTR_NOSUID, 0, "the container writes to it"},
		"unmapped, not for others": {unmappable, 0o640, readOnly, 0, "its mode is 0640"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			path := filepath.Join(c.on(t), "file")
			require.NoError(t, os.WriteFile(path, []byte("content"), 0o600))
			require.NoError(t, os.Chmod(path, c.mode))
			files, err := task.MapOwners(&plan.Plan{Root: root, FirstID: firstID, Mounts: []plan.Mount{{Source: path, Attributes: c.attributes}}}, users)
			for _, f := range files {
				defer f.Close()
			}
			if c.want != "" {
				require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
				for _, part := range []string{path, c.want, "no id-mapped mounts", "userNamespace: Disabled"} {
					require.ErrorContains(t, err, part)
				}
				return
			}
			require.NoError(t, err)
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(files[1].Fd()), &st))
			require.Equal(t, c.owner, st.Uid)
			opened, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", files[1].Fd()))
			require.NoError(t, err)
			defer opened.Close()
			content, err := io.ReadAll(opened)
			require.NoError(t, err)
			require.Equal(t, "content", string(content))
		})
	}
}

// TestMapOwnersOfADirectory: the root of slots may be on any file system, if everyone may search it.
func TestMapOwnersOfADirectory(t *testing.T) {
	users := userNamespace(t)
	root := unmappable(t)
	for mode, want := range map[os.FileMode]string{0o755: "", 0o751: "its mode is 0751"} {
		require.NoError(t, os.Chmod(root, mode))
		files, err := task.MapOwners(&plan.Plan{Root: root, FirstID: firstID}, users)
		for _, f := range files {
			require.NoError(t, f.Close())
		}
		if want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, want)
		}
	}
}
