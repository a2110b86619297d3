package files

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// read sends a file: the answer, and then its bytes.
func (s *server) read() (*wire.Result, error) {
	f, st, err := open(s.path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	about := fileOf(s.path, st)
	if s.call.Match != "" && s.call.Match != about.Etag {
		return nil, &wire.Failure{Kind: wire.Changed}
	}
	offset := s.call.Offset
	if offset < 0 {
		offset = max(st.Size+offset, 0)
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return nil, err
	}
	if err := wire.PutJSON(s.conn, wire.Answer, &wire.Result{File: about}); err != nil {
		return nil, err
	}
	s.broken, s.taken = true, true
	var from io.Reader = f
	if s.call.Length > 0 {
		from = io.LimitReader(f, s.call.Length)
	}
	n, err := send(s.conn, from)
	if err != nil {
		_ = wire.PutJSON(s.conn, wire.Failed, failure(err, s.path))
		return nil, nil //nolint:nilnil // it is answered
	}
	_ = wire.PutJSON(s.conn, wire.End, &wire.Result{Bytes: n})
	return nil, nil //nolint:nilnil // the same
}

// send sends data frames until the end.
func send(w io.Writer, from io.Reader) (n int64, err error) {
	frame := make([]byte, wire.FrameSize)
	for {
		m, err := from.Read(wire.Payload(frame))
		if m > 0 {
			if _, err := w.Write(wire.Framed(frame, wire.Data, m)); err != nil {
				return n, err
			}
			n += int64(m)
		}
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// received reads the data frames of a call, up to the end.
type received struct {
	from   io.Reader
	buffer []byte
	rest   []byte
	end    bool
}

// next reads a frame if nothing is left of the one before. The error is io.EOF at the end.
func (r *received) next() error {
	for len(r.rest) == 0 {
		if r.end {
			return io.EOF
		}
		kind, payload, err := wire.Get(r.from, r.buffer)
		switch {
		case err != nil:
			return errors.Join(io.ErrUnexpectedEOF, err)
		case kind == wire.End:
			r.end = true
		case kind == wire.Data:
			r.buffer, r.rest = payload[:cap(payload)], payload
		default:
			return &wire.Failure{Kind: wire.Invalid, Text: "an unexpected frame"}
		}
	}
	return nil
}

// Read implements io.Reader.
func (r *received) Read(b []byte) (int, error) {
	if err := r.next(); err != nil {
		return 0, err
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// WriteTo implements io.WriterTo: io.Copy writes each frame from where it is.
func (r *received) WriteTo(w io.Writer) (n int64, err error) {
	for {
		if err := r.next(); errors.Is(err, io.EOF) {
			return n, nil
		} else if err != nil {
			return n, err
		}
		m, err := w.Write(r.rest)
		n, r.rest = n+int64(m), r.rest[m:]
		if err != nil {
			return n, err
		}
	}
}

// write writes a file.
func (s *server) write() (*wire.Result, error) {
	in := &received{from: s.conn}
	s.broken = true // until all has arrived
	if s.call.Parents {
		if err := makeAll(filepath.Dir(s.path), defaultDirMode); err != nil {
			return nil, err
		}
	}
	var n int64
	var err error
	if s.call.Append {
		n, err = s.append(in)
	} else {
		n, err = s.replace(in)
	}
	if err != nil {
		return nil, err
	}
	s.broken = !in.end
	result, err := described(s.path, true)
	if result != nil {
		result.Bytes = n
	}
	return result, err
}

func (s *server) append(in *received) (int64, error) {
	flags := unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT
	if s.call.NoReplace {
		flags |= unix.O_EXCL
	}
	mode := uint32(defaultMode)
	if s.call.Mode != nil {
		mode = *s.call.Mode
	}
	f, st, err := open(s.path, flags, mode)
	if err != nil {
		return 0, err
	}
	if s.call.Match != "" && s.call.Match != etag(st) {
		_ = f.Close()
		return 0, &wire.Failure{Kind: wire.Changed}
	}
	n, err := s.copy(f, in)
	return n, errors.Join(err, f.Close())
}

// copy copies all that arrives.
func (s *server) copy(to io.Writer, in io.WriterTo) (int64, error) {
	n, err := in.WriteTo(to)
	if err == nil && s.call.Size != nil && *s.call.Size != n {
		err = &wire.Failure{Kind: wire.Size}
	}
	return n, err
}

// replace writes a new file, and gives it the name of the old one when it is complete.
func (s *server) replace(in *received) (n int64, err error) {
	target, old, err := s.target()
	if err != nil {
		return 0, err
	}
	mode := uint32(defaultMode)
	switch {
	case s.call.Mode != nil:
		mode = *s.call.Mode
	case old != nil:
		mode = old.Mode & 0o7777
	}
	temporary := filepath.Join(filepath.Dir(target), "."+rand.Text()+".fsb")
	fd, err := unix.Open(temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, &fs.PathError{Op: "create", Path: target, Err: err}
	}
	f := os.NewFile(uintptr(fd), temporary)
	defer func() {
		if err != nil {
			_ = os.Remove(temporary)
		}
	}()
	n, err = s.copy(f, in)
	if err == nil {
		err = s.own(f, old)
	}
	if err == nil {
		err = unix.Fchmod(fd, mode) // after the owner, whose change takes bits away
	}
	if err == nil && s.call.Modified != nil {
		err = os.Chtimes(temporary, *s.call.Modified, *s.call.Modified)
	}
	err = errors.Join(err, f.Close())
	if err != nil {
		return n, err
	}
	// What has happened meanwhile counts.
	if again, now, err := s.target(); err != nil || again != target || (old == nil) != (now == nil) || now != nil && s.call.Match != "" && etag(now) != s.call.Match {
		return n, errors.Join(err, &wire.Failure{Kind: wire.Changed})
	}
	flags := uint(0)
	if s.call.NoReplace {
		flags = unix.RENAME_NOREPLACE
	}
	if err = unix.Renameat2(unix.AT_FDCWD, temporary, unix.AT_FDCWD, target, flags); err != nil {
		return n, &fs.PathError{Op: "rename", Path: target, Err: err}
	}
	return n, nil
}

// target returns where the file is that is to be replaced, behind symbolic links, and its state; nil if there is none.
func (s *server) target() (string, *unix.Stat_t, error) {
	target, err := filepath.EvalSymlinks(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		dir, err := filepath.EvalSymlinks(filepath.Dir(s.path))
		if err != nil {
			return "", nil, err
		}
		if _, err := os.Lstat(s.path); err == nil {
			return "", nil, &fs.PathError{Op: "open", Path: s.path, Err: unix.ENOENT} // a symbolic link to nothing
		}
		if s.call.Match != "" {
			return "", nil, &wire.Failure{Kind: wire.Changed}
		}
		return filepath.Join(dir, filepath.Base(s.path)), nil, nil
	}
	if err != nil {
		return "", nil, err
	}
	f, st, err := open(target, unix.O_WRONLY, 0) // as a program would, which needs the right to write
	if err != nil {
		return "", nil, err
	}
	_ = f.Close()
	switch {
	case s.call.NoReplace:
		return "", nil, &fs.PathError{Op: "create", Path: s.path, Err: unix.EEXIST}
	case s.call.Match != "" && s.call.Match != etag(st):
		return "", nil, &wire.Failure{Kind: wire.Changed}
	}
	return target, st, nil
}

// own gives a file its owner: the one that is asked for, or that of the file that it replaces if that is permitted.
func (s *server) own(f *os.File, old *unix.Stat_t) error {
	if s.call.Owner != "" {
		uid, gid, err := ids(s.call.Owner)
		if err != nil {
			return err
		}
		return f.Chown(uid, gid)
	}
	if old != nil {
		_ = f.Chown(int(old.Uid), int(old.Gid))
	}
	return nil
}

// ids returns the ids of user or user:group.
func ids(spec string) (uid, gid int, err error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	unknown := &wire.Failure{Kind: wire.NoUser, Text: "there is no user or group " + strconv.Quote(spec)}
	uid, gid = -1, -1
	if name != "" {
		if uid, err = strconv.Atoi(name); err != nil || uid < 0 {
			u, err := user.Lookup(name)
			if err != nil {
				return 0, 0, unknown
			}
			uid, _ = strconv.Atoi(u.Uid)
			gid, _ = strconv.Atoi(u.Gid)
		}
	}
	if hasGroup {
		if gid, err = strconv.Atoi(group); err != nil || gid < 0 {
			g, err := user.LookupGroup(group)
			if err != nil {
				return 0, 0, unknown
			}
			gid, _ = strconv.Atoi(g.Gid)
		}
	}
	return uid, gid, nil
}
