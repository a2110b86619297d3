package supervise_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/supervise"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testTimeout = 20 * time.Second

// program runs a shell script whose name, in capitals, it can write to the file "order" of dir.
func program(dir, name, script string, after ...string) supervise.Program {
	return supervise.Program{
		Name: name, Path: "/bin/sh", Args: []string{"sh", "-c", script}, Env: []string{"PATH=/bin:/usr/bin", "DIR=" + dir},
		After: after, Grace: 10 * time.Second,
		Ready: func(context.Context) error {
			_, err := os.Stat(filepath.Join(dir, name+".ready"))
			return err
		},
		PIDFile: filepath.Join(dir, name+".pid"), LogFile: filepath.Join(dir, "log", name),
	}
}

// wellBehaved notes its start and its end, is ready at once, and ends on SIGTERM.
func wellBehaved(name string) string {
	return `echo +` + name + ` >>$DIR/order; trap 'echo -` + name + ` >>$DIR/order; exit 0' TERM; touch $DIR/` + name +
		`.ready; echo hello; while :; do sleep 0.02; done`
}

func run(t *testing.T, programs ...supervise.Program) (stop func()) {
	t.Helper()
	supervisor, err := supervise.New(programs, slog.New(slog.NewTextHandler(io.Discard, nil)))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); supervisor.Run(ctx) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	require.NoError(t, host.Poll(ctx, 5*time.Millisecond, func(context.Context) error {
		if !condition() {
			return errors.New(what)
		}
		return nil
	}))
}

func ready(t *testing.T, dir, name string) {
	t.Helper()
	eventually(t, name+" is not ready", func() bool {
		_, err := os.Stat(filepath.Join(dir, name+".ready"))
		return err == nil
	})
}

func record(t *testing.T, program supervise.Program) host.Record {
	t.Helper()
	record, err := host.ReadRecord(program.PIDFile)
	require.NoError(t, err)
	return record
}

func TestOrder(t *testing.T) {
	dir := t.TempDir()
	// The second is given first its chance to start too early: the first needs a while to be ready.
	slow := strings.Replace(wellBehaved("one"), "touch", "sleep 0.2; touch", 1)
	stop := run(t, program(dir, "one", slow), program(dir, "two", wellBehaved("two"), "one"),
		program(dir, "three", wellBehaved("three"), "one", "two"))
	ready(t, dir, "three")
	stop()
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	require.NoError(t, err)
	require.Equal(t, "+one\n+two\n+three\n-three\n-two\n-one\n", string(order))
	log, err := os.ReadFile(filepath.Join(dir, "log", "one"))
	require.NoError(t, err)
	require.Equal(t, "hello\n", string(log))
	require.NoFileExists(t, filepath.Join(dir, "one.pid"))
}

// A program that exits is restarted soon, and its record says so. Programs that depend on it keep running.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	one, two := program(dir, "one", wellBehaved("one")), program(dir, "two", wellBehaved("two"), "one")
	run(t, one, two)
	ready(t, dir, "two")
	before, dependent := record(t, one), record(t, two)
	require.True(t, before.Alive())
	require.NoError(t, before.Signal(unix.SIGKILL))
	eventually(t, "the program was not started again", func() bool {
		after := record(t, one)
		return after.Alive() && after.Process != before.Process
	})
	require.Equal(t, 1, record(t, one).Restarts)
	require.Equal(t, "signal: killed", record(t, one).LastExit)
	require.Equal(t, dependent, record(t, two))
}

// A program that cannot even be started does not keep the others from running, nor the supervisor from ending.
func TestBroken(t *testing.T) {
	dir := t.TempDir()
	broken := program(dir, "broken", "")
	broken.Path = "/no/such/program"
	dies := program(dir, "dies", "echo once >>$DIR/dies; exit 1")
	stop := run(t, broken, dies, program(dir, "waits", wellBehaved("waits"), "broken"), program(dir, "fine", wellBehaved("fine")))
	ready(t, dir, "fine")
	eventually(t, "the program that fails is not tried again", func() bool {
		tries, _ := os.ReadFile(filepath.Join(dir, "dies"))
		return strings.Count(string(tries), "once") >= 3
	})
	stop()
	require.NoFileExists(t, filepath.Join(dir, "waits.ready"))
}

// A program that ignores SIGTERM is killed after its grace.
func TestStubborn(t *testing.T) {
	dir := t.TempDir()
	stubborn := program(dir, "stubborn", `trap "" TERM; touch $DIR/stubborn.ready; while :; do sleep 0.02; done`)
	stubborn.Grace = 50 * time.Millisecond
	stop := run(t, stubborn)
	ready(t, dir, "stubborn")
	process := record(t, stubborn)
	stop()
	require.False(t, process.Alive())
}

func TestNewRefusesDisorder(t *testing.T) {
	_, err := supervise.New([]supervise.Program{{Name: "a", After: []string{"b"}}, {Name: "b", After: []string{"b", "c"}}},
		slog.New(slog.NewTextHandler(io.Discard, nil)))
	require.ErrorContains(t, err, "a is to start after b")
	require.ErrorContains(t, err, "b is to start after b")
	require.ErrorContains(t, err, "b is to start after c")
}

// The writer keeps its file open across a rotation and continues at the beginning.
func TestRotate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	require.NoError(t, supervise.Rotate(path, 4), "no log yet")
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	require.NoError(t, err)
	defer func() { require.NoError(t, file.Close()) }()
	write := func(text string) {
		_, err := file.WriteString(text)
		require.NoError(t, err)
	}
	write("1234")
	require.NoError(t, supervise.Rotate(path, 4))
	write("5")
	require.NoError(t, supervise.Rotate(path, 4))
	write("6")
	older, err := os.ReadFile(path + ".1")
	require.NoError(t, err)
	newer, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "12345", string(older))
	require.Equal(t, "6", string(newer))

}
