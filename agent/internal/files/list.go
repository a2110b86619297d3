package files

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

const (
	defaultLimit = 1000
	maxDepth     = 64
)

// list lists a directory, in the order of paths, where what is in a directory follows it.
func (s *server) list() (*wire.Result, error) {
	limit := s.call.Limit
	if limit <= 0 {
		limit = defaultLimit
	}
	l := &lister{after: string(s.call.After), limit: limit}
	st, err := os.Stat(s.path)
	switch {
	case err != nil:
		return nil, err
	case !st.IsDir():
		return nil, &fs.PathError{Op: "list", Path: s.path, Err: unix.ENOTDIR}
	}
	if err := l.walk(s.path, min(max(s.call.Depth, 1), maxDepth)); err != nil {
		return nil, err
	}
	return &wire.Result{Files: l.files, More: l.more}, nil
}

type lister struct {
	after string
	limit int
	files []wire.File
	more  bool
}

// walk adds what is in a directory. What disappears meanwhile, and directories below the first one that may not be read, are left out.
func (l *lister) walk(dir string, depth int) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	names, err := d.Readdirnames(-1)
	_ = d.Close()
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		path := filepath.Join(dir, name)
		deeper := depth > 1 && (l.after == "" || compare(l.after, path) <= 0 || strings.HasPrefix(l.after, path+"/"))
		f, err := describe(path, false)
		if err != nil {
			continue
		}
		if l.after == "" || compare(path, l.after) > 0 {
			if len(l.files) == l.limit {
				l.more = true
				return nil
			}
			l.files = append(l.files, *f)
		}
		if deeper && f.Mode&unix.S_IFMT == unix.S_IFDIR {
			_ = l.walk(path, depth-1)
		}
		if l.more {
			return nil
		}
	}
	return nil
}

// compare orders paths as walk does: by their parts.
func compare(a, b string) int {
	return bytes.Compare(bytes.ReplaceAll([]byte(a), []byte("/"), []byte{0}), bytes.ReplaceAll([]byte(b), []byte("/"), []byte{0}))
}
