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
)

// killAPI kills the API server as the machine's end would. What it has stored is etcd's.
func (w *world) killAPI() {
	w.t.Helper()
	mine := []byte("--cert-dir=" + w.env.ControlPlane.GetAPIServer().CertDir)
	processes := func() (pids []int) {
		entries, err := os.ReadDir("/proc")
		require.NoError(w.t, err)
		for _, e := range entries {
			raw, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
			if pid, bad := strconv.Atoi(e.Name()); err == nil && bad == nil && bytes.Contains(raw, mine) {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	require.NotEmpty(w.t, processes())
	require.Eventually(w.t, func() bool {
		left := processes()
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(left) == 0
	}, patience, tick)
}

// startAPI starts the API server again, where it was and with what it had.
func (w *world) startAPI() {
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

// mortal is a janitor, the program that people run: it is killed after a random time, and started anew.
type mortal struct {
	t       *testing.T
	binary  string
	args    []string
	address string
	log     *os.File
	random  *rand.Rand
	// mean is how long a life is that begins now, kills how many are cut short.
	mean  func() time.Duration
	kills int

	killNow chan chan struct{}
	stop    chan struct{}
	wg      sync.WaitGroup
	// told is called after each kill.
	told func(n int, lived time.Duration)
}

// live has a janitor live and die until stopped; after its last death it lives on.
func (w *world) live(seed uint64, kills int, mean func() time.Duration, told func(n int, lived time.Duration), flags ...string) *mortal {
	w.t.Helper()
	l := &mortal{
		t: w.t, binary: janitorBinary(w.t), random: rand.New(rand.NewPCG(seed, 0)), mean: mean, kills: kills,
		killNow: make(chan chan struct{}), stop: make(chan struct{}), told: told,
	}
	port, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	l.address = port.Addr().String()
	require.NoError(w.t, port.Close())
	l.log, err = os.Create(filepath.Join(w.Dir, "janitor.log"))
	require.NoError(w.t, err)
	l.args = append([]string{
		"--insecure", "--bind-address=" + l.address, "--metrics-bind-address=0", "--health-probe-bind-address=0", "--node-name=" + node,
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
		_ = <-ended // killed, as it was meant to be
		l.told(n, time.Since(began))
		if asked != nil {
			close(asked)
		}
	}
}

// kill kills the janitor that lives now; it is dead when this returns.
func (l *mortal) kill() {
	dead := make(chan struct{})
	l.killNow <- dead
	<-dead
}

// end ends the last life in good order.
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

// client is one of the janitor that lives now.
func (l *mortal) client(t *testing.T) *janitor {
	t.Helper()
	conn, err := rpc.Dial("passthrough:///"+l.address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	return &janitor{JanitorServiceClient: janitorv1.NewJanitorServiceClient(conn), stop: func() { require.NoError(t, conn.Close()) }}
}

// number reads a number that says how large a test is to be.
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

// started is when a process was started, in the kernel's ticks: with its pid, it is that process and no other.
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
