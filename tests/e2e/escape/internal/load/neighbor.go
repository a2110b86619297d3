package load

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
)

const (
	// samplePause is the time between two samples, so that the neighbor itself is no load.
	samplePause = 25 * time.Millisecond
	// syncEvery is how many samples pass from one that waits for the disk to the next.
	syncEvery = 20
	// workBytes are hashed, written and read in each sample.
	workBytes = 256 << 10
	// hashRounds is how often they are hashed, so that the work takes milliseconds and its time is not that of a wake-up alone.
	hashRounds = 16
)

// offer has what other sandboxes look for: a port and an abstract socket, its arguments, and shared memory. What it returns removes that.
func offer(ctx context.Context, e *attack.Env, args []string) (net.Addr, func(), error) {
	if len(args) != 2 {
		return nil, nil, fmt.Errorf("offering: want a port and a name, have %q", args)
	}
	var listen net.ListenConfig
	port, err := listen.Listen(ctx, "tcp", ":"+args[0])
	if err != nil {
		return nil, nil, fmt.Errorf("offering a port: %w", err)
	}
	abstract, err := listen.Listen(ctx, "unix", "@"+args[1])
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("offering a socket: %w", err), port.Close())
	}
	id, shmErr := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, 0o666)
	var serving sync.WaitGroup
	serving.Go(func() { serve(port, func(c net.Conn) { _, _ = io.Copy(c, c) }) })
	serving.Go(func() { serve(abstract, func(c net.Conn) { _, _ = io.WriteString(c, e.Secret) }) })
	return port.Addr(), func() {
		_, _ = port.Close(), abstract.Close()
		serving.Wait()
		if shmErr == nil {
			_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
		}
	}, nil
}

// roommate only offers.
func roommate(ctx context.Context, _ *output, e *attack.Env, args []string) (int64, error) {
	_, stop, err := offer(ctx, e, args)
	if err != nil {
		return 0, err
	}
	defer stop()
	<-ctx.Done()
	return 0, nil
}

// neighbor is the sandbox that must not suffer. It offers what a roommate does, and measures a fixed piece of work again and again: it
// computes, writes and reads a file, and makes a round trip on its own network.
func neighbor(ctx context.Context, o *output, e *attack.Env, args []string) (int64, error) {
	echo, stop, err := offer(ctx, e, args)
	if err != nil {
		return 0, err
	}
	defer stop()
	w, err := newWork(echo)
	if err != nil {
		return 0, err
	}
	defer w.close()
	var n int64
	for ; wait(ctx, samplePause); n++ {
		l := Line{Kind: KindSample}
		if l.Micros, l.SyncMicros, err = w.sample(n%syncEvery == 0); err != nil {
			return n, err
		}
		o.line(l)
	}
	return n, nil
}

func serve(l net.Listener, answer func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(time.Hour))
			answer(conn)
		}()
	}
}

// work is a fixed piece of work.
type work struct {
	conn net.Conn
	dir  string
	data []byte
}

func newWork(echo net.Addr) (*work, error) {
	dir, err := os.MkdirTemp("", "work-")
	if err != nil {
		return nil, fmt.Errorf("making a directory: %w", err)
	}
	_, port, _ := net.SplitHostPort(echo.String())
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		return nil, fmt.Errorf("connecting to itself: %w", err)
	}
	return &work{conn, dir, make([]byte, workBytes)}, nil
}

func (w *work) close() {
	_ = w.conn.Close()
	_ = os.RemoveAll(w.dir)
}

// sample does the work once and returns its time; with sync also the time of a small write that waits for the disk.
func (w *work) sample(sync bool) (micros, syncMicros int64, err error) {
	begin := time.Now()
	var sum [sha256.Size]byte
	for range hashRounds {
		sum = sha256.Sum256(w.data)
		copy(w.data, sum[:])
	}
	path := filepath.Join(w.dir, "file")
	if err := os.WriteFile(path, w.data, 0o600); err != nil {
		return 0, 0, err
	}
	if _, err := os.ReadFile(path); err != nil {
		return 0, 0, err
	}
	if err := os.Remove(path); err != nil {
		return 0, 0, err
	}
	message := sum[:]
	if _, err := w.conn.Write(message); err != nil {
		return 0, 0, err
	}
	if _, err := io.ReadFull(w.conn, message); err != nil {
		return 0, 0, err
	}
	micros = time.Since(begin).Microseconds()
	if !sync {
		return micros, 0, nil
	}
	begin = time.Now()
	f, err := os.Create(filepath.Join(w.dir, "synced"))
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = f.Close() }()
	if _, err := f.Write(sum[:]); err != nil {
		return 0, 0, err
	}
	err = f.Sync()
	return micros, max(time.Since(begin).Microseconds(), 1), err
}
