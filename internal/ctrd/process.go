package ctrd

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// processes finds the host's processes that belong to containers, by their command lines. It never ends one: its callers do.
type processes struct {
	// root is where processes are visible (`/proc`); empty for none.
	root string
	// namespace of containerd in which the containers are.
	namespace string
}

// stray is a process that belongs to a container.
type stray struct {
	pid int
	// wait reports whether it is cleaning up: then it is not killed.
	wait bool
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
func (p processes) strays(id string) []stray {
	if p.root == "" {
		return nil
	}
	entries, err := os.ReadDir(p.root)
	if err != nil {
		return nil
	}
	var found []stray
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(p.root, e.Name(), "cmdline"))
		if err != nil {
			continue
		}
		if ours, wait := belongs(raw, p.namespace, id); ours {
			found = append(found, stray{pid, wait})
		}
	}
	return found
}

// shims returns the shims that were started with one of these containers.
func (p processes) shims(ids ...string) []int {
	if p.root == "" {
		return nil
	}
	entries, err := os.ReadDir(p.root)
	if err != nil {
		return nil
	}
	var out []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && p.isShim(pid, ids...) {
			out = append(out, pid)
		}
	}
	return out
}

// isShim reports whether a process is a shim that was started with one of these containers.
func (p processes) isShim(pid int, ids ...string) bool {
	raw, err := os.ReadFile(filepath.Join(p.root, strconv.Itoa(pid), "cmdline"))
	return err == nil && slices.ContainsFunc(ids, func(id string) bool { return isShimOf(raw, p.namespace, id) })
}

// hasChild reports whether a process has a child; true in doubt.
func (p processes) hasChild(pid int) bool {
	entries, err := os.ReadDir(p.root)
	return err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool {
		child, err := strconv.Atoi(e.Name())
		return err == nil && parent(p.root, child) == pid
	})
}

// parent returns a process's parent; 0 if it is unknown.
func parent(procRoot string, pid int) int {
	raw, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	// The command, in parentheses, may itself contain spaces and parentheses.
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

// isShimOf reports whether a command line is that of the shim of a group of slots, which has the id of the first.
func isShimOf(cmdline []byte, namespace, group string) bool {
	args := strings.Split(string(bytes.TrimRight(cmdline, "\x00")), "\x00")
	return strings.HasPrefix(filepath.Base(args[0]), "containerd-shim") && hasFlag(args, "-namespace", namespace) && hasFlag(args, "-id", group) &&
		!slices.Contains(args, "delete")
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
