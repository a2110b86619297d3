//go:build integration

package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/contrib/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/seccomp"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

var names = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL",
}

// capabilities is the mask of names.
const capabilities = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FSETID | 1<<unix.CAP_FOWNER |
	1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETFCAP | 1<<unix.CAP_SETPCAP |
	1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_SYS_CHROOT | 1<<unix.CAP_KILL

var counter atomic.Int64

// container is a container that runc runs, with one process.
type container struct {
	id, fsb, output string
	pid             int
	ended           chan unix.WaitStatus
}

// workspace returns a directory with a short path, for a socket, on a file system that can hold an overlay.
func workspace(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "fsb-init-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// run starts a container with the spec's process. Its output goes into a file.
func run(t testing.TB, s *specs.Spec) *container {
	t.Helper()
	dir := workspace(t)
	c := &container{id: fmt.Sprintf("fsb-init-%d-%d", os.Getpid(), counter.Add(1)), output: filepath.Join(dir, "output"), ended: make(chan unix.WaitStatus, 1)}
	s.Linux.CgroupsPath = cgroup + "/" + c.id
	raw, err := json.Marshal(s)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600))
	output, err := os.Create(c.output)
	require.NoError(t, err)
	defer func() { _ = output.Close() }()
	cmd := exec.Command("runc", "--root", filepath.Join(dir, "runc"), "run", "--detach", "--bundle", dir, "--pid-file", filepath.Join(dir, "pid"), c.id)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Run(); err != nil {
		out, _ := os.ReadFile(c.output)
		t.Fatalf("runc: %v: %s", err, out)
	}
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	require.NoError(t, err)
	c.pid, err = strconv.Atoi(string(pid))
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		var status unix.WaitStatus
		for {
			if _, err := unix.Wait4(c.pid, &status, 0, nil); err != unix.EINTR {
				break
			}
		}
		c.ended <- status
	}()
	t.Cleanup(func() {
		_ = unix.Kill(c.pid, unix.SIGKILL)
		<-done
		out, err := exec.Command("runc", "--root", filepath.Join(dir, "runc"), "delete", "--force", c.id).CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
	return c
}

// wait returns the exit status of the container's process.
func (c *container) wait(t testing.TB) unix.WaitStatus {
	t.Helper()
	select {
	case status := <-c.ended:
		return status
	case <-time.After(testkit.Timeout):
		t.Fatalf("container %s does not end", c.id)
		return 0
	}
}

// text returns the container's output.
func (c *container) text(t testing.TB) string {
	t.Helper()
	raw, err := os.ReadFile(c.output)
	require.NoError(t, err)
	return string(raw)
}

// spec returns what cold sandboxes and slots have in common.
func spec(root string, process *specs.Process, mounts ...specs.Mount) *specs.Spec {
	return &specs.Spec{
		Version: "1.0.2", Root: &specs.Root{Path: root}, Process: process, Hostname: "box",
		Mounts: append([]specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
			{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		}, mounts...),
		Linux: &specs.Linux{
			Namespaces:    []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}},
			Resources:     &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			MaskedPaths:   []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug", "/proc/scsi", "/proc/interrupts", "/sys/firmware"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}

// start runs a slot. Its root is read-only and shared by all slots.
func start(t testing.TB) *container {
	t.Helper()
	root, fsb := filepath.Join(built, "root"), workspace(t)
	require.NoError(t, os.WriteFile(filepath.Join(fsb, "hostname"), []byte("box\n"), 0o644))
	process := &specs.Process{
		Args: []string{"/sandbox-init"}, Env: claim.Environment(), Cwd: "/",
		Capabilities: &specs.LinuxCapabilities{Bounding: append(names, "CAP_SYS_ADMIN"), Effective: append(names, "CAP_SYS_ADMIN"), Permitted: append(names, "CAP_SYS_ADMIN")},
	}
	s := spec(root, process, specs.Mount{Destination: "/fsb", Type: "bind", Source: fsb, Options: []string{"rbind", "rprivate", "rw", "nosuid", "nodev", "noexec"}})
	s.Root.Readonly = true
	c := run(t, s)
	c.fsb = fsb
	return c
}

func (c *container) connect(t testing.TB) *claim.Conn {
	t.Helper()
	conn, err := claim.Await(deadline(t), filepath.Join(c.fsb, claim.SocketName))
	if err != nil {
		t.Fatalf("%v: %s", err, c.text(t))
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Timeout)
	t.Cleanup(cancel)
	return ctx
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	raw, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, raw, 0o755))
}

// image creates the lower directory of an overlay: busybox, the probe, some files and links.
func image(t testing.TB, change func(dir string)) string {
	t.Helper()
	dir := workspace(t)
	require.NoError(t, os.Chmod(dir, 0o755))
	for _, d := range []string{"bin", "etc", "tmp", "home", "home/app"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	require.NoError(t, os.Chmod(filepath.Join(dir, "tmp"), 0o777))
	copyFile(t, "/bin/busybox", filepath.Join(dir, "bin/sh"))
	copyFile(t, filepath.Join(built, "probe"), filepath.Join(dir, "bin/probe"))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "bin/garbage"), []byte("no program\x00\x01"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "bin/orphan"), []byte("#!/no/such/interpreter\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "data"), []byte("data\n"), 0o644))
	if change != nil {
		change(dir)
	}
	return dir
}

func options(t testing.TB, lower string) []string {
	dir := workspace(t)
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	require.NoError(t, os.Mkdir(upper, 0o755))
	require.NoError(t, os.Mkdir(work, 0o755))
	return []string{"lowerdir=" + lower, "upperdir=" + upper, "workdir=" + work}
}

// mount returns a detached overlay of the image.
func mount(t testing.TB, lower string) int {
	t.Helper()
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	require.NoError(t, err)
	defer func() { _ = unix.Close(fs) }()
	for _, o := range options(t, lower) {
		key, value, _ := strings.Cut(o, "=")
		require.NoError(t, unix.FsconfigSetString(fs, key, value))
	}
	require.NoError(t, unix.FsconfigCreate(fs))
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	require.NoError(t, err)
	var once atomic.Bool
	t.Cleanup(func() {
		if !once.Swap(true) {
			_ = unix.Close(fd)
		}
	})
	return fd
}

// cold runs the process without a slot, with runc.
func cold(t testing.TB, lower string, process *specs.Process, hostname string) *container {
	t.Helper()
	root := workspace(t)
	require.NoError(t, unix.Mount("overlay", root, "overlay", 0, strings.Join(options(t, lower), ",")))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(root, unix.MNT_DETACH)) })
	s := spec(root, process, specs.Mount{Destination: "/etc/hostname", Type: "bind", Source: hostname, Options: []string{"rbind", "rprivate", "ro", "nosuid", "nodev", "noexec"}})
	s.Linux.Seccomp = profile()
	return run(t, s)
}

// newProcess returns a process that is confined as sandboxes are.
func newProcess(uid uint32, args ...string) *specs.Process {
	p := &specs.Process{
		Args: args, Env: []string{"PATH=/nope", "KEY=a value", "PATH=/bin"}, Cwd: "/", NoNewPrivileges: true,
		User:         specs.User{UID: uid, GID: uid, AdditionalGids: []uint32{uid}},
		Capabilities: &specs.LinuxCapabilities{Bounding: names, Effective: names, Permitted: names},
	}
	if uid != 0 {
		p.Capabilities.Effective, p.Capabilities.Permitted = nil, nil
	}
	return p
}

func profile() *specs.LinuxSeccomp {
	p := containerd.DefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: names}}})
	p.Architectures = p.Architectures[:1]
	return p
}

func newClaim(t testing.TB, uid uint32, args ...string) *claim.Claim {
	t.Helper()
	return claimOf(t, newProcess(uid, args...))
}

// claimOf returns the claim for a process of a cold container.
func claimOf(t testing.TB, p *specs.Process) *claim.Claim {
	t.Helper()
	c, err := claim.FromSpec(&specs.Spec{Hostname: "box", Process: p})
	require.NoError(t, err)
	c.Seccomp, err = seccomp.Compile(profile())
	require.NoError(t, err)
	c.Mounts = []claim.Mount{{Destination: "/etc/hostname", Path: "/fsb/hostname", Attributes: claim.MountReadOnly | claim.MountNoSUID | claim.MountNoDev | claim.MountNoExec}}
	return c
}

// clean checks that no process of a container runs.
func (c *container) clean(t testing.TB) {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid))
	if err == nil && !bytes.Contains(raw, []byte(") Z ")) {
		t.Errorf("process %d of %s still runs: %s", c.pid, c.id, raw)
	}
}
