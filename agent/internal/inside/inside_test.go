package inside_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// fake is a supervisor, and the container that it is in.
type fake struct {
	socket string
	paused atomic.Bool
	// silent: it takes connections, as the kernel does for a process that is stopped, and answers nothing.
	silent  atomic.Bool
	joins   atomic.Int64
	join    func() error
	signals []uint32
}

func (f *fake) Join(context.Context) error {
	f.joins.Add(1)
	return f.join()
}

func (f *fake) Paused(context.Context) bool { return f.paused.Load() }

func (f *fake) SignalMain(_ context.Context, r *wire.Request) (bool, error) {
	f.signals = append(f.signals, r.Signal)
	return true, nil
}

// serve answers a list with no processes, and a start with a process that says nothing.
func (f *fake) serve(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", f.socket)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go f.answer(conn)
		}
	}()
}

func (f *fake) answer(conn net.Conn) {
	defer conn.Close()
	for {
		kind, _, err := claim.ReadFrame(conn)
		if err != nil {
			return
		}
		if f.silent.Load() {
			continue
		}
		answer := wire.Frame(wire.TypeFailure, wire.EncodeFailure(&wire.Failure{Stage: wire.StageProcess, Errno: syscall.ESRCH}))
		switch kind {
		case wire.TypeList:
			answer = wire.Frame(wire.TypeProcesses, wire.EncodeProcesses())
		case wire.TypeStart:
			answer = wire.Frame(wire.TypeStarted, wire.EncodeProcesses(&wire.Process{Pid: 7}))
		case wire.TypeInput, wire.TypeOpen:
			continue // the process takes nothing, the helper does not come
		}
		if _, err := conn.Write(answer); err != nil {
			return
		}
	}
}

func newFake(t *testing.T) (*fake, inside.Sandbox) {
	t.Helper()
	f := &fake{socket: filepath.Join(t.TempDir(), "s")}
	f.join = func() error { f.serve(t); return nil }
	timeouts := inside.Timeouts{First: 20 * time.Millisecond, Quiet: 40 * time.Millisecond, Answer: 150 * time.Millisecond}
	return f, inside.Sandbox{Socket: f.socket, Container: f, Timeouts: timeouts}
}

func reason(err error) fault.Reason { return fault.ReasonOf(inside.Fault(err, "")) }

func TestFirstCallJoins(t *testing.T) {
	f, s := newFake(t)
	for range 3 {
		_, err := s.List(t.Context())
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, f.joins.Load())
}

func TestJoinIsRefused(t *testing.T) {
	f, s := newFake(t)
	f.join = func() error { return fault.New(errdefs.ErrFailedPrecondition, fault.CallUnsupported, "no") }
	_, err := s.List(t.Context())
	require.Equal(t, fault.CallUnsupported, reason(err))
	f.join = func() error { return nil } // and nothing listens
	_, err = s.List(t.Context())
	require.Equal(t, fault.PhaseConflict, reason(err))
}

// TestSilentProcessIsWaitedFor: a supervisor that answers others is not silent, however long a process is.
func TestSilentProcessIsWaitedFor(t *testing.T) {
	_, s := newFake(t)
	stream, err := s.Start(t.Context(), &wire.Start{Args: []string{"x"}})
	require.NoError(t, err)
	defer stream.Close()
	next := make(chan error, 1)
	go func() { _, err := stream.Next(); next <- err }()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	err = s.Do(ctx, wire.TypeInput, &wire.Request{Target: wire.Target{Pid: 7}, Data: "x"})
	require.ErrorIs(t, err, context.DeadlineExceeded, "the caller's own")
	select {
	case err := <-next:
		t.Fatal("the stream has ended", err)
	default:
	}
}

func TestSilentSupervisor(t *testing.T) {
	for want, paused := range map[fault.Reason]bool{fault.SandboxUnresponsive: false, fault.SandboxPaused: true} {
		t.Run(string(want), func(t *testing.T) {
			f, s := newFake(t)
			stream, err := s.Start(t.Context(), &wire.Start{Args: []string{"x"}})
			require.NoError(t, err)
			defer stream.Close()
			f.paused.Store(paused)
			f.silent.Store(true)
			began := time.Now()
			_, err = stream.Next()
			require.Equal(t, want, reason(err), "%v", err)
			_, err = s.List(t.Context())
			require.Equal(t, want, reason(err), "%v", err)
			_, err = s.Helper(t.Context(), "")
			require.Equal(t, want, reason(err), "%v", err)
			require.Less(t, time.Since(began), testkit.Timeout)
			// It is not remembered.
			f.silent.Store(false)
			_, err = s.List(t.Context())
			require.NoError(t, err)
		})
	}
}

// TestSilentHelper: the supervisor answers, and the helper does not.
func TestSilentHelper(t *testing.T) {
	_, s := newFake(t)
	_, err := s.Helper(t.Context(), "")
	require.Equal(t, fault.SandboxUnresponsive, reason(err), "%v", err)
}

// TestFullSocket: as many connections wait as may, of a supervisor that is stopped.
func TestFullSocket(t *testing.T) {
	f, s := newFake(t)
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { _ = syscall.Close(fd) }()
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: f.socket}))
	require.NoError(t, syscall.Listen(fd, 0))
	for {
		conn, err := net.Dial("unix", f.socket)
		if errors.Is(err, syscall.EAGAIN) {
			break
		}
		require.NoError(t, err)
		defer conn.Close()
	}
	_, err = s.List(t.Context())
	require.Equal(t, fault.SandboxUnresponsive, reason(err), "%v", err)
	f.paused.Store(true)
	_, err = s.List(t.Context())
	require.Equal(t, fault.SandboxPaused, reason(err), "%v", err)
}

func TestSignalsOfTheMainProcessAreTheContainers(t *testing.T) {
	f, s := newFake(t)
	for _, target := range []wire.Target{{Tag: wire.MainTag}, {Pid: 1}} {
		require.NoError(t, s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: target, Signal: 9}))
	}
	require.Equal(t, []uint32{9, 9}, f.signals)
	err := s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: wire.Target{Tag: wire.MainTag}, Signal: 65})
	require.Equal(t, fault.InvalidField, reason(err))
	err = s.Do(t.Context(), wire.TypeSignal, &wire.Request{Target: wire.Target{Pid: 2}, Signal: 9})
	require.Equal(t, fault.ProcessNotFound, reason(err), "that of another process is the supervisor's")
}

func TestFaultOfALostProcess(t *testing.T) {
	lost := &wire.Failure{Stage: wire.StageProcess, Errno: syscall.ESRCH, Detail: wire.DetailLost}
	require.Equal(t, fault.ProcessLost, reason(lost))
}
