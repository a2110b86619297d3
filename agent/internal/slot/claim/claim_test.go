package claim_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// slot is the slot's end of the connection, played by a test.
type slot struct {
	t    *testing.T
	conn *net.UnixConn
}

// serve runs play with the first connection to a socket, and waits for it at the end of the test.
func serve(t *testing.T, path string, play func(s slot)) {
	t.Helper()
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		play(slot{t, conn.(*net.UnixConn)})
	}()
}

func (s slot) send(kind wire.Type, payload []byte) {
	_, _ = s.conn.Write(wire.Frame(kind, payload))
}

// receive reads one message, and returns how many file descriptors came with it.
func (s slot) receive() (wire.Type, string, int) {
	var header [wire.HeaderSize]byte
	space := make([]byte, unix.CmsgSpace(4*(wire.MaxMounts+1)))
	_, n, _, _, err := s.conn.ReadMsgUnix(header[:], space)
	if err != nil {
		return 0, "", 0
	}
	fds := 0
	messages, err := unix.ParseSocketControlMessage(space[:n])
	if err == nil {
		for i := range messages {
			rights, err := unix.ParseUnixRights(&messages[i])
			if err == nil {
				for _, fd := range rights {
					_ = unix.Close(fd)
				}
				fds += len(rights)
			}
		}
	}
	kind, size, err := wire.ParseHeader(header)
	payload := make([]byte, size)
	if err == nil {
		_, err = io.ReadFull(s.conn, payload)
	}
	if err != nil {
		return 0, "", 0
	}
	return kind, string(payload), fds
}

func (s slot) hello() { s.send(wire.TypeHello, wire.EncodeHello(wire.Version)) }

func small() *claim.Claim { return &claim.Claim{Args: []string{"sh"}, Cwd: "/"} }

func socket(t *testing.T) string { return filepath.Join(t.TempDir(), claim.SocketName) }

func null(t *testing.T) int {
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return int(f.Fd())
}

func connect(t *testing.T, path string) *claim.Conn {
	t.Helper()
	c, err := claim.Connect(t.Context(), path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestClaim(t *testing.T) {
	path := socket(t)
	what := small()
	// Larger than any socket's buffer.
	what.Env = []string{strings.Repeat("x", 4<<20)}
	what.Mounts = []claim.Mount{{Destination: "/data", FD: 1, Dir: true}}
	var got *wire.Claim
	var fds int
	var went wire.Type
	played := make(chan struct{})
	serve(t, path, func(s slot) {
		defer close(played)
		s.hello()
		kind, payload, n := s.receive()
		if kind == wire.TypeClaim {
			got, _ = wire.DecodeClaim(payload)
			fds = n
		}
		s.send(wire.TypeReady, nil)
		went, _, _ = s.receive()
	})
	c := connect(t, path)
	require.EqualValues(t, wire.Version, c.Version())
	fd := null(t)
	require.NoError(t, c.Send(t.Context(), what, fd, fd, fd))
	require.NoError(t, c.Go(t.Context()))
	<-played
	require.Equal(t, wire.TypeGo, went)
	require.Equal(t, 3, fds)
	require.Equal(t, what.Env, got.Env)
	require.Equal(t, what.Mounts, got.Mounts)
}

func TestLongSocketPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("x", 120))
	require.NoError(t, os.Mkdir(dir, 0o700))
	here, err := os.Getwd()
	require.NoError(t, err)
	require.NoError(t, os.Chdir(dir))
	serve(t, "s", func(s slot) { s.hello() })
	require.NoError(t, os.Chdir(here))
	connect(t, filepath.Join(dir, "s"))
}

func TestFailuresAreReturned(t *testing.T) {
	want := &claim.Failure{Stage: wire.StageCwd, Errno: syscall.ENOTDIR, Detail: "/data"}
	fail := func(s slot) { s.send(wire.TypeFailure, wire.EncodeFailure(want)) }
	for _, c := range []struct {
		name string
		play func(s slot)
		step string
	}{
		{"while the claim is being sent", func(s slot) { s.hello(); fail(s) }, "send"},
		{"instead of ready", func(s slot) { s.hello(); s.receive(); fail(s) }, "send"},
		{"instead of the end of the stream", func(s slot) { s.hello(); s.receive(); s.send(wire.TypeReady, nil); s.receive(); fail(s) }, "go"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := socket(t)
			serve(t, path, c.play)
			conn := connect(t, path)
			what := small()
			what.Env = []string{strings.Repeat("x", 4<<20)}
			err := conn.Send(t.Context(), what, null(t))
			if c.step == "go" {
				require.NoError(t, err)
				err = conn.Go(t.Context())
			}
			var f *claim.Failure
			require.ErrorAs(t, err, &f)
			require.Equal(t, want, f)
		})
	}
}

func TestSlotEnds(t *testing.T) {
	t.Run("before hello", func(t *testing.T) {
		path := socket(t)
		serve(t, path, func(slot) {})
		_, err := claim.Connect(t.Context(), path)
		require.ErrorIs(t, err, io.EOF)
	})
	t.Run("before ready", func(t *testing.T) {
		path := socket(t)
		serve(t, path, func(s slot) { s.hello(); s.receive() })
		require.True(t, errdefs.IsUnavailable(connect(t, path).Send(t.Context(), small(), null(t))))
	})
	t.Run("before go", func(t *testing.T) {
		path, end := socket(t), make(chan struct{})
		serve(t, path, func(s slot) { s.hello(); s.receive(); s.send(wire.TypeReady, nil); <-end })
		conn := connect(t, path)
		require.NoError(t, conn.Send(t.Context(), small(), null(t)))
		result := make(chan error)
		go func() { result <- conn.Go(t.Context()) }()
		// Whether it ends before go was sent or before it was read, nothing was executed.
		close(end)
		require.True(t, errdefs.IsUnavailable(<-result))
	})
}

func TestInvalidMessages(t *testing.T) {
	for _, c := range []struct {
		name string
		play func(s slot)
	}{
		{"another message than hello", func(s slot) { s.send(wire.TypeReady, nil) }},
		{"a hello without a version", func(s slot) { s.send(wire.TypeHello, nil) }},
		{"a frame that is too large", func(s slot) { _, _ = s.conn.Write([]byte{1, 0xff, 0xff, 0xff, 0xff}) }},
		{"a frame that is cut off", func(s slot) { _, _ = s.conn.Write([]byte{1, 10, 0, 0, 0, 1}) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := socket(t)
			serve(t, path, c.play)
			_, err := claim.Connect(t.Context(), path)
			require.Error(t, err)
			require.False(t, errdefs.IsNotFound(err))
		})
	}
}

func TestSlotThatDoesNotAnswer(t *testing.T) {
	path := socket(t)
	serve(t, path, func(s slot) { s.hello(); s.receive(); _, _, _ = s.receive() })
	conn := connect(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error)
	go func() { result <- conn.Send(ctx, small(), null(t)) }()
	cancel()
	require.ErrorIs(t, <-result, context.Canceled)
	require.NoError(t, conn.Close())
}

func TestNoSlot(t *testing.T) {
	path := socket(t)
	_, err := claim.Connect(t.Context(), path)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error)
	go func() {
		_, err := claim.Await(ctx, path)
		result <- err
	}()
	cancel()
	require.ErrorIs(t, <-result, context.Canceled)

	go func() {
		c, err := claim.Await(t.Context(), path)
		if err == nil {
			err = c.Close()
		}
		result <- err
	}()
	serve(t, path, func(s slot) { s.hello() })
	require.NoError(t, <-result)
}

func TestInvalidClaimsAreNotSent(t *testing.T) {
	path := socket(t)
	serve(t, path, func(s slot) { s.hello(); s.receive() })
	conn := connect(t, path)
	fd := null(t)
	what := small()
	what.Mounts = []claim.Mount{{Destination: "/data", FD: 1}}
	require.True(t, errdefs.IsInvalidArgument(conn.Send(t.Context(), what, fd, fd)))
	require.True(t, errdefs.IsInvalidArgument(conn.Send(t.Context(), small(), fd, make([]int, wire.MaxMounts+1)...)))
	what = small()
	what.Cwd = "relative"
	var f *claim.Failure
	require.ErrorAs(t, conn.Send(t.Context(), what, fd), &f)
	require.Equal(t, wire.StageCwd, f.Stage)
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		failure claim.Failure
		reason  fault.Reason
		class   error
	}{
		{claim.Failure{Stage: wire.StageLookup, Errno: syscall.ENOENT}, fault.CommandNotFound, errdefs.ErrFailedPrecondition},
		{claim.Failure{Stage: wire.StageLookup, Errno: syscall.EACCES}, fault.CommandNotExecutable, errdefs.ErrFailedPrecondition},
		{claim.Failure{Stage: wire.StageExec, Errno: syscall.ENOEXEC}, fault.CommandNotExecutable, errdefs.ErrFailedPrecondition},
		{claim.Failure{Stage: wire.StageExec, Errno: syscall.ENOENT}, fault.CommandNotFound, errdefs.ErrFailedPrecondition},
		{claim.Failure{Stage: wire.StageExec, Errno: syscall.E2BIG}, fault.InvalidField, errdefs.ErrInvalidArgument},
		{claim.Failure{Stage: wire.StageCwd, Errno: syscall.ENOTDIR}, fault.WorkingDirInvalid, errdefs.ErrFailedPrecondition},
		{claim.Failure{Stage: wire.StageExec, Errno: syscall.ENOMEM}, "", syscall.ENOMEM},
		{claim.Failure{Stage: wire.StageRoot, Errno: syscall.ENOENT}, "", syscall.ENOENT},
	} {
		err := claim.Fault(&c.failure, "sh")
		require.Equal(t, c.reason, fault.ReasonOf(err), "%v", err)
		require.ErrorIs(t, err, c.class)
		var f *claim.Failure
		require.ErrorAs(t, err, &f)
	}
	other := errors.New("another")
	require.Equal(t, other, claim.Fault(other, "sh"))
	require.NoError(t, claim.Fault(nil, "sh"))
}

func TestSupported(t *testing.T) {
	if err := claim.Supported(); err != nil {
		require.True(t, errdefs.IsNotImplemented(err), "%v", err)
	}
}

// TestDeadline connects after the deadline.
func TestDeadline(t *testing.T) {
	path := socket(t)
	serve(t, path, func(s slot) { s.hello() })
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	_, err := claim.Connect(ctx, path)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}
