package transfer

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
)

// Get copies a file or directory of the sandbox to this machine. A symbolic link named by source is followed, those inside a directory are copied as
// links if they lead to something inside the copy.
func (r *Remote) Get(ctx context.Context, source, destination string) error {
	st, err := r.Stat(ctx, source)
	if err != nil {
		return err
	}
	directory := st.GetType() == filesystemv1.FileType_FILE_TYPE_DIRECTORY
	target, err := localTarget(destination, lastName(source), directory)
	if err != nil {
		return err
	}
	if directory {
		return r.getDirectory(ctx, source, path.Base(st.GetPath()), target)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	file, in, err := r.open(ctx, source)
	if err != nil {
		return err
	}
	return origin(replace(target, file, in))
}

// GetStream copies a file of the sandbox to out.
func (r *Remote) GetStream(ctx context.Context, source string, out io.Writer) error {
	st, err := r.Stat(ctx, source)
	if err != nil {
		return err
	}
	if st.GetType() == filesystemv1.FileType_FILE_TYPE_DIRECTORY {
		return conflict("%q in sandbox %q is a directory, and standard output takes a file", source, r.Sandbox)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	_, in, err := r.open(ctx, source)
	if err == nil {
		_, err = io.Copy(out, in)
	}
	return err
}

// open opens a file of the sandbox. The reader is valid until ctx ends.
func (r *Remote) open(ctx context.Context, source string) (*filesystemv1.File, io.Reader, error) {
	stream, err := r.Client.ReadFile(ctx, &filesystemv1.ReadFileRequest{Namespace: r.Namespace, Name: r.Sandbox, User: r.User, Path: source})
	if err != nil {
		return nil, nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, nil, err
	}
	r.Count(len(first.GetData()))
	return first.GetFile(), &received{rest: first.GetData(), count: r.Count, next: func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	}}, nil
}

// localTarget returns the path of a copy on this machine, with the rules of `cp -r`.
func localTarget(destination, name string, directory bool) (string, error) {
	st, err := os.Stat(destination)
	switch {
	case err == nil && st.IsDir():
		target := filepath.Join(destination, name)
		if st, err := os.Lstat(target); err == nil && st.IsDir() != directory && (st.IsDir() || !isDirectory(target)) {
			return "", conflict("%q exists, and only one of it and the source is a directory", target)
		}
		return target, nil
	case err == nil && directory:
		return "", conflict("%q is not a directory", destination)
	case err == nil:
		return destination, nil
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}
	if _, err := os.Lstat(destination); err == nil {
		return "", conflict("%q is a symbolic link to nothing", destination)
	}
	trimmed := strings.TrimRight(destination, "/")
	if trimmed != destination && !directory {
		return "", conflict("the directory %q does not exist", destination)
	}
	if !isDirectory(filepath.Dir(trimmed)) {
		return "", conflict("the directory %q does not exist", filepath.Dir(trimmed))
	}
	return trimmed, nil
}

func isDirectory(p string) bool {
	st, err := os.Stat(p)
	return err == nil && st.IsDir()
}

// replace writes a local file under a temporary name and gives it its name when it is complete. A device or FIFO is written as it is.
func replace(target string, about *filesystemv1.File, in io.Reader) error {
	if resolved, err := filepath.EvalSymlinks(target); err == nil {
		target = resolved
	}
	st, err := os.Stat(target)
	if err == nil && !st.Mode().IsRegular() {
		if st.IsDir() {
			return conflict("%q is a directory", target)
		}
		f, err := os.OpenFile(target, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, in)
		return errors.Join(err, f.Close())
	}
	dir, err := os.OpenRoot(filepath.Dir(target))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	modified := time.Time{}
	if t := about.GetModifyTime(); t != nil {
		modified = t.AsTime()
	}
	return replaceIn(dir, filepath.Base(target), fs.FileMode(about.GetMode()), modified, in)
}

// replaceIn writes a file in a directory. A link with its name is replaced and not followed. The bits for setuid and setgid are not set: on this machine the
// file may belong to a user who has more rights than the one in the sandbox.
func replaceIn(dir *os.Root, name string, mode fs.FileMode, modified time.Time, in io.Reader) (err error) {
	temporary := filepath.Join(filepath.Dir(name), ".fsb-"+rand.Text())
	f, err := dir.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = dir.Remove(temporary)
		}
	}()
	_, err = io.Copy(f, in)
	if err == nil {
		err = f.Chmod(mode.Perm())
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if !modified.IsZero() {
		if err := dir.Chtimes(temporary, modified, modified); err != nil {
			return err
		}
	}
	return dir.Rename(temporary, name)
}

// getDirectory unpacks the archive of a directory, whose names begin with prefix, into target.
func (r *Remote) getDirectory(ctx context.Context, source, prefix, target string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.Client.ReadArchive(ctx, &filesystemv1.ReadArchiveRequest{
		Namespace: r.Namespace, Name: r.Sandbox, User: r.User, Path: source, Follow: true,
	})
	if err != nil {
		return err
	}
	in := &received{count: r.Count, next: func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	}}
	first, err := in.next() // a refusal leaves no directory
	if err != nil {
		return err
	}
	in.rest = first
	r.Count(len(first))
	made := os.Mkdir(target, 0o700)
	if made != nil && !errors.Is(made, fs.ErrExist) {
		return made
	}
	root, err := os.OpenRoot(target)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if prefix == "/" {
		prefix = "."
	}
	u := &unpacker{root: root, prefix: prefix, fresh: made == nil, warn: r.Warn}
	err = u.unpack(in)
	if err == nil {
		_, err = io.Copy(io.Discard, in) // the error of the call comes after the archive
	}
	if made == nil && err != nil {
		_ = os.Remove(target) // if nothing was unpacked
	}
	return origin(err)
}
