package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// maxWatched bounds the directories of one watch. The kernel has a bound for the user, too.
const maxWatched = 8192

const watchMask = unix.IN_CREATE | unix.IN_CLOSE_WRITE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB | unix.IN_DELETE_SELF |
	unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK

// watch sends changes until the agent closes the connection, or the directory is gone.
func (s *server) watch() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return &fs.PathError{Op: "watch", Path: s.path, Err: err}
	}
	w := &watcher{file: os.NewFile(uintptr(fd), "inotify"), fd: fd, root: s.path, recursive: s.call.Recursive, dirs: map[int32]string{}, out: s.conn}
	defer w.file.Close()
	if err := w.add(s.path, false); err != nil {
		return err
	}
	if err := wire.PutJSON(s.conn, wire.Answer, &wire.Result{}); err != nil {
		return err
	}
	s.broken, s.taken = true, true
	// The agent sends nothing more: when it closes its side, the watch ends.
	go func() {
		_, _ = io.Copy(io.Discard, s.conn)
		_ = w.file.Close()
	}()
	if err := w.send("started", "", true); err != nil {
		return nil // the agent is gone
	}
	if err := w.run(); err != nil {
		_ = wire.PutJSON(s.conn, wire.Failed, failure(err, s.path))
	}
	return nil
}

type watcher struct {
	file      *os.File
	fd        int
	root      string
	recursive bool
	dirs      map[int32]string
	out       io.Writer
}

// add watches a directory and, if the watch is recursive, those in it. announce sends what is in it already: it was made before it was watched.
func (w *watcher) add(dir string, announce bool) error {
	if len(w.dirs) >= maxWatched {
		return w.send("overflow", dir, true)
	}
	d, err := unix.InotifyAddWatch(w.fd, dir, watchMask)
	if err != nil {
		if dir != w.root {
			if err == unix.ENOSPC { //nolint:errorlint // system calls return it unwrapped
				return w.send("overflow", dir, true)
			}
			return nil // it is gone, or may not be read
		}
		return &fs.PathError{Op: "watch", Path: dir, Err: err}
	}
	w.dirs[int32(d)] = dir
	if !w.recursive {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil && dir == w.root {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if announce {
			if err := w.send("created", path, e.IsDir()); err != nil {
				return err
			}
		}
		if e.IsDir() {
			if err := w.add(path, announce); err != nil {
				return err
			}
		}
	}
	return nil
}

// run sends changes until the directory is gone, or the agent.
func (w *watcher) run() error {
	buffer := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buffer)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		for b := buffer[:n]; len(b) >= unix.SizeofInotifyEvent; {
			d, mask := int32(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint32(b[4:])
			length := int(binary.NativeEndian.Uint32(b[12:]))
			name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+length], []byte{0})
			b = b[unix.SizeofInotifyEvent+length:]
			if gone, err := w.event(d, mask, string(name)); gone || err != nil {
				return err
			}
		}
	}
}

// event sends one change. gone: the directory that is watched is not there any longer.
func (w *watcher) event(d int32, mask uint32, name string) (gone bool, err error) {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return false, w.send("overflow", w.root, true)
	}
	dir, known := w.dirs[d]
	switch {
	case mask&unix.IN_IGNORED != 0:
		delete(w.dirs, d)
		return known && dir == w.root, nil
	case !known:
		return false, nil
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		if dir == w.root {
			return true, w.send("removed", dir, true)
		}
		return false, nil
	case name == "":
		return false, nil
	}
	path, isDir := filepath.Join(dir, name), mask&unix.IN_ISDIR != 0
	kind := ""
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		kind = "created"
	case mask&unix.IN_CLOSE_WRITE != 0:
		kind = "written"
	case mask&unix.IN_DELETE != 0:
		kind = "removed"
	case mask&unix.IN_MOVED_FROM != 0:
		kind = "moved"
		w.forget(path)
	case mask&unix.IN_ATTRIB != 0:
		kind = "attributes"
	default:
		return false, nil
	}
	if err := w.send(kind, path, isDir); err != nil {
		return false, err
	}
	if kind == "created" && isDir && w.recursive {
		return false, w.add(path, true)
	}
	return false, nil
}

// forget ends the watches of a directory that was moved away.
func (w *watcher) forget(dir string) {
	for d, path := range w.dirs {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			_, _ = unix.InotifyRmWatch(w.fd, uint32(d))
			delete(w.dirs, d)
		}
	}
}

func (w *watcher) send(kind, path string, isDir bool) error {
	return wire.PutJSON(w.out, wire.Data, &wire.Event{Kind: kind, Path: []byte(path), Directory: isDir})
}
