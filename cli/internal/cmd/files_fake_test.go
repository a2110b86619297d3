package cmd_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// fakeFiles is the file system of a sandbox: a directory of the test. Its archives may be replaced by any bytes, and its streams broken.
type fakeFiles struct {
	filesystemv1.UnimplementedFilesystemServiceServer
	root string
	// archive is sent by ReadArchive if it is set.
	archive []byte
	// breakAfter is the number of messages after which a stream is broken; zero: never. broken is called then.
	breakAfter int
	broken     func()
	// watches are the answers to WatchDirectory, one after another.
	watches []func(*filesystemv1.WatchDirectoryRequest, filesystemv1.FilesystemService_WatchDirectoryServer) error

	mu    sync.Mutex
	users []string
	wrote []*filesystemv1.WriteFileHeader
	aways int // writes that were broken by the client
}

func newFiles(t *testing.T) *fakeFiles {
	t.Helper()
	return &fakeFiles{root: t.TempDir()}
}

// WatchDirectory answers as the test says.
func (f *fakeFiles) WatchDirectory(in *filesystemv1.WatchDirectoryRequest, stream filesystemv1.FilesystemService_WatchDirectoryServer) error {
	f.mu.Lock()
	next := f.watches[0]
	f.watches = f.watches[1:]
	f.mu.Unlock()
	return next(in, stream)
}

func (f *fakeFiles) local(path string) string {
	if !filepath.IsAbs(path) {
		path = "/home/" + strings.TrimPrefix(path, "~")
	}
	return filepath.Join(f.root, path)
}

func fileFault(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fault.New(errdefs.ErrNotFound, fault.FileNotFound, "there is no such file or directory")
	case err != nil:
		return fault.New(errdefs.ErrFailedPrecondition, fault.FileConflict, "%s", err)
	}
	return nil
}

func (f *fakeFiles) describe(path string) (*filesystemv1.File, error) {
	st, err := os.Stat(f.local(path))
	if err != nil {
		return nil, fileFault(err)
	}
	rel, err := filepath.Rel(f.root, f.local(path))
	out := &filesystemv1.File{Path: filepath.Join("/", rel), Name: st.Name(), Type: filesystemv1.FileType_FILE_TYPE_FILE, Mode: uint32(st.Mode().Perm()), ModifyTime: timestamppb.New(st.ModTime())}
	switch {
	case st.IsDir():
		out.Type = filesystemv1.FileType_FILE_TYPE_DIRECTORY
	case !st.Mode().IsRegular():
		out.Type = filesystemv1.FileType_FILE_TYPE_OTHER
	}
	return out, err
}

func (f *fakeFiles) Stat(_ context.Context, in *filesystemv1.StatRequest) (*filesystemv1.StatResponse, error) {
	if in.GetName() != "web" {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s", in.GetName())
	}
	f.mu.Lock()
	f.users = append(f.users, in.GetUser())
	f.mu.Unlock()
	out, err := f.describe(in.GetPath())
	return &filesystemv1.StatResponse{File: out}, err
}

func (f *fakeFiles) ListDirectory(_ context.Context, in *filesystemv1.ListDirectoryRequest) (*filesystemv1.ListDirectoryResponse, error) {
	entries, err := os.ReadDir(f.local(in.GetPath()))
	out := &filesystemv1.ListDirectoryResponse{}
	for _, e := range entries {
		file, err := f.describe(filepath.Join(in.GetPath(), e.Name()))
		if err != nil {
			return nil, err
		}
		out.Files = append(out.Files, file)
	}
	return out, fileFault(err)
}

// pieces sends bytes in pieces of a size that fits no block of an archive.
func (f *fakeFiles) pieces(data []byte, send func([]byte) error) error {
	for i := 0; len(data) > 0; i++ {
		if f.breakAfter > 0 && i == f.breakAfter {
			if f.broken != nil {
				f.broken()
			}
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent has ended")
		}
		n := min(len(data), 1000)
		if err := send(data[:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

func (f *fakeFiles) ReadFile(in *filesystemv1.ReadFileRequest, stream grpc.ServerStreamingServer[filesystemv1.ReadFileResponse]) error {
	about, err := f.describe(in.GetPath())
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(f.local(in.GetPath()))
	if err != nil {
		return fileFault(err)
	}
	if err := stream.Send(&filesystemv1.ReadFileResponse{File: about}); err != nil {
		return err
	}
	return f.pieces(raw, func(b []byte) error { return stream.Send(&filesystemv1.ReadFileResponse{Data: b}) })
}

func (f *fakeFiles) ReadArchive(in *filesystemv1.ReadArchiveRequest, stream grpc.ServerStreamingServer[filesystemv1.ReadArchiveResponse]) error {
	raw := f.archive
	if raw == nil {
		var b bytes.Buffer
		out := tar.NewWriter(&b)
		root := f.local(in.GetPath())
		err := filepath.Walk(root, func(p string, st fs.FileInfo, _ error) error {
			target, _ := os.Readlink(p)
			h, err := tar.FileInfoHeader(st, target)
			if err != nil {
				return err
			}
			rest, _ := filepath.Rel(filepath.Dir(root), p)
			if h.Name = rest; st.IsDir() {
				h.Name += "/"
			}
			if err := out.WriteHeader(h); err != nil || !st.Mode().IsRegular() {
				return err
			}
			content, _ := os.ReadFile(p)
			_, err = out.Write(content)
			return err
		})
		if err = errors.Join(err, out.Close()); err != nil {
			return err
		}
		raw = b.Bytes()
	}
	return f.pieces(raw, func(b []byte) error { return stream.Send(&filesystemv1.ReadArchiveResponse{Data: b}) })
}

func (f *fakeFiles) WriteFile(stream grpc.ClientStreamingServer[filesystemv1.WriteFileRequest, filesystemv1.WriteFileResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	header := first.GetHeader()
	if st, err := os.Stat(f.local(header.GetPath())); err == nil && st.IsDir() {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FileConflict, "%s: is a directory", header.GetPath())
	}
	content, err := f.take(func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	})
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.wrote = append(f.wrote, header)
	f.mu.Unlock()
	if err := os.WriteFile(f.local(header.GetPath()), content, 0o600); err != nil {
		return fileFault(err)
	}
	return stream.SendAndClose(&filesystemv1.WriteFileResponse{WrittenBytes: int64(len(content))})
}

// take receives all data of a call.
func (f *fakeFiles) take(next func() ([]byte, error)) ([]byte, error) {
	var all []byte
	for i := 0; ; i++ {
		if f.breakAfter > 0 && i == f.breakAfter {
			return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent has ended")
		}
		b, err := next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			f.mu.Lock()
			f.aways++
			f.mu.Unlock()
			return nil, err
		}
		if all = append(all, b...); f.broken != nil {
			f.broken()
		}
	}
}

func (f *fakeFiles) gaveUp() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.aways
}

func (f *fakeFiles) WriteArchive(stream grpc.ClientStreamingServer[filesystemv1.WriteArchiveRequest, filesystemv1.WriteArchiveResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	raw, err := f.take(func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	})
	if err != nil {
		return err
	}
	in := tar.NewReader(bytes.NewReader(raw))
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&filesystemv1.WriteArchiveResponse{})
		}
		if err != nil {
			return err
		}
		p := filepath.Join(f.local(first.GetHeader().GetPath()), h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(p, 0o700)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, p)
		default:
			content, _ := io.ReadAll(in)
			err = errors.Join(os.WriteFile(p, content, 0o600), os.Chmod(p, h.FileInfo().Mode()), os.Chtimes(p, h.ModTime, h.ModTime))
		}
		if err != nil {
			return fileFault(err)
		}
	}
}

// put makes a file with its directories.
func put(t *testing.T, path, content string) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), 0o640))
	old := time.Unix(1e9, 0)
	require.NoError(t, os.Chtimes(path, old, old))
	return path
}

// tree returns the files below a directory with their contents, links with their targets, and directories with nothing.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, filepath.Walk(root, func(p string, st fs.FileInfo, err error) error {
		require.NoError(t, err)
		rel, _ := filepath.Rel(root, p)
		switch {
		case rel == ".":
		case st.IsDir():
			out[rel+"/"] = ""
		case st.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(p)
			out[rel] = "-> " + target
		default:
			raw, _ := os.ReadFile(p)
			out[rel] = string(raw)
		}
		return nil
	}))
	return out
}

// tarOf returns an archive of headers, with the name of a file as its content.
func tarOf(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(h.Name))
		}
		require.NoError(t, out.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := out.Write([]byte(h.Name))
			require.NoError(t, err)
		}
	}
	require.NoError(t, out.Close())
	return b.Bytes()
}
