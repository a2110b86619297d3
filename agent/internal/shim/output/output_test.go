package output_test

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
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
