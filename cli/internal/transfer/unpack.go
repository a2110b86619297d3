package transfer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// unpacker unpacks an archive in a directory. Symbolic links are made last, so that no entry is written through one of the archive, and those that lead
// outside are not made.
type unpacker struct {
	root   *os.Root
	prefix string
	fresh  bool // the directory itself was made for the copy
	warn   func(string, ...any)

	made  []made // directories, in the order of their creation
	links []link
}

// made is a directory that was made, with what it gets at the end: its permissions may not allow to write in it.
type made struct {
	name     string
	mode     fs.FileMode
	modified time.Time
}

type link struct{ name, target string }

func (u *unpacker) unpack(in io.Reader) error {
	archive := tar.NewReader(in)
	for {
		h, err := archive.Next()
		switch {
		case errors.Is(err, io.EOF):
			return u.finish()
		case errors.Is(err, tar.ErrHeader), errors.Is(err, io.ErrUnexpectedEOF):
			return damaged()
		case err != nil:
			return err
		case h.Typeflag == tar.TypeXGlobalHeader:
			continue
		}
		name, err := u.local(h)
		if err != nil {
			return err
		}
		if err := u.entry(archive, h, name); err != nil {
			return u.explain(h.Name, err)
		}
	}
}

// local returns the name of an entry in the destination; "." for the directory itself.
func (u *unpacker) local(h *tar.Header) (string, error) {
	switch {
	case path.IsAbs(h.Name):
		return "", unsafe("the archive of the sandbox has an entry with an absolute path: %q", h.Name)
	case slices.Contains(strings.Split(h.Name, "/"), ".."):
		return "", unsafe("the archive of the sandbox has an entry that leads out of the destination: %q", h.Name)
	}
	name := path.Clean(h.Name)
	if u.prefix != "." {
		rest, ok := strings.CutPrefix(name+"/", u.prefix+"/")
		if !ok {
			return "", unsafe("the archive of the sandbox has an entry that was not asked for: %q", h.Name)
		}
		name = path.Clean(rest)
	}
	if what := unsupported(h, name); what != "" {
		return "", unsafe("the archive of the sandbox has an entry that %s: %q", what, h.Name)
	}
	return name, nil
}

// unsupported returns what an entry is if it is no file, directory or symbolic link.
func unsupported(h *tar.Header, name string) string {
	switch h.Typeflag {
	case tar.TypeDir:
		return ""
	case tar.TypeReg, tar.TypeSymlink:
		if name == "." {
			return "is not the directory which was asked for"
		}
		return ""
	case tar.TypeChar, tar.TypeBlock:
		return "is a device"
	case tar.TypeFifo:
		return "is a FIFO"
	case tar.TypeLink:
		return "is a hard link"
	default:
		return fmt.Sprintf("has the unknown type %q", h.Typeflag)
	}
}

// explain gives the error of an entry its name.
func (u *unpacker) explain(name string, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return damaged()
	}
	if escapes(err) {
		return unsafe("the archive of the sandbox has an entry that leads out of the destination by a symbolic link: %q", name)
	}
	return fmt.Errorf("unpacking %q: %w", name, err)
}

func damaged() error { return unsafe("the archive that the sandbox has sent is damaged or cut off") }

// escapes reports whether an operation of os.Root was refused because it leads outside; the package has no error value for that.
func escapes(err error) bool { return err != nil && strings.Contains(err.Error(), "path escapes") }

func (u *unpacker) entry(archive io.Reader, h *tar.Header, name string) error {
	mode := h.FileInfo().Mode()
	if name == "." {
		if u.fresh {
			u.made = append(u.made, made{name, mode.Perm(), h.ModTime})
		}
		return nil
	}
	if parent := path.Dir(name); parent != "." {
		if err := u.root.MkdirAll(parent, 0o755); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(made{name, mode.Perm(), h.ModTime})
	case tar.TypeSymlink:
		u.links = append(u.links, link{name, h.Linkname})
		return nil
	}
	if st, err := u.root.Lstat(name); err == nil && st.IsDir() {
		return conflict("it exists and is a directory")
	}
	return replaceIn(u.root, name, mode, h.ModTime, archive)
}

// directory makes a directory. One that exists keeps its permissions.
func (u *unpacker) directory(d made) error {
	err := u.root.Mkdir(d.name, 0o700)
	if !errors.Is(err, fs.ErrExist) {
		u.made = append(u.made, d)
		return err
	}
	st, err := u.root.Stat(d.name)
	if err == nil && !st.IsDir() {
		return conflict("it exists and is not a directory")
	}
	return err
}

// finish makes the links, and gives directories their permissions and times, those in others first.
func (u *unpacker) finish() error {
	for _, l := range u.links {
		if err := u.link(l); err != nil {
			return u.explain(l.name, err)
		}
	}
	// A link may lead outside by way of others, so that all of them have to be there.
	for _, l := range u.links {
		if _, err := u.root.Stat(l.name); escapes(err) {
			if err := u.root.Remove(l.name); err != nil {
				return err
			}
			u.outside(l)
		}
	}
	for _, d := range slices.Backward(u.made) {
		if err := u.root.Chmod(d.name, d.mode); err != nil {
			return err
		}
		if err := u.root.Chtimes(d.name, d.modified, d.modified); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) outside(l link) {
	u.warn("the symbolic link %q is not copied: it leads out of the copy, to %q", l.name, l.target)
}

func (u *unpacker) link(l link) error {
	if !filepath.IsLocal(path.Join(path.Dir(l.name), l.target)) || path.IsAbs(l.target) {
		u.outside(l)
		return nil
	}
	st, err := u.root.Lstat(l.name)
	switch {
	case err == nil && st.IsDir():
		return conflict("it exists and is a directory")
	case err == nil:
		if err := u.root.Remove(l.name); err != nil {
			return err
		}
	}
	return u.root.Symlink(l.target, l.name)
}
