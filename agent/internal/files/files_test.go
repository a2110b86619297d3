package files_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// dial serves one connection, and returns its other end after the helper is ready.
func dial(t *testing.T) *net.UnixConn {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	ends := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		conn, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		ends[i] = conn.(*net.UnixConn)
	}
	done := make(chan struct{})
	go func() { defer close(done); files.Serve(ends[0], t.TempDir()) }()
	t.Cleanup(func() { _ = ends[1].Close(); <-done })
	kind, _, err := wire.Get(ends[1], nil)
	require.NoError(t, err)
	require.Equal(t, wire.Ready, kind)
	return ends[1]
}

func archiveOf(t *testing.T, modified time.Time, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	require.NoError(t, out.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "dir/", Mode: 0o750, ModTime: modified}))
	require.NoError(t, out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "dir/file", Mode: 0o640, Size: int64(len(content)), ModTime: modified}))
	_, err := out.Write(content)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	return b.Bytes()
}

// TestWriteArchiveReplacesFilesAtOnce: a file has its name when it is complete, with its time, and so has its directory.
func TestWriteArchiveReplacesFilesAtOnce(t *testing.T) {
	root, modified := t.TempDir(), time.Unix(1e9, 0)
	file := filepath.Join(root, "dir/file")
	require.NoError(t, os.Mkdir(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	raw := archiveOf(t, modified, bytes.Repeat([]byte("new"), 1000))

	conn := dial(t)
	require.NoError(t, wire.PutJSON(conn, wire.Request, &wire.Call{Op: wire.WriteArchive, Path: []byte(root)}))
	require.NoError(t, wire.Put(conn, wire.Data, raw[:2000]))
	require.Eventually(t, func() bool { all, _ := os.ReadDir(filepath.Dir(file)); return len(all) == 2 }, 10*time.Second, time.Millisecond)
	require.NoError(t, conn.Close()) // the client has disconnected
	require.Eventually(t, func() bool { all, _ := os.ReadDir(filepath.Dir(file)); return len(all) == 1 }, 10*time.Second, time.Millisecond)
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "old", string(content))

	conn = dial(t)
	require.NoError(t, wire.PutJSON(conn, wire.Request, &wire.Call{Op: wire.WriteArchive, Path: []byte(root)}))
	require.NoError(t, wire.Put(conn, wire.Data, raw))
	require.NoError(t, wire.Put(conn, wire.End, nil))
	kind, payload, err := wire.Get(conn, nil)
	require.NoError(t, err)
	require.Equal(t, wire.Answer, kind, "%s", payload)
	for path, mode := range map[string]os.FileMode{file: 0o640, filepath.Dir(file): 0o750 | os.ModeDir} {
		st, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, mode, st.Mode())
		require.True(t, st.ModTime().Equal(modified), path)
	}
}

// TestWriteSetsTheTime: a copy of a file has the time of the file.
func TestWriteSetsTheTime(t *testing.T) {
	modified, file := time.Unix(1e9, 0), filepath.Join(t.TempDir(), "file")
	conn := dial(t)
	require.NoError(t, wire.PutJSON(conn, wire.Request, &wire.Call{Op: wire.Write, Path: []byte(file), Modified: &modified}))
	require.NoError(t, wire.Put(conn, wire.Data, []byte("content")))
	require.NoError(t, wire.Put(conn, wire.End, nil))
	kind, payload, err := wire.Get(conn, nil)
	require.NoError(t, err)
	require.Equal(t, wire.Answer, kind, "%s", payload)
	result := &wire.Result{}
	require.NoError(t, json.Unmarshal(payload, result))
	require.True(t, result.File.Modified.Equal(modified))
	st, err := os.Stat(file)
	require.NoError(t, err)
	require.True(t, st.ModTime().Equal(modified))
}

// TestReadArchiveHasNoAbsoluteNames: the root of a sandbox is archived with relative names. The call is ended after the first of them.
func TestReadArchiveHasNoAbsoluteNames(t *testing.T) {
	conn := dial(t)
	require.NoError(t, wire.PutJSON(conn, wire.Request, &wire.Call{Op: wire.ReadArchive, Path: []byte("/")}))
	kind, payload, err := wire.Get(conn, nil)
	require.NoError(t, err)
	require.Equal(t, wire.Answer, kind, "%s", payload)
	reader, writer := io.Pipe()
	go func() {
		for {
			_, payload, err := wire.Get(conn, nil)
			if err != nil {
				_ = writer.CloseWithError(err)
				return
			}
			if _, err := writer.Write(payload); err != nil {
				return
			}
		}
	}()
	in := tar.NewReader(reader)
	for range 2 {
		h, err := in.Next()
		require.NoError(t, err)
		require.False(t, filepath.IsAbs(h.Name), h.Name)
	}
	require.NoError(t, reader.Close())
}
