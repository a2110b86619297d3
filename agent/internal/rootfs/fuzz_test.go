package rootfs_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/rootfs"
)

// FuzzLayers reads files of drawn layers, without a mount, and compares with what the kernel's overlay shows.
func FuzzLayers(f *testing.F) {
	require.Zero(f, os.Geteuid(), "whiteouts need root: run these tests as root")
	for _, seed := range []string{"", "\x00\x11\x22", "\x02\x12\x01", "\x00\x10\x13", "\x10\x24\x14\x05", "\x12\x06\x02", "\x10\x17\x02", "\x02\x08\x22", "\x20\x19\x0a"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, steps []byte) {
		dir := t.TempDir()
		dirs := make([]string, 3)
		for i := range dirs {
			dirs[i] = filepath.Join(dir, strconv.Itoa(i))
			require.NoError(t, os.Mkdir(dirs[i], 0o755))
		}
		for i, s := range steps[:min(len(steps), 24)] {
			change(filepath.Join(dirs[int(s>>4)%3]), int(s&15), fmt.Sprint("content ", i))
		}
		lower := strings.Join(dirs, ":")
		got, err := rootfs.ReadFiles(t.Context(), []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"index=off", "lowerdir=" + lower}}}, limit, "/etc/passwd", "/etc/group")
		want, wantErr := kernelView(t, lower, "etc/passwd", "etc/group")
		require.Equal(t, wantErr == nil, err == nil, "%v, %v", wantErr, err)
		require.Equal(t, want, got)
	})
}

// change changes a layer in one of many ways. What does not fit, because of an earlier change, has no effect.
func change(layer string, kind int, text string) {
	etc, passwd, group := filepath.Join(layer, "etc"), filepath.Join(layer, "etc/passwd"), filepath.Join(layer, "etc/group")
	switch kind {
	case 0:
		_ = os.Mkdir(etc, 0o755)
	case 1:
		_ = os.WriteFile(etc, []byte(text), 0o644)
	case 2:
		_ = os.Mkdir(etc, 0o755)
		_ = os.WriteFile(passwd, []byte(text), 0o644)
	case 3:
		_ = os.Mkdir(etc, 0o755)
		_ = os.WriteFile(group, []byte(text), 0o644)
	case 4, 13:
		_ = unix.Mknod(passwd, unix.S_IFCHR, 0)
	case 5, 14:
		_ = unix.Mknod(etc, unix.S_IFCHR, 0)
	case 6, 15:
		_ = unix.Setxattr(etc, "trusted.overlay.opaque", []byte("y"), 0)
	case 7:
		_ = os.Mkdir(passwd, 0o755)
	case 8:
		_ = os.Symlink("group", passwd)
	case 9:
		_ = os.Symlink("data", etc)
		_ = os.Mkdir(filepath.Join(layer, "data"), 0o755)
		_ = os.WriteFile(filepath.Join(layer, "data/passwd"), []byte(text), 0o644)
	case 10:
		_ = os.Symlink("../../../../../../../../etc/hostname", group)
	case 11:
		_ = os.Symlink("/data/../etc/group", passwd)
	case 12:
		_ = os.Symlink("passwd", group)
	}
}

// kernelView reads files through an overlay that is mounted nowhere, by the rules of a read of an image: a missing file is empty, one that
// is not a regular file is an error, and no link leads out.
func kernelView(t *testing.T, lower string, names ...string) ([]string, error) {
	t.Helper()
	context, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(context)
	require.NoError(t, unix.FsconfigSetFlag(context, "ro"))
	require.NoError(t, unix.FsconfigSetString(context, "index", "off"))
	require.NoError(t, unix.FsconfigSetString(context, "lowerdir", lower))
	require.NoError(t, unix.FsconfigCreate(context))
	tree, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	require.NoError(t, err)
	defer unix.Close(tree)
	out := make([]string, len(names))
	for i, name := range names {
		fd, err := openInRoot(tree, name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		file := os.NewFile(uintptr(fd), name)
		info, err := file.Stat()
		require.NoError(t, err)
		if !info.Mode().IsRegular() {
			file.Close()
			return nil, errors.New("not a regular file")
		}
		raw, err := io.ReadAll(file)
		file.Close()
		require.NoError(t, err)
		out[i] = string(raw)
	}
	return out, nil
}

// openInRoot opens a file as the kernel resolves it in a root. It tries again while renames and mounts elsewhere on the machine disturb
// that: tests beside it make some.
func openInRoot(root int, name string) (int, error) {
	for {
		fd, err := unix.Openat2(root, name, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
		if !errors.Is(err, unix.EAGAIN) {
			return fd, err
		}
	}
}
