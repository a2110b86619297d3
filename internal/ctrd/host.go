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
	// leave says that it is cleaning up: it is waited for, not killed.
	leave bool
}

// removeStrays ends what is left of a container whose task containerd does not know, and removes its cgroup. There is
// such a thing: when the client of a create dies in the middle of it, containerd gives the create up and may leave the
// shim, the OCI runtime and a half-started process. It returns nil at once where no process of the host is seen.
func (r *Remover) removeStrays(ctx context.Context, id, cgroup string) error {
	until := r.clock().Now().Add(strayTimeout)
	for {
		left := append(r.strays(id), r.members(cgroup)...)
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

// belongs tells whether a command line is that of the container's shim, or of the OCI runtime with the container, and
// whether it is removing the container. All of namespace and id must fit, so that no other process is ever meant.
func belongs(cmdline []byte, namespace, id string) (ours, leave bool) {
	args := strings.Split(string(bytes.TrimRight(cmdline, "\x00")), "\x00")
	has := func(flag, value string) bool {
		i := slices.Index(args, flag)
		return i > 0 && i+1 < len(args) && args[i+1] == value
	}
	switch base := filepath.Base(args[0]); {
	case strings.HasPrefix(base, "containerd-shim"):
		leave = slices.Contains(args, "delete")
		return has("-namespace", namespace) && has("-id", id) && (leave || !identity.IsSlotID(id)), leave
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

// cgroupsPath reads linux.cgroupsPath of an encoded OCI spec; "" if it has none.
func cgroupsPath(spec []byte) string {
	var s struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if json.Unmarshal(spec, &s) != nil {
		return ""
	}
	return s.Linux.CgroupsPath
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
	path = filepath.Clean(path)
	candidates := []string{filepath.Join(r.CgroupRoot, path)}
	hierarchies, err := os.ReadDir(r.CgroupRoot)
	if err != nil {
		return nil
	}
	for _, h := range hierarchies {
		if h.IsDir() {
			candidates = append(candidates, filepath.Join(r.CgroupRoot, h.Name(), path))
		}
	}
	return slices.DeleteFunc(candidates, func(dir string) bool { _, err := os.Stat(dir); return err != nil })
}

// CgroupPrefix begins the name of every sandbox's cgroup, which ends in the container's id.
const CgroupPrefix = "fsb-"
