// Package output copies the output of containers to where containerd wants it: to a log file, at a bounded rate and keeping a bounded part, or
// to the FIFO of a client, as fast as that reads.
package output

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

// A container can print Rate bytes a second to its log, and Burst bytes at once. One that prints more waits: otherwise its output would take
// the disk and the processors from others.
const (
	Rate  = 4 << 20
	Burst = 16 << 20
	// trimEvery is how many bytes are written between two checks of the size.
	trimEvery = 1 << 20
	chunk     = 32 << 10
	// arrival is how often a client is looked for that opens its FIFO after the last output.
	arrival = 10 * time.Millisecond
)

var buffers = sync.Pool{New: func() any { return new([chunk]byte) }} //nolint:gochecknoglobals // a cache

// Streams are the standard streams of a process. Files are for the process; once it has them, call Started.
type Streams struct {
	// Files are stdin, stdout and stderr.
	Files [3]*os.File

	ours    []io.Closer
	copies  sync.WaitGroup // of the output
	feeding sync.WaitGroup // of the input
	cancel  context.CancelFunc
	ctx     context.Context //nolint:containedctx // of the copies
	targets [2]target
	input   input
	master  *os.File // of a terminal; nil without one
}

// target is one stream of the process's output: a pipe, or the master of its terminal, and a log or a client's FIFO.
type target struct {
	pipe *os.File
	to   *os.File
	// reader keeps a FIFO readable while there is something to write and no client reads it; nil for a log.
	reader *os.File
}

// Open opens the streams of a process: a path that is empty is /dev/null, a regular file gets what is printed appended, and a FIFO is a
// client's. The caller calls Close in any case.
func Open(stdin, stdout, stderr string) (s *Streams, err error) {
	s = &Streams{}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := s.openInput(stdin); err != nil {
		return s, err
	}
	for i, path := range []string{stdout, stderr} {
		if path == "" {
			if s.Files[i+1], err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
				return s, err
			}
			continue
		}
		if err := s.openTarget(i, path); err != nil {
			return s, fmt.Errorf("opening the output %s: %w", path, err)
		}
		if s.Files[i+1], s.targets[i].pipe, err = s.pipe(false); err != nil {
			return s, err
		}
	}
	return s, nil
}

// pipe returns a pipe's end for the process, which blocks, as programs expect it, and ours.
func (s *Streams) pipe(toProcess bool) (process, ours *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	if toProcess {
		fds[0], fds[1] = fds[1], fds[0]
	}
	process = os.NewFile(uintptr(fds[1]), "pipe")
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, errors.Join(err, process.Close(), unix.Close(fds[0]))
	}
	ours = os.NewFile(uintptr(fds[0]), "pipe")
	s.ours = append(s.ours, ours)
	return process, ours, nil
}

// openTarget opens where the output goes. It never waits for a client.
func (s *Streams) openTarget(i int, path string) error {
	if scheme, rest, ok := strings.Cut(path, "://"); ok {
		if scheme != "file" && scheme != "fifo" {
			return fmt.Errorf("output to %s: %w", scheme, errors.ErrUnsupported)
		}
		path = rest
	}
	t := &s.targets[i]
	flags := os.O_WRONLY | os.O_APPEND | os.O_CREATE
	if isFIFO(path) {
		flags = os.O_WRONLY | syscall.O_NONBLOCK
		reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		t.reader = reader
		s.ours = append(s.ours, reader)
	}
	to, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return err
	}
	t.to = to
	s.ours = append(s.ours, to)
	return nil
}

// Chown makes a user and group of the host the owner of the pipes and the FIFO that the process has, so that it can open them by name.
func (s *Streams) Chown(id int) error {
	for _, f := range s.Files {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if info.Mode()&os.ModeNamedPipe == 0 {
			continue
		}
		if err := f.Chown(id, id); err != nil {
			return err
		}
	}
	return nil
}

func isFIFO(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&os.ModeNamedPipe != 0
}

// Started begins the copies: the process has the files.
func (s *Streams) Started() {
	for _, f := range s.Files {
		_ = f.Close()
	}
	s.feed()
	limit := rate.NewLimiter(Rate, Burst) // of both streams
	for _, t := range s.targets {
		if t.pipe == nil {
			continue
		}
		s.copies.Go(func() { s.copy(t, limit) })
	}
}

func (s *Streams) copy(t target, limit *rate.Limiter) {
	defer s.end(t)
	trim := trimmer(t.to)
	conn, err := t.pipe.SyscallConn()
	if err != nil {
		return
	}
	for written := int64(0); ; {
		// A buffer is taken when there is something to read: most containers print nothing most of the time.
		ready := false
		if err := conn.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, _ := unix.Poll(fds, 0)
			ready = n > 0
			return ready
		}); err != nil {
			return
		}
		buffer := buffers.Get().(*[chunk]byte)
		n, readErr := t.pipe.Read(buffer[:])
		if n > 0 {
			_, _ = t.to.Write(buffer[:n]) // a full disk loses output, and does not stop the process
			written += int64(n)
		}
		buffers.Put(buffer)
		if readErr != nil {
			return
		}
		if t.reader != nil {
			continue
		}
		if written >= trimEvery {
			trim()
			written = 0
		}
		if limit.WaitN(s.ctx, n) != nil {
			return
		}
	}
}

// end ends the output for the client that reads it. The FIFO of one that has not come yet keeps what was written until it comes, or until Close.
func (s *Streams) end(t target) {
	if t.reader == nil {
		return
	}
	_ = t.reader.Close()
	if t.read() {
		_ = t.to.Close()
		return
	}
	go func() {
		ticker := time.NewTicker(arrival)
		defer ticker.Stop()
		for !t.read() { // the kernel has no event for this
			select {
			case <-ticker.C:
			case <-s.ctx.Done():
				return
			}
		}
		_ = t.to.Close()
	}()
}

// read reports whether a client has opened the FIFO.
func (t target) read() bool {
	conn, err := t.to.SyscallConn()
	if err != nil {
		return false
	}
	read := false
	_ = conn.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		n, _ := unix.Poll(fds, 0) // POLLERR if it has no reader
		read = n == 0
	})
	return read
}

// trimmer returns what frees the oldest part of a log that takes more than twice its bound: its agent, which trims it to the bound, does not
// run then.
func trimmer(log *os.File) func() {
	raw, err := os.ReadFile(filepath.Join(filepath.Dir(log.Name()), node.LimitFile))
	bound, parseErr := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	if err != nil || parseErr != nil || bound <= 0 {
		return func() {}
	}
	writable, err := os.OpenFile(log.Name(), os.O_RDWR, 0)
	if err != nil {
		return func() {}
	}
	_ = writable.Close()
	return func() {
		var st unix.Stat_t
		if err := unix.Fstat(int(log.Fd()), &st); err == nil && st.Blocks*512 > 2*bound {
			_, _ = node.TrimLog(log, st.Size, bound)
		}
	}
}

// Drained is called when the process has ended. It returns when all of its output is copied, or when ctx ends: what else holds the streams may
// not end.
func (s *Streams) Drained(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.copies.Wait()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.Close()
		<-done
	}
}

// Close releases everything. Safe to repeat.
func (s *Streams) Close() {
	s.cancel()
	for _, f := range s.Files {
		if f != nil {
			_ = f.Close()
		}
	}
	for _, c := range s.ours {
		_ = c.Close()
	}
	s.feeding.Wait()
}
