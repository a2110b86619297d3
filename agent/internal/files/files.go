// Package files is the helper of a sandbox: a process in it that reads and writes files, and connects to ports, as one of its users. It has no other
// privileges than any program of that user, so that the sandbox decides what it may do. A path never makes it wait: it opens nothing that
// blocks.
package files

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// maxPath is the longest path that the kernel takes.
const maxPath = unix.PathMax - 1

// Serve serves the calls of one connection, one after another, until the agent closes it. Relative paths are in home.
func Serve(conn *net.UnixConn, home string) {
	defer conn.Close()
	_ = conn.SetWriteBuffer(wire.Buffer) // at most what the node permits
	if wire.Put(conn, wire.Ready, nil) != nil {
		return
	}
	for {
		kind, payload, err := wire.Get(conn, nil)
		if err != nil || kind != wire.Request {
			return
		}
		var call wire.Call
		if err := json.Unmarshal(payload, &call); err != nil {
			return
		}
		if !serve(conn, &call, home) {
			return
		}
	}
}

// serve serves a call. It reports whether another one may follow.
func serve(conn *net.UnixConn, c *wire.Call, home string) bool {
	s := &server{conn: conn, call: c, home: home}
	result, err := s.do()
	if err != nil {
		return wire.PutJSON(conn, wire.Failed, failure(err, s.path)) == nil && !s.broken
	}
	if s.taken {
		return false
	}
	return wire.PutJSON(conn, wire.Answer, result) == nil && !s.broken
}

// server is one call.
type server struct {
	conn *net.UnixConn
	call *wire.Call
	home string
	path string
	// broken: there may be data of the call on the connection. taken: the connection is used for something else now.
	broken, taken bool
}

func (s *server) do() (*wire.Result, error) {
	if s.call.Op == wire.Dial {
		return nil, s.dial()
	}
	var err error
	if s.path, err = s.clean(s.call.Path); err != nil {
		return nil, err
	}
	switch s.call.Op {
	case wire.Stat:
		return described(s.path, s.call.Follow)
	case wire.List:
		return s.list()
	case wire.MakeDir:
		return s.makeDir()
	case wire.Move:
		return s.move()
	case wire.Remove:
		return s.remove()
	case wire.Read:
		return s.read()
	case wire.Write:
		return s.write()
	case wire.Watch:
		return nil, s.watch()
	case wire.ReadArchive:
		return s.readArchive()
	case wire.WriteArchive:
		return s.writeArchive()
	}
	return nil, &wire.Failure{Kind: wire.Invalid, Text: "an operation of a later version"}
}

// clean returns an absolute path. A relative one is in the home directory.
func (s *server) clean(raw []byte) (string, error) {
	path := string(raw)
	if path == "" || len(path) > maxPath || strings.IndexByte(path, 0) >= 0 {
		return "", &wire.Failure{Kind: wire.Invalid, Path: raw[:min(len(raw), 64)], Text: "an empty or too long path, or one with a zero byte"}
	}
	if path == "~" || strings.HasPrefix(path, "~/") {
		path = path[1:]
		path = strings.TrimPrefix(path, "/")
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join("/", s.home, path)
	}
	return filepath.Clean(path), nil
}

// failure describes an error.
func failure(err error, path string) *wire.Failure {
	if f, ok := errors.AsType[*wire.Failure](err); ok {
		if f.Path == nil {
			f.Path = []byte(path)
		}
		return f
	}
	f := &wire.Failure{Path: []byte(path), Text: err.Error()}
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		f.Path = []byte(p.Path)
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		f.Errno = errno
	}
	return f
}

// described returns the description of a file.
func described(path string, follow bool) (*wire.Result, error) {
	f, err := describe(path, follow)
	if err != nil {
		return nil, err
	}
	return &wire.Result{File: f}, nil
}

func describe(path string, follow bool) (*wire.File, error) {
	var st unix.Stat_t
	flags := unix.AT_SYMLINK_NOFOLLOW
	if follow {
		flags = 0
	}
	if err := unix.Fstatat(unix.AT_FDCWD, path, &st, flags); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	f := fileOf(path, &st)
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		if target, err := os.Readlink(path); err == nil {
			f.Target = []byte(target)
		}
	}
	return f, nil
}

func fileOf(path string, st *unix.Stat_t) *wire.File {
	return &wire.File{
		Path: []byte(path), Mode: st.Mode, Size: st.Size, UID: st.Uid, GID: st.Gid, Modified: time.Unix(st.Mtim.Unix()), Etag: etag(st),
	}
}

// etag changes with every change of a file that a program could make without meaning to hide it.
func etag(st *unix.Stat_t) string {
	const digits = "0123456789abcdefghijklmnopqrstuvwxyz"
	text := func(n uint64) string {
		var b []byte
		for ; n > 0 || len(b) == 0; n /= 36 {
			b = append(b, digits[n%36])
		}
		return string(b)
	}
	return text(st.Ino) + "-" + text(uint64(st.Size)) + "-" + text(uint64(st.Mtim.Nano())) + "-" + text(uint64(st.Ctim.Nano()))
}

// open opens a regular file, and refuses all others without waiting for them.
func open(path string, flags int, mode uint32) (*os.File, *unix.Stat_t, error) {
	fail := func(err error) (*os.File, *unix.Stat_t, error) {
		return nil, nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: uint64(flags) | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC, Mode: uint64(mode), Resolve: unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case err == unix.ENXIO, err == unix.ENODEV:
		return nil, nil, &wire.Failure{Kind: wire.NotRegular, Path: []byte(path)}
	case err != nil:
		return fail(err)
	}
	var st unix.Stat_t
	if err := regular(fd, &st); err != nil {
		_ = unix.Close(fd)
		if f, ok := errors.AsType[*wire.Failure](err); ok {
			f.Path = []byte(path)
			return nil, nil, f
		}
		return fail(err)
	}
	return os.NewFile(uintptr(fd), path), &st, nil
}

// regular refuses what is no regular file, and what the kernel makes up.
func regular(fd int, st *unix.Stat_t) error {
	if err := unix.Fstat(fd, st); err != nil {
		return err
	}
	var system unix.Statfs_t
	if err := unix.Fstatfs(fd, &system); err != nil {
		return err
	}
	switch int64(system.Type) { //nolint:unconvert // it is smaller on some machines
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC:
		return &wire.Failure{Kind: wire.NotRegular, Text: "a file of the kernel"}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.EISDIR
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return &wire.Failure{Kind: wire.NotRegular}
	}
	return nil
}
