package transfer

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
)

// Put copies a local file or directory into the sandbox. A symbolic link named by source is followed, those inside a directory are copied as links.
func (r *Remote) Put(ctx context.Context, source, destination string) error {
	st, err := os.Stat(source)
	if err != nil {
		return missing(err)
	}
	target, err := r.target(ctx, destination, lastName(source), st.IsDir())
	if err != nil {
		return err
	}
	if st.IsDir() {
		return r.putDirectory(ctx, source, target, lastName(source) == "" && target == destination)
	}
	f, err := os.Open(source)
	if err != nil {
		return missing(err)
	}
	defer f.Close()
	if st, err = f.Stat(); err != nil {
		return err
	}
	header := &filesystemv1.WriteFileHeader{User: r.User, Path: target}
	if !st.Mode().IsRegular() { // a FIFO or a device: its size is not known
		in, stop := interruptible(ctx, f)
		defer stop()
		return r.putFile(ctx, header, in)
	}
	size, mode := st.Size(), uint32(st.Mode().Perm())
	header.SizeBytes, header.Mode = &size, &mode
	if st.ModTime().Unix() >= 0 {
		header.ModifyTime = timestamppb.New(st.ModTime())
	}
	return r.putFile(ctx, header, &exactly{from: f, name: source, want: size})
}

// PutStream copies all that in has into a file of the sandbox.
func (r *Remote) PutStream(ctx context.Context, in io.Reader, destination string) error {
	target, err := r.target(ctx, destination, "", false)
	if err != nil {
		return err
	}
	if st, err := r.Stat(ctx, target); err == nil && st.GetType() == filesystemv1.FileType_FILE_TYPE_DIRECTORY {
		return conflict("%q in sandbox %q is a directory: name the file to write", destination, r.Sandbox)
	}
	stream, stop := interruptible(ctx, in)
	defer stop()
	return r.putFile(ctx, &filesystemv1.WriteFileHeader{User: r.User, Path: target}, stream)
}

// exactly reads as many bytes as a file had at first. It fails if there are fewer.
type exactly struct {
	from      io.Reader
	name      string
	want, got int64
}

// Read implements io.Reader.
func (e *exactly) Read(b []byte) (int, error) {
	if e.got == e.want {
		return 0, io.EOF
	}
	n, err := e.from.Read(b[:min(int64(len(b)), e.want-e.got)])
	e.got += int64(n)
	if errors.Is(err, io.EOF) && e.got < e.want {
		return n, shrunk(e.name, e.want, e.got)
	}
	return n, err
}

func (r *Remote) putFile(ctx context.Context, header *filesystemv1.WriteFileHeader, in io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // a call that is not complete writes nothing
	stream, err := r.Client.WriteFile(ctx)
	if err != nil {
		return err
	}
	err = stream.Send(&filesystemv1.WriteFileRequest{Namespace: r.Namespace, Name: r.Sandbox, Header: header})
	if err == nil {
		to := &sender{count: r.Count, send: func(b []byte) error { return stream.Send(&filesystemv1.WriteFileRequest{Data: b}) }}
		_, err = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{in}, make([]byte, chunk))
		if err != nil && !errors.Is(err, errRefused) {
			return err
		}
	}
	_, err = stream.CloseAndRecv()
	return err
}

// putDirectory copies a directory to target, or what is in it if contents is set.
func (r *Remote) putDirectory(ctx context.Context, source, target string, contents bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	source, err := filepath.EvalSymlinks(source)
	if err != nil {
		return missing(err)
	}
	into, name := path.Dir(target), path.Base(target)
	if contents {
		into, name = target, "."
	}
	stream, err := r.Client.WriteArchive(ctx)
	if err != nil {
		return err
	}
	err = stream.Send(&filesystemv1.WriteArchiveRequest{
		Namespace: r.Namespace, Name: r.Sandbox, Header: &filesystemv1.WriteArchiveHeader{User: r.User, Path: into},
	})
	if err == nil {
		to := &sender{count: r.Count, send: func(b []byte) error { return stream.Send(&filesystemv1.WriteArchiveRequest{Data: b}) }}
		if err = r.archive(to, source, name); err != nil && !errors.Is(err, errRefused) {
			return err
		}
	}
	_, err = stream.CloseAndRecv()
	return err
}

// archive writes a directory as a tar archive whose names begin with name.
func (r *Remote) archive(to io.Writer, source, name string) error {
	pieces := bufio.NewWriterSize(to, chunk) // the small writes of an archive become messages of a good size
	out := tar.NewWriter(pieces)
	err := filepath.WalkDir(source, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rest, err := filepath.Rel(source, p)
		if err != nil {
			return err
		}
		return r.add(out, p, path.Join(name, filepath.ToSlash(rest)))
	})
	if err != nil {
		return err
	}
	return errors.Join(out.Close(), pieces.Flush())
}

func (r *Remote) add(out *tar.Writer, p, name string) error {
	st, err := os.Lstat(p)
	if err != nil {
		return err
	}
	target := ""
	switch st.Mode().Type() {
	case 0, fs.ModeDir:
	case fs.ModeSymlink:
		if target, err = os.Readlink(p); err != nil {
			return err
		}
	default:
		r.Warn("%q is not copied: it is not a file, a directory or a symbolic link", p)
		return nil
	}
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Linkname: target, Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(), Format: tar.FormatPAX}
	switch {
	case st.IsDir():
		header.Typeflag, header.Name = tar.TypeDir, strings.TrimSuffix(name, "/")+"/"
	case target != "":
		header.Typeflag = tar.TypeSymlink
	default:
		return addFile(out, header, p)
	}
	if err := out.WriteHeader(header); err != nil {
		return fmt.Errorf("archiving %q: %w", p, err)
	}
	return nil
}

func addFile(out *tar.Writer, header *tar.Header, p string) error {
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	header.Size = st.Size()
	if err := out.WriteHeader(header); err != nil {
		return fmt.Errorf("archiving %q: %w", p, err)
	}
	_, err = io.Copy(out, &exactly{from: f, name: p, want: st.Size()})
	return err
}
