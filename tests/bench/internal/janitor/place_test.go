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

// What is killed is of the place beyond doubt.
func TestHas(t *testing.T) {
	p := janitor.PlaceAt("/run/place", "/var/tmp/place", "/place")
	tests := []struct {
		name, cmdline, cgroups string
		want                   bool
	}{
		{"its containerd", "/bin/containerd/containerd\x00--config\x00/run/place/containerd.toml\x00", "0::/\n", true},
		{"a shim", "/x/containerd-shim-runc-v2\x00-id\x00slot.1\x00-address\x00/run/place/c.sock\x00", "", true},
		{"its etcd", "k8s/etcd\x00--data-dir=/run/place/kube/etcd\x00", "", true},
		{"its janitor", "/x/janitor\x00--kubeconfig\x00/run/place/kube/a\x00", "", true},
		{"a sandbox", "/busybox\x00sleep\x002000000000\x00", "12:pids:/place/pod1/fsb-slot.1\n0::/\n", true},
		{"a sandbox, one hierarchy", "", "0::/place/pod1/fsb-slot.1\n", true},
		{"a process right in its cgroup", "", "0::/place\n", true},
		{"somebody else's containerd", "/bin/containerd\x00--config\x00/etc/containerd.toml\x00", "0::/\n", false},
		{"another run's place", "/bin/containerd\x00--config\x00/run/place2/containerd.toml\x00", "0::/place2/x\n", false},
		{"who looks at its log", "less\x00/run/place/containerd.log\x00", "0::/\n", false},
		{"a cgroup further down", "", "0::/other/place/x\n", false},
		{"a kernel thread", "", "", false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { require.Equal(t, test.want, p.Has(test.cmdline, test.cgroups)) })
	}
}

func TestMountsBelow(t *testing.T) {
	const info = "22 1 0:20 / /run rw - tmpfs tmpfs rw\n23 22 0:21 / /run/place/a rw - overlay overlay rw\n24 22 0:22 / /run/place2/a rw - overlay overlay rw\n" +
		"25 23 0:23 / /run/place/a/b rw - proc proc rw\nshort\n"
	require.Equal(t, []string{"/run/place/a", "/run/place/a/b"}, janitor.MountsBelow(info, "/run/place"))
}

// A run has the place alone, empty, and without anything that one which was killed has left running.
func TestPlace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "place")
	p := janitor.PlaceAt(dir, dir+"-content", "/fsb-bench-test-no-such-cgroup")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "old"), 0o700))
	// It passes for a shim: what counts is how a process is called, and what it is told to work with.
	sleeper := exec.Command("/bin/sh")
	sleeper.Args = []string{"containerd-shim-runc-v2", "-c", "read forever", filepath.Join(dir, "c.sock")}
	stdin, err := sleeper.StdinPipe()
	require.NoError(t, err)
	defer stdin.Close()
	require.NoError(t, sleeper.Start())
	ended := make(chan error, 1)
	go func() { ended <- sleeper.Wait() }()
	require.NoError(t, p.Enter())
	select {
	case err := <-ended:
		require.ErrorContains(t, err, "killed")
	case <-time.After(time.Minute):
		t.Fatal("what was left runs on")
	}
	require.NoDirExists(t, filepath.Join(dir, "old"))
	require.DirExists(t, dir)
	require.DirExists(t, dir+"-content")
	require.ErrorContains(t, janitor.PlaceAt(dir, dir+"-content", "/fsb-bench-test-no-such-cgroup").Enter(), "another run")
	require.NoError(t, p.Leave())
	require.NoDirExists(t, dir)
	require.NoError(t, p.Enter(), "after it was left")
	require.NoError(t, p.Leave())
}
