package process_test

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/process"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, script string) *process.Process {
	t.Helper()
	p, err := process.Start(process.Config{Name: "it", Dir: t.TempDir(), Path: "/bin/sh", Args: []string{"-c", script}, Env: []string{"WORD=hello"}})
	require.NoError(t, err)
	t.Cleanup(p.Kill)
	return p
}

func TestRunning(t *testing.T) {
	p := start(t, "exec sleep 1000")
	require.NoError(t, p.Alive())
	require.False(t, p.Began().After(time.Now()))
	used, err := p.Usage()
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), used.Parent)
	require.NoError(t, p.Stop(testkit.Timeout))
	p.Kill() // a process that has ended is not signaled
	_, err = p.Usage()
	require.Error(t, err)
}

func TestExit(t *testing.T) {
	p := start(t, "seq 1 100; echo $WORD; exit 3")
	require.Eventually(t, func() bool { return p.Alive() != nil }, testkit.Timeout, testkit.Tick)
	require.ErrorContains(t, p.Alive(), "exit status 3")
	require.ErrorContains(t, p.Alive(), "100\nhello", "the error has its last output")
	require.NotContains(t, p.Tail(), "\n50\n")
	require.NoError(t, p.Stop(testkit.Timeout))
}

// A process that ignores SIGTERM is killed.
func TestIgnoresSIGTERM(t *testing.T) {
	p := start(t, "trap '' TERM; echo ignores SIGTERM; while :; do sleep 0.01; done")
	require.Eventually(t, func() bool { return p.Tail() == "ignores SIGTERM" }, testkit.Timeout, testkit.Tick)
	require.ErrorContains(t, p.Stop(time.Millisecond), "has not ended within 1ms")
	require.Error(t, p.Alive())
}

func TestNoProgram(t *testing.T) {
	_, err := process.Start(process.Config{Name: "it", Dir: t.TempDir(), Path: "/nothing"})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = process.Start(process.Config{Name: "it", Dir: "/nothing", Path: "/bin/sh"})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestFreeAddress(t *testing.T) {
	address, err := process.FreeAddress("127.0.0.1")
	require.NoError(t, err)
	host, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", host)
	require.NotEqual(t, "0", port)
	_, err = process.FreeAddress("192.0.2.1")
	require.Error(t, err)
}
