//go:build integration

package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// built holds the probe, and the root that all slots share, with sandbox-init in it.
var built string

// cgroup is the parent of the containers' cgroups.
const cgroup = "/fsb-init-test"

func TestMain(m *testing.M) {
	// Containers outlive the runc process that starts them; as a subreaper the test process gets their exit status.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	dir, err := build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	built = dir
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		// runc removes each container's cgroup, but not their parent.
		for _, pattern := range []string{"/sys/fs/cgroup" + cgroup, "/sys/fs/cgroup/*" + cgroup} {
			above, _ := filepath.Glob(pattern)
			for _, path := range above {
				_ = unix.Rmdir(path)
			}
		}
		os.Exit(code)
	}))
}

func build() (string, error) {
	if os.Geteuid() != 0 {
		return "", fmt.Errorf("slots need root: run these tests as root")
	}
	for _, tool := range []string{"runc", "/bin/busybox"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("these tests need %s: %w (apt-get install runc busybox-static)", tool, err)
		}
	}
	dir, err := os.MkdirTemp("/var/tmp", "fsb-init-")
	if err != nil {
		return "", err
	}
	for _, name := range []string{"proc", "dev", "sys", "new", "fsb"} {
		if err := os.MkdirAll(filepath.Join(dir, "root", name), 0o755); err != nil {
			return "", err
		}
	}
	for name, pkg := range map[string]string{"root/sandbox-init": ".", "probe": "../../internal/slot/probe"} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(dir, name), pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") //nolint:forbidigo // the tool's own
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("building %s: %w: %s", name, err, out)
		}
	}
	return dir, nil
}
