//go:build integration

package ctrd_test

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

func terminal(p *specs.Process) {
	p.Terminal = true
	p.ConsoleSize = &specs.Box{Height: 33, Width: 77}
}

// TestOwnExecInput: a process reads what its client writes, until both the client and CloseIO have closed the input.
func TestOwnExecInput(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	id := started(t, s, r, 1)[0]
	in, out := io.Pipe()
	e, err := addProcess(t, s, id, in, nil, "sh", "-c", "read first; echo got $first; cat; echo end; ls -l /proc/self/fd/0")
	require.NoError(t, err)
	require.NoError(t, e.Start(t.Context()))
	large := strings.Repeat("0123456789abcde\n", 16<<10) // more than a FIFO and a pipe hold
	_, err = io.WriteString(out, "line\n"+large)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	status, err := e.Status(t.Context())
	require.NoError(t, err)
	require.Equal(t, client.Running, status.Status, "the input is open in the shim")
	require.NoError(t, e.CloseIO(t.Context(), client.WithStdinCloser))
	code, stdout, stderr := e.result(t)
	require.Zero(t, code, stderr)
	require.True(t, strings.HasPrefix(stdout, "got line\n"+large+"end\n"), "%d bytes", len(stdout))
	require.Contains(t, stdout, "-> pipe:", "no file of the host")
	e, err = addProcess(t, s, id, strings.NewReader(""), nil, "cat")
	require.NoError(t, err)
	require.NoError(t, e.CloseIO(t.Context(), client.WithStdinCloser), "before it runs, as ctr may")
	require.NoError(t, e.Start(t.Context()))
	code, _, _ = e.result(t)
	require.Zero(t, code)
	require.NoError(t, r.Delete(t.Context(), id))
}

// TestOwnExecNull: a process without streams has /dev/null of its container, and not that of the host, whose mode it could change.
func TestOwnExecNull(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	before, err := os.Stat("/dev/null")
	require.NoError(t, err)
	for _, slot := range []bool{false, true} {
		b := box(t, s, slot, containerd.Busybox, "sh", "-c", "stat -L -c %d /proc/self/fd/0 /dev/null; chmod 0600 /proc/self/fd/0; sleep 1000")
		require.NoError(t, launch(t.Context(), r, b))
		task, p := processOf(t, s, b.ID, "sh", "-c", "chmod 0640 /proc/self/fd/1; stat -L -c %a /dev/null >/report")
		e, err := task.Exec(t.Context(), "null", p, cio.NullIO)
		require.NoError(t, err)
		exit, err := e.Wait(t.Context())
		require.NoError(t, err)
		require.NoError(t, e.Start(t.Context()))
		require.Zero(t, (<-exit).ExitCode())
		_, err = e.Delete(t.Context())
		require.NoError(t, err)
		_, report, _ := execute(t, s, b.ID, nil, "cat", "/report")
		require.Equal(t, "640\n", report)
		after, err := os.Stat("/dev/null")
		require.NoError(t, err)
		if before.Mode() != after.Mode() {
			require.NoError(t, os.Chmod("/dev/null", 0o666))
		}
		require.Equal(t, before.Mode(), after.Mode())
		raw, err := os.ReadFile(b.LogPath)
		require.NoError(t, err)
		devices := strings.Fields(string(raw))
		require.Len(t, devices, 2)
		require.Equal(t, devices[0], devices[1])
		require.NoError(t, r.Delete(t.Context(), b.ID))
	}
}

// TestOwnExecTerminal: the terminal is one of the container, of the size that was asked for, and changes it.
func TestOwnExecTerminal(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/user:test", containerd.Image(t, containerd.WithUser("1234:4321")))
	r := newRuntime(t, s, mapped(t, s))
	for _, image := range []string{containerd.Busybox, "user:test"} {
		b := box(t, s, false, image, "sleep", "1000")
		require.NoError(t, launch(t.Context(), r, b))
		in, out := io.Pipe()
		// The name of the terminal, who owns it, its size before and after a change, and that it is the controlling one.
		e, err := addProcess(t, s, b.ID, in, terminal, "sh", "-c", `
			busybox tty; [ -O $(busybox tty) ] && echo mine; busybox stty size; echo typed >/dev/tty
			trap 'busybox stty size; exit 5' WINCH; echo waiting; while :; do sleep 0.05; done`)
		require.NoError(t, err)
		require.NoError(t, e.Start(t.Context()))
		require.Eventually(t, func() bool { return strings.Contains(e.stdout.String(), "waiting") }, testkit.Timeout, testkit.Tick)
		require.NoError(t, e.Resize(t.Context(), 88, 44))
		code, stdout, _ := e.result(t)
		require.EqualValues(t, 5, code)
		require.NoError(t, out.Close())
		lines := strings.Split(strings.ReplaceAll(stdout, "\r\n", "\n"), "\n")
		require.Equal(t, []string{"/dev/pts/0", "mine", "33 77", "typed", "waiting", "44 88", ""}, lines)
		require.NoError(t, r.Delete(t.Context(), b.ID))
	}
}

// console is a terminal for ctr: what it prints, and what is typed.
type console struct {
	master, slave *os.File
	printed       *output
}

func newConsole(t *testing.T) *console {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = master.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = slave.Close() })
	c := &console{master: master, slave: slave, printed: &output{}}
	go func() { _, _ = io.Copy(c.printed, master) }()
	return c
}

// TestOwnExecByCtr executes processes as people do.
func TestOwnExecByCtr(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	id := started(t, s, r, 1)[0]
	ctr := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), filepath.Join(config.Env("FSB_BIN"), "containerd", "ctr"), "-a", s.Socket, "-n", shared.DefaultNamespace)
		cmd.Args = append(cmd.Args, "tasks", "exec", "--fifo-dir", t.TempDir(), "--exec-id")
		cmd.Args = append(cmd.Args, args...)
		return cmd
	}
	plain := ctr("plain", id, "sh", "-c", "cat; echo err >&2; exit 3")
	plain.Stdin = strings.NewReader("from stdin\n")
	var stdout, stderr bytes.Buffer
	plain.Stdout, plain.Stderr = &stdout, &stderr
	var failed *exec.ExitError
	require.ErrorAs(t, plain.Run(), &failed, "%s", &stderr)
	require.Equal(t, 3, failed.ExitCode())
	require.Equal(t, "from stdin\n", stdout.String())
	require.True(t, strings.HasSuffix(stderr.String(), "err\n"), "%s", &stderr)

	missing, err := ctr("missing", id, "nope").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(missing), "finding the command nope: no such file or directory")

	c := newConsole(t)
	require.NoError(t, unix.IoctlSetWinsize(int(c.slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 21, Col: 55}))
	tty := ctr("tty", "-t", id, "sh", "-c", `
		busybox tty; trap 'echo interrupted; exit 9' INT; read line; echo "got $line"
		until busybox stty size | grep '21 55'; do sleep 0.05; done; sleep 1000 & wait`) // ctr sets the size after the start
	tty.Stdin, tty.Stdout, tty.Stderr = c.slave, c.slave, c.slave
	tty.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, tty.Start())
	for _, step := range []struct{ wanted, typed string }{{"/dev/pts/0", "a line\r"}, {"got a line", ""}, {"21 55", "\x03"}, {"interrupted", ""}} {
		require.Eventually(t, func() bool { return strings.Contains(c.printed.String(), step.wanted) }, testkit.Timeout, testkit.Tick, "%s: %s", step.wanted, c.printed)
		_, err = io.WriteString(c.master, step.typed)
		require.NoError(t, err)
	}
	require.ErrorAs(t, tty.Wait(), &failed)
	require.Equal(t, 9, failed.ExitCode())
	require.NoError(t, r.Delete(t.Context(), id))
}
