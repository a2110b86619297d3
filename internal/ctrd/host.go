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

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// stray is a process that belongs to a container.
type stray struct {
	pid int
	// leave says that it is cleaning up: it is waited for, not killed.
	leave bool
}

// removeStrays ends what is left of a container whose task containerd does not know, and removes its cgroup. There is
// such a thing: when the client of a create dies in the middle of it, containerd gives the create up and may leave the
// shim, the OCI runtime and a half-started process. It returns nil at once where no process of the host is seen.
func (r *Remover) removeStrays(ctx context.Context, id, group, cgroup string) error {
	until := r.clock().Now().Add(strayTimeout)
	for {
		left := slices.Concat(r.strays(id), r.idleShim(ctx, group), r.members(cgroup))
		r.kill(left)
		r.removeCgroup(cgroup)
		if len(left) == 0 && !r.cgroupExists(cgroup) {
			return nil
		}
		if r.clock().Now().After(until) {
			return fmt.Errorf("removing what is left of container %s: %d processes stay: %w", id, len(left), errdefs.ErrUnavailable)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("removing what is left of container %s: %w", id, ctx.Err())
		case <-r.clock().After(strayInterval):
		}
	}
}

func (r *Remover) kill(list []stray) {
	for _, s := range list {
		if !s.leave {
			// The process may have ended since: then there is nothing to kill.
			_ = syscall.Kill(s.pid, syscall.SIGKILL)
		}
	}
}

// strays are the container's shim and the OCI runtime that works on it, found by their command lines. The shim that was
// started for a slot is never one: it serves other slots as well, and ends by itself after the last of them.
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
		if ours, leave := belongs(raw, r.Client.DefaultNamespace(), id); ours {
			found = append(found, stray{pid, leave})
		}
	}
	return found
}

// idleShim is the shim of a group of slots if it serves none any more: containerd knows no task in the group, and the shim
// has no child that is about to become one. In doubt it is not.
func (r *Remover) idleShim(ctx context.Context, group string) []stray {
	if group == "" || r.ProcRoot == "" {
		return nil
	}
	var shims []stray
	parents := map[int]bool{}
	entries, err := os.ReadDir(r.ProcRoot)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		parents[r.parent(pid)] = true
		raw, err := os.ReadFile(filepath.Join(r.ProcRoot, e.Name(), "cmdline"))
		if err == nil && isShimOf(raw, r.Client.DefaultNamespace(), group) {
			shims = append(shims, stray{pid: pid})
		}
	}
	shims = slices.DeleteFunc(shims, func(s stray) bool { return parents[s.pid] })
	if len(shims) == 0 || r.groupHasTask(ctx, group) {
		return nil
	}
	return shims
}

// groupHasTask tells whether containerd has a task of any container in the group; true in doubt.
func (r *Remover) groupHasTask(ctx context.Context, group string) bool {
	step, cancel := r.step(ctx)
	defer cancel()
	list, err := r.Client.ContainerService().List(step, fmt.Sprintf("labels.%q==true", identity.KeyManaged))
	if err != nil {
		return true
	}
	running, err := r.Client.TaskService().List(step, &tasks.ListTasksRequest{})
	if err != nil {
		return true
	}
	has := map[string]bool{}
	for _, t := range running.GetTasks() {
		has[t.GetID()] = true
	}
	for _, c := range list {
		if has[c.ID] && c.Spec != nil && parseSpec(c.Spec.GetValue()).Annotations[GroupAnnotation] == group {
			return true
		}
	}
	return false
}

// parent is a process's parent; 0 if it is not known.
func (r *Remover) parent(pid int) int {
	raw, err := os.ReadFile(filepath.Join(r.ProcRoot, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	// The command, in parentheses, may have spaces and parentheses in it.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < 2 {
		return 0
	}
	ppid, err := strconv.Atoi(fields[1])
	if err != nil {
		return 0
	}
	return ppid
}

// isShimOf tells whether a command line is that of the shim that serves a group of slots, which is called like the first.
func isShimOf(cmdline []byte, namespace, group string) bool {
	args := strings.Split(string(bytes.TrimRight(cmdline, "\x00")), "\x00")
	return strings.HasPrefix(filepath.Base(args[0]), "containerd-shim") && hasFlag(args, "-namespace", namespace) && hasFlag(args, "-id", group) &&
		!slices.Contains(args, "delete")
}

func hasFlag(args []string, flag, value string) bool {
	i := slices.Index(args, flag)
	return i > 0 && i+1 < len(args) && args[i+1] == value
}

// belongs tells whether a command line is that of the container's shim, or of the OCI runtime with the container, and
// whether it is removing the container. All of namespace and id must fit, so that no other process is ever meant.
func belongs(cmdline []byte, namespace, id string) (ours, leave bool) {
	args := strings.Split(string(bytes.TrimRight(cmdline, "\x00")), "\x00")
	switch base := filepath.Base(args[0]); {
	case strings.HasPrefix(base, "containerd-shim"):
		leave = slices.Contains(args, "delete")
		return hasFlag(args, "-namespace", namespace) && hasFlag(args, "-id", id) && (leave || !identity.IsSlotID(id)), leave
	case base == "runc" || base == "crun":
		root := slices.Index(args, "--root")
		inNamespace := root > 0 && root+1 < len(args) && filepath.Base(args[root+1]) == namespace
		return inNamespace && args[len(args)-1] == id, slices.Contains(args, "delete") || slices.Contains(args, "kill")
	}
	return false, false
}

// members are the processes in a container's cgroup.
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

// GroupAnnotation in a container's OCI spec names the container in whose shim it was started: of a group of slots, the
// first. containerd's shims know this one of the CRI plugin's.
const GroupAnnotation = "io.kubernetes.cri.sandbox-id"

// spec is what a removal wants to know of an encoded OCI spec.
type spec struct {
	Annotations map[string]string `json:"annotations"`
	Linux       struct {
		CgroupsPath string `json:"cgroupsPath"`
	} `json:"linux"`
}

// parseSpec reads an encoded OCI spec; one that cannot be read says nothing.
func parseSpec(raw []byte) spec {
	var s spec
	if json.Unmarshal(raw, &s) != nil {
		return spec{}
	}
	return s
}

// removeCgroup removes what the OCI runtime may have left of a cgroup, in every hierarchy. Only empty cgroups can be
// removed, so nothing that lives is harmed; a cgroup that is not seen from here is not ours to remove.
func (r *Remover) removeCgroup(path string) {
	for _, dir := range r.cgroupDirs(path) {
		_ = syscall.Rmdir(dir)
	}
}

func (r *Remover) cgroupExists(path string) bool { return len(r.cgroupDirs(path)) > 0 }

// cgroupDirs are the directories of a sandbox's cgroup that exist: one in the unified hierarchy, one for each of the
// old ones. Only a cgroup with our prefix is ever looked at.
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
