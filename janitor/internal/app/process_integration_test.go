//go:build integration

package app_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// killAPI kills the API server. Its data is in etcd.
func (w *testEnv) killAPI() {
	w.t.Helper()
	require.NotEmpty(w.t, w.apiServers())
	require.Eventually(w.t, func() bool {
		left := w.apiServers()
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(left) == 0
	}, testkit.Timeout, testkit.Tick)
}

// apiServers returns the children of this process that execute its API server. That program may be several in one: then its name counts,
// too.
func (w *testEnv) apiServers() (pids []int) {
	w.t.Helper()
	program, err := filepath.EvalSymlinks(w.env.ControlPlane.GetAPIServer().Path)
	require.NoError(w.t, err)
	program, err = filepath.Abs(program)
	require.NoError(w.t, err)
	entries, err := os.ReadDir("/proc")
	require.NoError(w.t, err)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		status, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "status"))
		if err != nil || exe != program || !bytes.Contains(status, fmt.Appendf(nil, "\nPPid:\t%d\n", os.Getpid())) {
			continue
		}
		raw, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if name, _, _ := bytes.Cut(raw, []byte{0}); filepath.Base(string(name)) == "kube-apiserver" {
			pids = append(pids, pid)
		}
	}
	return pids
}

// startAPI starts the API server again, with the same address and data.
func (w *testEnv) startAPI() {
	w.t.Helper()
	require.NoError(w.t, w.env.ControlPlane.GetAPIServer().Start())
}

// janitorBinary is the built program.
func janitorBinary(t *testing.T) string {
	t.Helper()
	if dir := config.Env("FSB_BIN"); dir != "" {
		if path := filepath.Join(dir, "janitor"); exists(path) {
			return path
		}
	}
	path := filepath.Join(t.TempDir(), "janitor")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", path, "github.com/fast-sandbox/fast-sandbox/janitor").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// mortal is the janitor's program, which is killed after a random time and restarted.
type mortal struct {
	t       *testing.T
	binary  string
	args    []string
	address string
	log     *os.File
	random  *rand.Rand
	// mean is the mean lifetime of a process that starts now, kills the number of processes that were killed.
	mean  func() time.Duration
	kills int

	killNow chan chan struct{}
	stop    chan struct{}
	wg      sync.WaitGroup
	// killed is called after each kill.
	killed func(n int, lived time.Duration)
}

// live runs and kills janitors until stopped; the last one runs on.
func (w *testEnv) live(seed uint64, kills int, mean func() time.Duration, killed func(n int, lived time.Duration), flags ...string) *mortal {
	w.t.Helper()
	l := &mortal{
		t: w.t, binary: janitorBinary(w.t), random: rand.New(rand.NewPCG(seed, 0)), mean: mean, kills: kills,
		killNow: make(chan chan struct{}), stop: make(chan struct{}), killed: killed,
	}
	port, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	l.address = port.Addr().String()
	require.NoError(w.t, port.Close())
	l.log, err = os.Create(filepath.Join(w.Dir, "janitor.log"))
	require.NoError(w.t, err)
	l.args = append([]string{
		"--insecure", "--bind-address=" + l.address, "--metrics-bind-address=0", "--health-socket=0", "--node-name=" + node,
		"--kubeconfig=" + w.kubeconfig, "--containerd-socket=" + w.Socket, "--log-root=" + w.LogRoot, "--fifo-root=" + w.fifoRoot(),
		"--containerd-state=" + w.stateDir(), "--cgroup-parents=" + w.CgroupParent,
	}, flags...)
	l.wg.Go(l.run)
	w.t.Cleanup(l.end)
	return l
}

func (l *mortal) run() {
	for n := 1; ; n++ {
		cmd := exec.Command(l.binary, l.args...)
		cmd.Stdout, cmd.Stderr = l.log, l.log
		if err := cmd.Start(); err != nil {
			l.t.Errorf("starting the janitor: %v", err)
			return
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		began := time.Now()
		var over <-chan time.Time
		if n <= l.kills {
			over = time.After(time.Duration(l.random.Int64N(int64(2 * l.mean()))))
		}
		var asked chan struct{}
		select {
		case <-over:
		case asked = <-l.killNow:
		case err := <-ended:
			l.t.Errorf("the janitor ended by itself: %v", err)
			return
		case <-l.stop:
			if err := syscall.Kill(cmd.Process.Pid, syscall.SIGTERM); err != nil {
				l.t.Errorf("ending the janitor: %v", err)
			}
			if err := <-ended; err != nil {
				l.t.Errorf("the janitor's end: %v", err)
			}
			return
		}
		_ = cmd.Process.Kill()
		_ = <-ended // killed, as intended
		l.killed(n, time.Since(began))
		if asked != nil {
			close(asked)
		}
	}
}

// kill kills the present process; it is dead when this returns.
func (l *mortal) kill() {
	dead := make(chan struct{})
	l.killNow <- dead
	<-dead
}

// end ends the last process gracefully.
func (l *mortal) end() {
	select {
	case <-l.stop:
		return
	default:
	}
	close(l.stop)
	l.wg.Wait()
	if l.t.Failed() {
		raw, _ := os.ReadFile(l.log.Name())
		l.t.Logf("the janitors' log:\n%s", raw[max(0, len(raw)-16<<10):])
	}
	_ = l.log.Close()
}

// client returns a client of the present process.
func (l *mortal) client(t *testing.T) *janitor {
	t.Helper()
	conn, err := rpc.Dial("passthrough:///"+l.address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	return &janitor{JanitorServiceClient: janitorv1.NewJanitorServiceClient(conn), stop: func() { require.NoError(t, conn.Close()) }}
}

// number reads the size of a test from the environment.
func number(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	raw := config.Env(variable)
	if raw == "" {
		return otherwise
	}
	n, err := strconv.Atoi(raw)
	require.NoError(t, err, variable)
	return n
}

// started returns when a process was started, in the kernel's ticks: with the pid, it identifies the process.
func started(pid uint32) string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(fields) < 20 {
		return ""
	}
	return string(fields[19])
}
