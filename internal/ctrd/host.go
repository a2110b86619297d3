package ctrd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// stray is a process that belongs to a container.
type stray struct {
	pid int
	// wait reports whether it is cleaning up: then it is not killed.
	wait bool
}

// removeStrays ends the processes of a container whose task containerd does not know, and removes its cgroup. When the client of
// a create ends before the create has, containerd cancels the create and may leave the shim, the OCI runtime and a process that
// is not completely started. It returns nil at once if the host's processes are not visible.
func (r *Remover) removeStrays(ctx context.Context, id, cgroup string) error {
	until := r.clock().Now().Add(strayTimeout)
	for {
		left := slices.Concat(r.strays(id), r.members(cgroup))
		kill(left)
		r.removeCgroup(cgroup)
		if len(left) == 0 && !r.cgroupExists(cgroup) {
			return nil
		}
		if r.clock().Now().After(until) {
			return fmt.Errorf("ending the processes of container %s: %d are left: %w", id, len(left), errdefs.ErrUnavailable)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("ending the processes of container %s: %w", id, ctx.Err())
		case <-r.clock().After(strayInterval):
		}
	}
}

// kill kills the processes that are not cleaning up.
func kill(list []stray) {
	for _, s := range list {
		if !s.wait {
			// The process may have ended meanwhile.
			_ = syscall.Kill(s.pid, syscall.SIGKILL)
		}
	}
}

// strays returns the container's shim and its OCI runtime process, found by their command lines. A slot's shim is never
// returned: it may serve other slots. endShim ends it after the last of them.
func (r *Remover) strays(id string) []stray {
	if r.ProcRoot == "" {
		return nil
	}
	entries, err := os.ReadDir(r.ProcRoot)
	if err != nil {
		return nil
	}
	var found []stray
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(r.ProcRoot, e.Name(), "cmdline"))
		if err != nil {
			continue
		}
		if ours, wait := belongs(raw, r.Client.DefaultNamespace(), id); ours {
			found = append(found, stray{pid, wait})
		}
	}
	return found
}

func hasFlag(args []string, flag, value string) bool {
	i := slices.Index(args, flag)
	return i > 0 && i+1 < len(args) && args[i+1] == value
}

// belongs reports whether a command line is that of the container's shim, or of the OCI runtime with the container, and
// whether it is removing the container. Namespace and id must match exactly, so that no other process is killed.
func belongs(cmdline []byte, namespace, id string) (ours, wait bool) {
	args := strings.Split(string(bytes.TrimRight(cmdline, "\x00")), "\x00")
	switch base := filepath.Base(args[0]); {
	case strings.HasPrefix(base, "containerd-shim"):
		wait = slices.Contains(args, "delete")
		return hasFlag(args, "-namespace", namespace) && hasFlag(args, "-id", id) && (wait || !identity.IsSlotID(id)), wait
	case base == "runc" || base == "crun":
		root := slices.Index(args, "--root")
		inNamespace := root > 0 && root+1 < len(args) && filepath.Base(args[root+1]) == namespace
		return inNamespace && args[len(args)-1] == id, slices.Contains(args, "delete") || slices.Contains(args, "kill")
	}
	return false, false
}

// members returns the processes in a container's cgroup.
func (r *Remover) members(path string) []stray {
	var found []stray
	for _, dir := range r.cgroupDirs(path) {
		raw, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(string(raw)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 1 {
				found = append(found, stray{pid: pid})
			}
		}
	}
	return found
}

// GroupAnnotation in a container's OCI spec names the container in whose shim it was started: the first of a group of slots. It
// is an annotation of the CRI plugin that containerd's shims interpret.
const GroupAnnotation = "io.kubernetes.cri.sandbox-id"

// spec is the part of an OCI spec that a removal needs.
type spec struct {
	Annotations map[string]string `json:"annotations"`
	Linux       struct {
		CgroupsPath string `json:"cgroupsPath"`
	} `json:"linux"`
}

// parseSpec decodes an OCI spec; one that cannot be decoded is empty.
func parseSpec(raw []byte) spec {
	var s spec
	if json.Unmarshal(raw, &s) != nil {
		return spec{}
	}
	return s
}

// removeCgroup removes what the OCI runtime may have left of a cgroup, in every hierarchy. The kernel removes only empty cgroups,
// so no process is affected. A cgroup that is not visible here is skipped.
func (r *Remover) removeCgroup(path string) {
	for _, dir := range r.cgroupDirs(path) {
		_ = syscall.Rmdir(dir)
	}
}

func (r *Remover) cgroupExists(path string) bool { return len(r.cgroupDirs(path)) > 0 }

// cgroupDirs returns the existing directories of a sandbox's cgroup: one with cgroup v2, one for each controller with v1. Only
// a cgroup with our prefix is considered.
func (r *Remover) cgroupDirs(path string) []string {
	if r.CgroupRoot == "" || !strings.HasPrefix(path, "/") || !strings.HasPrefix(filepath.Base(path), CgroupPrefix) {
		return nil
	}
	var dirs []string
	for _, root := range r.hierarchies() {
		dir := filepath.Join(root, path)
		if _, err := os.Stat(dir); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// CgroupPrefix begins the name of every sandbox's cgroup, which ends in the container's id.
const CgroupPrefix = "fsb-"
