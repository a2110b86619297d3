package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/utils/clock"
)

const (
	chunkSize = 32 << 10
	// lookInterval is how often a follower looks by itself, for changes that no event has announced.
	lookInterval = time.Second
)

// Options select a part of a log.
type Options struct {
	// Follow continues with what is written later.
	Follow bool
	// Tail, if not negative, is the number of last lines to begin with.
	Tail int64
	// Since, if not zero, skips what was written before, at the index's resolution; it never skips more.
	Since time.Time
}

// Read sends a log in pieces of at most 32 KiB. Without Follow it ends at the end of the file; with Follow when ended is
// closed and all that was written has been sent, or when ctx ends (its error). An error of send ends it too. NotFound: there
// is no such log.
func (s *Store) Read(ctx context.Context, id string, o Options, ended <-chan struct{}, send func([]byte) error) error {
	dir, err := s.dir(id)
	if err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(dir, outputName))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("log of %s: %w", id, errdefs.ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("opening the log of %s: %w", id, err)
	}
	defer f.Close()
	start, err := begin(f, dir, o)
	if err != nil {
		return fmt.Errorf("reading the log of %s: %w", id, err)
	}
	r := &reader{file: f, offset: start, send: send}
	if o.Follow {
		err = r.follow(ctx, s.watcher, s.config.Clock, ended)
	} else {
		err = r.drain(ctx)
	}
	if err != nil {
		return fmt.Errorf("reading the log of %s: %w", id, err)
	}
	return nil
}

// begin returns the offset at which the selected part begins.
func begin(f *os.File, dir string, o Options) (int64, error) {
	start, err := lineAfterHole(f, 0)
	if err != nil {
		return 0, err
	}
	if !o.Since.IsZero() {
		entries, err := readIndex(dir)
		if err != nil {
			return 0, err
		}
		info, err := f.Stat()
		if err != nil {
			return 0, err
		}
		var since int64
		for _, e := range entries {
			// After a crash of the node the index may know of output that the file has lost.
			if e.at.After(o.Since) || e.offset > info.Size() {
				break
			}
			since = e.offset
		}
		if since, err = lines(f, start, since, 0); err != nil {
			return 0, err
		}
		start = max(start, since)
	}
	if o.Tail >= 0 {
		info, err := f.Stat()
		if err != nil {
			return 0, err
		}
		if o.Tail == 0 {
			return info.Size(), nil
		}
		tail, err := lines(f, start, info.Size(), o.Tail)
		if err != nil {
			return 0, err
		}
		start = max(start, tail)
	}
	return start, nil
}

// lines returns the beginning of the n-th line before end, at least start; with n = 0 the beginning of the line that end is
// in.
func lines(f *os.File, start, end, n int64) (int64, error) {
	buf := make([]byte, chunkSize)
	seen := int64(0)
	if n > 0 && end > start {
		// A newline at the end belongs to the last line.
		end--
	}
	for end > start {
		size := min(int64(len(buf)), end-start)
		if _, err := f.ReadAt(buf[:size], end-size); err != nil {
			return 0, err
		}
		for i := size - 1; i >= 0; i-- {
			if buf[i] != '\n' {
				continue
			}
			if seen++; seen >= n {
				return end - size + i + 1, nil
			}
		}
		end -= size
	}
	return start, nil
}

// lineAfterHole returns off if there is data at off, otherwise the beginning of the first whole line after the hole.
func lineAfterHole(f *os.File, off int64) (int64, error) {
	data, err := dataStart(f, off)
	if err != nil || data == off {
		return off, err
	}
	buf := make([]byte, chunkSize)
	n, err := f.ReadAt(buf, data)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	if i := bytes.IndexByte(buf[:n], '\n'); i >= 0 {
		return data + int64(i) + 1, nil
	}
	return data, nil
}

type reader struct {
	file   *os.File
	offset int64
	send   func([]byte) error
}

// drain sends what the file has. What was freed while it was being read is not sent: it may have been read as zeros.
func (r *reader) drain(ctx context.Context) error {
	buf := make([]byte, chunkSize)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := r.file.ReadAt(buf, r.offset)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			return nil
		}
		next, err := lineAfterHole(r.file, r.offset)
		if err != nil {
			return err
		}
		if next != r.offset {
			r.offset = next
			continue
		}
		if err := r.send(buf[:n]); err != nil {
			return err
		}
		r.offset += int64(n)
	}
}

func (r *reader) follow(ctx context.Context, w *watcher, c clock.WithTicker, ended <-chan struct{}) error {
	// If the file was removed, ended is closed or will be, and the open file has all that was written.
	changed, stop := w.follow(r.file.Name())
	defer stop()
	look := c.NewTicker(lookInterval)
	defer look.Stop()
	for {
		// ended is checked first: all that was written before it can then be read.
		over := false
		select {
		case <-ended:
			over = true
		default:
		}
		if err := r.drain(ctx); err != nil || over {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ended:
		case <-changed:
		case <-look.C():
		}
	}
}
