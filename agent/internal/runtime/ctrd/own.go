package ctrd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

// LimitOwnMemory bounds the memory of the agent's own container, and returns the bound in force, which is lower if the container
// had a lower one. The container's limit in its Pod cannot do that: with it the kubelet bounds the Pod's cgroup, too, and the
// sandboxes are in that. NotFound: this process is in no container of the Pod.
func (r *Runtime) LimitOwnMemory(ctx context.Context, bytes int64) (int64, error) {
	p, err := r.pods.find(ctx)
	if err != nil {
		return 0, err
	}
	if p.cgroupParent == "" {
		return 0, fmt.Errorf("the agent's Pod has no cgroup: %w", errdefs.ErrNotFound)
	}
	parent, file := filepath.Join(r.config.CgroupRoot, "memory"), "memory.limit_in_bytes"
	if cgroup.Unified() {
		parent, file = r.config.CgroupRoot, "memory.max"
	}
	parent = filepath.Join(parent, filepath.Dir(node.CgroupPath(p.cgroup("agent"))))
	dir, err := cgroupOf(os.Getpid(), parent)
	if err != nil {
		return 0, err
	}
	return lower(filepath.Join(dir, file), bytes)
}

// cgroupOf returns the directory below a Pod's cgroup of the container that a process is in.
func cgroupOf(pid int, parent string) (string, error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return "", fmt.Errorf("reading the cgroups of the agent's Pod: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() || strings.HasPrefix(e.Name(), shared.CgroupPrefix) {
			continue
		}
		dir := filepath.Join(parent, e.Name())
		procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err == nil && slices.Contains(strings.Fields(string(procs)), strconv.Itoa(pid)) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no container of the agent's Pod has process %d: %w", pid, errdefs.ErrNotFound)
}

// lower writes a bound to a file of a cgroup unless the file has a lower one, and returns the bound in force.
func lower(file string, bytes int64) (int64, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("reading the limit of the agent's container: %w", err)
	}
	if now, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64); err == nil && now <= bytes {
		return now, nil // "max" is no number
	}
	if err := os.WriteFile(file, []byte(strconv.FormatInt(bytes, 10)), 0); err != nil {
		return 0, fmt.Errorf("limiting the memory of the agent's container: %w", err)
	}
	return bytes, nil
}
