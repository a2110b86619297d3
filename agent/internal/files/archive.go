package files

import (
	"archive/tar"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// readArchive sends a file or directory as a tar archive, whose names begin with its last part.
func (s *server) readArchive() (*wire.Result, error) {
	root := s.path
	if s.call.Follow {
		var err error
		if root, err = filepath.EvalSymlinks(root); err != nil {
			return nil, err
		}
	}
	about, err := describe(root, false)
	if err != nil {
		return nil, err
	}
	if err := wire.PutJSON(s.conn, wire.Answer, &wire.Result{File: about}); err != nil {
		return nil, err
	}
	s.broken, s.taken = true, true
	reader, writer := io.Pipe()
	name := filepath.Base(s.path)
	if name == "/" {
		name = "." // no name of an archive is absolute
	}
	go func() { _ = writer.CloseWithError(archive(writer, root, name)) }()
	n, err := send(s.conn, reader)
	_ = reader.CloseWithError(io.ErrClosedPipe)
	if err != nil {
		_ = wire.PutJSON(s.conn, wire.Failed, failure(err, s.path))
		return nil, nil //nolint:nilnil // it is answered
	}
	_ = wire.PutJSON(s.conn, wire.End, &wire.Result{Bytes: n})
	return nil, nil //nolint:nilnil // the same
}

// archive writes what is at root. Devices, FIFOs and sockets are left out, and so is what disappears meanwhile.
func archive(w io.Writer, root, name string) error {
	out := tar.NewWriter(w)
	err := filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			if p != root && errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		rest, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		err = add(out, p, path.Join(name, filepath.ToSlash(rest)))
		if p != root && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	return out.Close()
}

func add(out *tar.Writer, p, name string) error {
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
		return nil
	}
	header, err := tar.FileInfoHeader(st, target)
	if err != nil {
		return err
	}
	header.Name = name
	if st.IsDir() {
		header.Name += "/"
	}
	if !st.Mode().IsRegular() {
		return out.WriteHeader(header)
	}
	f, now, err := open(p, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	header.Size = now.Size
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	n, err := io.Copy(out, io.LimitReader(f, now.Size))
	if err == nil && n < now.Size { // it has become shorter
		_, err = io.CopyN(out, zeros{}, now.Size-n)
	}
	return err
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// writeArchive unpacks an archive. Nothing is written outside of the directory, whatever the archive says and whatever links are there.
func (s *server) writeArchive() (*wire.Result, error) {
	in := &received{from: s.conn}
	s.broken = true
	if err := makeAll(s.path, defaultDirMode); err != nil {
		return nil, err
	}
	dir, err := os.OpenRoot(s.path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	u := &unpacker{dir: dir, owners: s.call.Owners}
	if err := u.unpack(in); err != nil {
		return nil, err
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return nil, err
	}
	s.broken = false
	return &wire.Result{Count: u.files, Bytes: u.bytes}, nil
}

// directory is a directory of an archive.
type directory struct {
	name     string
	mode     fs.FileMode
	modified time.Time
}

type unpacker struct {
	dir          *os.Root
	owners       bool
	files, bytes int64
	// made are the directories of the archive, whose permissions and times are set at the end: they may not permit to write in them.
	made []directory
}

func (u *unpacker) unpack(in io.Reader) error {
	archive := tar.NewReader(in)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
			return &wire.Failure{Kind: wire.BadArchive, Text: err.Error()}
		}
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if name == "" {
			continue
		}
		if !filepath.IsLocal(filepath.FromSlash(h.Name)) {
			return &wire.Failure{Kind: wire.Outside, Path: []byte(h.Name)}
		}
		if err := u.entry(archive, h, name); err != nil {
			return outside(err, name)
		}
		u.files++
	}
	for _, d := range slices.Backward(u.made) {
		if err := u.dir.Chmod(d.name, d.mode); err != nil {
			return err
		}
		if !d.modified.IsZero() {
			if err := u.dir.Chtimes(d.name, d.modified, d.modified); err != nil {
				return err
			}
		}
	}
	return nil
}

func outside(err error, name string) error {
	if strings.Contains(err.Error(), "path escapes") {
		return &wire.Failure{Kind: wire.Outside, Path: []byte(name)}
	}
	return err
}

func (u *unpacker) entry(archive io.Reader, h *tar.Header, name string) error {
	mode := h.FileInfo().Mode()
	if parent := path.Dir(name); parent != "." {
		if err := u.dir.MkdirAll(parent, defaultDirMode); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := u.dir.MkdirAll(name, defaultDirMode); err != nil {
			return err
		}
		u.made = append(u.made, directory{name, mode.Perm() | mode&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky), h.ModTime})
	case tar.TypeReg:
		if err := u.file(archive, name, mode); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := u.clear(name); err != nil {
			return err
		}
		if err := u.dir.Symlink(h.Linkname, name); err != nil {
			return err
		}
	case tar.TypeLink:
		if !filepath.IsLocal(filepath.FromSlash(h.Linkname)) {
			return &wire.Failure{Kind: wire.Outside, Path: []byte(h.Linkname)}
		}
		if err := u.clear(name); err != nil {
			return err
		}
		if err := u.dir.Link(path.Clean(h.Linkname), name); err != nil {
			return err
		}
	default:
		return nil // a device, or what only the archive is about
	}
	if u.owners {
		if err := u.dir.Lchown(name, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeReg && !h.ModTime.IsZero() {
		return u.dir.Chtimes(name, h.ModTime, h.ModTime)
	}
	return nil
}

// clear removes a file, or an empty directory, for another one.
func (u *unpacker) clear(name string) error {
	if err := u.dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// file writes a file, and gives it its name when it is complete.
func (u *unpacker) file(archive io.Reader, name string, mode fs.FileMode) error {
	if st, err := u.dir.Lstat(name); err == nil && st.IsDir() {
		return &fs.PathError{Op: "open", Path: name, Err: unix.EISDIR}
	}
	temporary := path.Join(path.Dir(name), "."+rand.Text()+".fsb")
	f, err := u.dir.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, archive)
	u.bytes += n
	if err == nil {
		err = f.Chmod(mode.Perm() | mode&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky))
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = u.dir.Rename(temporary, name) // a link or a FIFO with the name is not followed and not opened
	}
	if err != nil {
		_ = u.dir.Remove(temporary)
	}
	return err
}
