package janitor_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/janitor"
)

// Only processes of the workspace are killed.
func TestHas(t *testing.T) {
	p := janitor.WorkspaceAt("/run/bench", "/var/tmp/bench", "/bench")
	tests := []struct {
		name, exe, cmdline, cgroups string
		want                        bool
	}{
		{"its containerd", "/bin/containerd/containerd", "/bin/containerd/containerd\x00--config\x00/run/bench/containerd.toml\x00", "0::/\n", true},
		{"a shim", "/x/containerd-shim-runc-v2", "/x/containerd-shim-runc-v2\x00-id\x00slot.1\x00-address\x00/run/bench/c.sock\x00", "", true},
		{"its etcd", "/bin/fsb-local", "k8s/etcd\x00--data-dir=/run/bench/kube/etcd\x00", "", true},
		{"its janitor", "/x/janitor (deleted)", "/x/janitor\x00--kubeconfig\x00/run/bench/kube/a\x00", "", true},
		{"a sandbox", "/busybox", "/busybox\x00sleep\x002000000000\x00", "12:pids:/bench/pod1/fsb-slot.1\n0::/\n", true},
		{"a sandbox, one hierarchy", "", "", "0::/bench/pod1/fsb-slot.1\n", true},
		{"a process right in its cgroup", "", "", "0::/bench\n", true},
		{"another containerd", "/bin/containerd", "/bin/containerd\x00--config\x00/etc/containerd.toml\x00", "0::/\n", false},
		{"the workspace of another run", "/bin/containerd", "/bin/containerd\x00--config\x00/run/bench2/containerd.toml\x00", "0::/bench2/x\n", false},
		{"a reader of its log", "/bin/less", "less\x00/run/bench/containerd.log\x00", "0::/\n", false},
		{"one that calls itself containerd", "/bin/less", "containerd\x00/run/bench/containerd.log\x00", "0::/\n", false},
		{"a cgroup further down", "", "", "0::/other/bench/x\n", false},
		{"a kernel thread", "", "", "", false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { require.Equal(t, test.want, p.Has(test.exe, test.cmdline, test.cgroups)) })
	}
}

func TestMountsBelow(t *testing.T) {
	const info = "22 1 0:20 / /run rw - tmpfs tmpfs rw\n23 22 0:21 / /run/bench/a rw - overlay overlay rw\n24 22 0:22 / /run/bench2/a rw - overlay overlay rw\n" +
		"25 23 0:23 / /run/bench/a/b rw - proc proc rw\nshort\n"
	require.Equal(t, []string{"/run/bench/a", "/run/bench/a/b"}, janitor.MountsBelow(info, "/run/bench"))
}

// A run has the workspace to itself: empty, and without processes that a killed run left.
func TestWorkspace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "workspace")
	p := janitor.WorkspaceAt(dir, dir+"-content", "/fsb-bench-test-no-such-cgroup")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "old"), 0o700))
	// It is taken for a shim: a process is recognized by its program and its arguments.
	shell, err := os.ReadFile("/bin/sh")
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), "containerd-shim-runc-v2")
	require.NoError(t, os.WriteFile(program, shell, 0o700))
	sleeper := exec.Command(program, "-c", "read forever", filepath.Join(dir, "c.sock"))
	stdin, err := sleeper.StdinPipe()
	require.NoError(t, err)
	defer stdin.Close()
	require.NoError(t, sleeper.Start())
	ended := make(chan error, 1)
	go func() { ended <- sleeper.Wait() }()
	require.NoError(t, p.Acquire())
	select {
	case err := <-ended:
		require.ErrorContains(t, err, "killed")
	case <-time.After(time.Minute):
		t.Fatal("the process that was left still runs")
	}
	require.NoDirExists(t, filepath.Join(dir, "old"))
	require.DirExists(t, dir)
	require.DirExists(t, dir+"-content")
	require.ErrorContains(t, janitor.WorkspaceAt(dir, dir+"-content", "/fsb-bench-test-no-such-cgroup").Acquire(), "another run")
	require.NoError(t, p.Release())
	require.NoDirExists(t, dir)
	require.NoError(t, p.Acquire(), "after it was left")
	require.NoError(t, p.Release())
}
