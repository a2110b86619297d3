// Package containerd runs a real containerd for a test: private root, state and socket, the real runc, a small
// busybox image, and a registry on loopback to pull from. When a test ends it fails the test if a task, container,
// snapshot, record or process of a shim, range of user ids, mount, namespace or cgroup of the containerd is left. It needs
// root and the binaries; a missing one fails the test with the reason, it never skips.
package containerd

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/tmpfs"
)

const (
	startTimeout = 20 * time.Second
	stopTimeout  = 20 * time.Second
	// endTime is how long processes may take to end by themselves: a shim that containerd has started and given up waits for it first.
	endTime      = 40 * time.Second
	pollInterval = 20 * time.Millisecond
)

// Server is a running containerd.
type Server struct {
	// Dir holds everything; LogRoot is a directory within it for sandboxes' output.
	Dir, LogRoot string
	// Content is the directory of images and of what containers write.
	Content string
	// Socket is containerd's address.
	Socket string
	// CgroupParent is a cgroup of this server's own.
	CgroupParent string
	// Client speaks to it in the kubelet's namespace.
	Client *client.Client

	config string
	env    []string
	before []string // what this process holds already

	mu  sync.Mutex
	cmd *exec.Cmd
	out *os.File
}

// StartOn is Start with a disk of a size for images and containers.
func StartOn(t testing.TB, bytes int64) *Server {
	t.Helper()
	return start(t, func(root string) string {
		disk := filepath.Join(root, "disk")
		require.NoError(t, os.Mkdir(disk, 0o700))
		require.NoError(t, syscall.Mount("tmpfs", disk, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)))
		return disk
	})
}

// Start runs a containerd until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	return start(t, func(root string) string { return root })
}

func start(t testing.TB, content func(root string) string) *Server {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("containerd needs root: run these tests as root")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		t.Fatalf("containerd needs runc: %v (apt-get install runc)", err)
	}
	bin := binaries(t)
	// The path of a unix socket is short, so it cannot be in the test's own directory.
	dir, err := os.MkdirTemp("/run", "fsb-test-")
	require.NoError(t, err)
	s := &Server{
		Dir: dir, LogRoot: filepath.Join(dir, "log"), Socket: filepath.Join(dir, "c.sock"), CgroupParent: "/" + filepath.Base(dir),
		config: filepath.Join(dir, "config.toml"), before: held(), env: append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH")),
	}
	// Content on a disk: overlays on tmpfs behave differently.
	root, err := os.MkdirTemp("/var/tmp", "fsb-test-")
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(s.LogRoot, 0o700))
	require.NoError(t, tmpfs.Ensure(s.state()))
	s.Content = content(root)
	require.NoError(t, os.WriteFile(s.config, []byte(s.configuration(s.Content)), 0o600))
	s.out, err = os.Create(filepath.Join(dir, "containerd.log"))
	require.NoError(t, err)
	t.Cleanup(func() { s.close(t, root) })
	s.Up(t)
	return s
}

func (s *Server) configuration(root string) string {
	return fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs", "io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]
[grpc]
  address = %q
[plugins."io.containerd.gc.v1.scheduler"]
  startup_delay = "10s"
[plugins."io.containerd.shim.v1.manager"]
  socket_dir = %q
`, root, s.state(), s.Socket, s.Sockets())
}

// Sockets is the directory of the sockets of shims.
func (s *Server) Sockets() string { return filepath.Join(s.Dir, "k") }

// state is containerd's state directory, on a tmpfs.
func (s *Server) state() string { return filepath.Join(s.Dir, "s") }

// Up starts the process, again after Down or Kill, and waits until it answers.
func (s *Server) Up(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Nil(t, s.cmd, "containerd runs already")
	path := filepath.Join(binaries(t), "containerd")
	cmd := exec.Command(path, "--config", s.config, "--log-level", "info")
	cmd.Stdout, cmd.Stderr, cmd.Env = s.out, s.out, s.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	s.cmd = cmd
	if s.Client == nil {
		c, err := ctrd.Dial(s.Socket, ctrd.DefaultNamespace)
		require.NoError(t, err)
		s.Client = c
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	err := poll(ctx, func() error {
		_, err := s.Client.Version(ctx)
		return err
	})
	if err != nil {
		t.Fatalf("starting %s: %v\n%s", path, err, s.log())
	}
}

// Down stops the process gracefully; the shims and their containers keep running.
func (s *Server) Down(t testing.TB) { s.signal(t, syscall.SIGTERM) }

// Kill kills the process; the shims and their containers keep running.
func (s *Server) Kill(t testing.TB) { s.signal(t, syscall.SIGKILL) }

func (s *Server) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return
	}
	require.NoError(t, s.cmd.Process.Signal(sig))
	done := make(chan struct{})
	go func() { defer close(done); _ = s.cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(stopTimeout):
		_ = s.cmd.Process.Kill()
		<-done
	}
	s.cmd = nil
}

// close reports and removes what tests left, and then removes the server itself.
func (s *Server) close(t testing.TB, root string) {
	if s.cmd == nil && s.Client != nil {
		s.Up(t)
	}
	if s.cmd != nil {
		s.CheckClean(t)
		s.sweep(t)
	}
	if s.Client != nil {
		_ = s.Client.Close()
	}
	s.Down(t)
	for _, left := range s.leftovers() {
		t.Errorf("containerd's test leaves %s", left)
	}
	if err := tmpfs.Release(s.state()); err != nil {
		t.Errorf("stopping containerd: %v", err)
	}
	_ = s.out.Close()
	if t.Failed() {
		t.Logf("containerd's log:\n%s", s.log())
	}
	unmountBelow(s.Dir)
	unmountBelow(root)
	removeCgroups(s.CgroupParent)
	for _, dir := range []string{s.Dir, root} {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("removing %s: %v", dir, err)
		}
	}
}

func (s *Server) log() []byte {
	raw, _ := os.ReadFile(filepath.Join(s.Dir, "containerd.log"))
	if len(raw) > 8<<10 {
		raw = raw[len(raw)-8<<10:]
	}
	return bytes.TrimSpace(raw)
}

// binaries returns the directory of containerd and its shim: $FSB_BIN/containerd, else bin/containerd of the repository.
func binaries(t testing.TB) string {
	t.Helper()
	bin := config.Env("FSB_BIN")
	if bin == "" {
		bin = filepath.Join(repository(t), "bin")
	}
	dir := filepath.Join(bin, "containerd")
	for _, name := range []string{"containerd", "containerd-shim-runc-v2"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Fatalf("containerd's binary is missing: %v (make build makes it; FSB_BIN names another directory)", err)
		}
	}
	return dir
}

func repository(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "gen", "go")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		require.NotEqual(t, parent, dir, "no repository above the working directory")
		dir = parent
	}
}

func poll(ctx context.Context, try func() error) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-ticker.C:
		}
	}
}

func lines(path string) []string {
	raw, _ := os.ReadFile(path)
	return strings.Split(strings.TrimSpace(string(raw)), "\n")
}
