package ctrd

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// processes finds the host's processes that belong to containers. It never ends one: its callers do.
//
// A process chooses its own command line, and an image the path of its programs, so neither identifies a shim. A match needs the
// program that the kernel executes (/proc/PID/exe), and a process in the PID namespace that root shows: a sandbox has one of
// its own and cannot leave it. Only then is the command line read, for the container's id, which is nowhere else.
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

// strays returns the container's shim and its OCI runtime process. A slot's shim is never returned: it may serve other slots. endShim
// ends it after the last of them.
func (p processes) strays(id string) []stray {
	var found []stray
	for _, pid := range p.pids() {
		var wait bool
		ours := func(c command) (ours bool) {
			ours, wait = c.belongs(p.namespace, id)
			return ours
		}
		if p.is(pid, ours) {
			found = append(found, stray{pid, wait})
		}
	}
	return found
}

// shims returns the shims that were started with one of these containers.
func (p processes) shims(ids ...string) []int {
	return slices.DeleteFunc(p.pids(), func(pid int) bool { return !p.isShim(pid, ids...) })
}

// isShim reports whether a process is a shim that was started with one of these containers.
func (p processes) isShim(pid int, ids ...string) bool {
	return p.is(pid, func(c command) bool {
		return slices.ContainsFunc(ids, func(id string) bool { return c.isShimOf(p.namespace, id) })
	})
}

// pids returns all processes.
func (p processes) pids() []int {
	if p.root == "" {
		return nil
	}
	entries, err := os.ReadDir(p.root)
	if err != nil {
		return nil
	}
	var out []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, pid)
		}
	}
	return out
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
