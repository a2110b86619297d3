package output_test

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/output"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// process duplicates the files, as a process that is started does.
func process(t *testing.T, s *output.Streams) [3]*os.File {
	t.Helper()
	var out [3]*os.File
	for i, f := range s.Files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		require.NoError(t, err)
		out[i] = os.NewFile(uintptr(fd), f.Name())
	}
	s.Started()
	return out
}

func TestLog(t *testing.T) {
	log := filepath.Join(t.TempDir(), "output.log")
	require.NoError(t, os.WriteFile(log, []byte("old\n"), 0o600))
	s, err := output.Open("", log, filepath.Dir(log)+"/./output.log")
	require.NoError(t, err)
	defer s.Close()
	files := process(t, s)
	_, err = files[0].Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "there is no input")
	_, err = files[1].WriteString("out\n")
	require.NoError(t, err)
	require.NoError(t, files[1].Close())
	_, err = files[2].WriteString("err\n") // stderr continues after stdout has ended
	require.NoError(t, err)
	require.NoError(t, files[2].Close())
	s.Drained(t.Context())
	raw, err := os.ReadFile(log)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"old", "out", "err", ""}, strings.Split(string(raw), "\n"))
}

// TestRateIsBounded: a process that prints without end waits.
func TestRateIsBounded(t *testing.T) {
	log := filepath.Join(t.TempDir(), "output.log")
	s, err := output.Open("", log, "")
	require.NoError(t, err)
	files := process(t, s)
	begin := time.Now()
	written := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(files[1], endless{})
		written <- n
	}()
	require.Eventually(t, func() bool {
		info, err := os.Stat(log)
		return err == nil && info.Size() >= output.Burst+output.Rate/4
	}, testkit.Timeout, testkit.Tick)
	info, err := os.Stat(log)
	require.NoError(t, err)
	require.LessOrEqual(t, float64(info.Size()), output.Burst+output.Rate*time.Since(begin).Seconds()+64<<10)
	s.Close()
	require.Positive(t, <-written, "it ends with the streams")
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// TestSizeIsBoundedWithoutAnAgent: a log that takes more than twice its bound is trimmed.
func TestSizeIsBoundedWithoutAnAgent(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "output.log")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "limit"), []byte("262144\n"), 0o600))
	s, err := output.Open("", log, "")
	require.NoError(t, err)
	defer s.Close()
	files := process(t, s)
	_, err = io.CopyN(files[1], endless{}, 6<<20)
	require.NoError(t, err)
	require.NoError(t, files[1].Close())
	s.Drained(t.Context())
	var st unix.Stat_t
	require.NoError(t, unix.Stat(log, &st))
	require.EqualValues(t, 6<<20, st.Size, "offsets keep their meaning")
	require.Less(t, st.Blocks*512, int64(2<<20))
}

// TestDrainEnds although another process holds the streams.
func TestDrainEnds(t *testing.T) {
	s, err := output.Open("", filepath.Join(t.TempDir(), "log"), "")
	require.NoError(t, err)
	files := process(t, s)
	defer files[1].Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	s.Drained(ctx)
	s.Close()
}

func TestFIFO(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
	for _, path := range []string{in, out} {
		require.NoError(t, unix.Mkfifo(path, 0o600))
	}
	s, err := output.Open(in, out, "")
	require.NoError(t, err)
	defer s.Close()
	files := process(t, s)
	client, err := os.OpenFile(in, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = client.WriteString("hello")
	require.NoError(t, err)
	require.NoError(t, client.Close())
	buffer := make([]byte, 5)
	_, err = io.ReadFull(files[0], buffer)
	require.NoError(t, err)
	_, err = files[1].Write(buffer)
	require.NoError(t, err)
	reader, err := os.OpenFile(out, os.O_RDWR, 0)
	require.NoError(t, err)
	defer reader.Close()
	_, err = io.ReadFull(reader, buffer)
	require.NoError(t, err)
	require.Equal(t, "hello", string(buffer))
	s.CloseInput()
	_, err = files[0].Read(buffer)
	require.ErrorIs(t, err, io.EOF)
}

func TestUnknownScheme(t *testing.T) {
	_, err := output.Open("", "binary:///bin/logger", "")
	require.ErrorContains(t, err, "binary")
	_, err = output.Open(filepath.Join(t.TempDir(), "missing"), "", "")
	require.ErrorIs(t, err, os.ErrNotExist)
}

// fifo returns a client's end of a FIFO.
func fifo(t *testing.T, flags int) (string, *os.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return path, f
}

// TestClient: a client reads the output to its end before the streams are closed, and its input ends with CloseInput.
func TestClient(t *testing.T) {
	stdout, reader := fifo(t, os.O_RDONLY)
	stdin, writer := fifo(t, os.O_RDWR)
	s, err := output.Open(stdin, stdout, "")
	require.NoError(t, err)
	defer s.Close()
	files := process(t, s)
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(files[0].Fd()), &st))
	info, err := os.Stat(stdin)
	require.NoError(t, err)
	require.NotEqual(t, info.Sys().(*syscall.Stat_t).Ino, st.Ino, "the process does not have the FIFO")
	_, err = writer.WriteString("typed")
	require.NoError(t, err)
	require.NoError(t, writer.Close())
	s.CloseInput()
	in, err := io.ReadAll(files[0])
	require.NoError(t, err)
	require.Equal(t, "typed", string(in))
	_, err = files[1].WriteString("printed")
	require.NoError(t, err)
	require.NoError(t, files[1].Close())
	out, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "printed", string(out))
}

// TestClientComesLate: what a process has printed waits for its client, which reads it and its end before the streams are closed.
func TestClientComesLate(t *testing.T) {
	stdout := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(stdout, 0o600))
	s, err := output.Open("", stdout, "")
	require.NoError(t, err)
	files := process(t, s)
	_, err = files[1].WriteString("printed")
	require.NoError(t, err)
	require.NoError(t, files[1].Close())
	s.Drained(t.Context())
	reader, err := os.OpenFile(stdout, os.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer reader.Close()
	require.NoError(t, reader.SetReadDeadline(time.Now().Add(testkit.Timeout)))
	out, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "printed", string(out))
	s.Close()
}

// TestCloseEndsInput: streams are closed while their client keeps the input open, and writes more than the process reads.
func TestCloseEndsInput(t *testing.T) {
	stdin, writer := fifo(t, os.O_RDWR)
	s, err := output.Open(stdin, "", "")
	require.NoError(t, err)
	process(t, s)
	go func() { _, _ = io.Copy(writer, endless{}) }()
	s.Close() // it returns
	require.NoError(t, writer.Close())
}

// TestTerminal copies between FIFOs and a terminal.
func TestTerminal(t *testing.T) {
	stdout, reader := fifo(t, os.O_RDONLY)
	stdin, writer := fifo(t, os.O_RDWR)
	s, err := output.OpenTerminal(stdin, stdout)
	require.NoError(t, err)
	defer s.Close()
	require.NoError(t, s.Resize(1, 2), "there is none yet")
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	conn, err := master.SyscallConn()
	require.NoError(t, err)
	slave := -1
	require.NoError(t, conn.Control(func(fd uintptr) {
		require.NoError(t, unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0))
		peer, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY)
		require.Zero(t, errno)
		slave = int(peer)
	}))
	tty := os.NewFile(uintptr(slave), "tty")
	s.Attach(master)
	require.NoError(t, s.Resize(21, 55))
	size, err := unix.IoctlGetWinsize(slave, unix.TIOCGWINSZ)
	require.NoError(t, err)
	require.Equal(t, unix.Winsize{Row: 21, Col: 55}, *size)
	_, err = writer.WriteString("typed\n")
	require.NoError(t, err)
	line := make([]byte, 16)
	n, err := tty.Read(line)
	require.NoError(t, err)
	require.Equal(t, "typed\n", string(line[:n]))
	_, err = tty.WriteString("printed\n")
	require.NoError(t, err)
	require.NoError(t, tty.Close())
	s.Drained(t.Context())
	out, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "typed\r\nprinted\r\n", string(out), "with its echo")
}
