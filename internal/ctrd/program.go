package ctrd

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// command is what a process executes.
type command struct {
	// program is the base name of the executed file.
	program string
	// args is the command line. It is the process's own word.
	args []string
}

// deleted ends the path of an executed file that was replaced meanwhile, for instance by an upgrade.
const deleted = " (deleted)"

// is reports whether a process of this PID namespace executes a wanted command. The kernel does not show the program of a process
// that has capabilities which this one lacks, unless this one has CAP_SYS_PTRACE, which an agent does not. Then the command line
// counts if the process is root of the node, which has no use for pretending.
func (p processes) is(pid int, wanted func(command) bool) bool {
	dir := filepath.Join(p.root, strconv.Itoa(pid))
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	hidden := errors.Is(err, fs.ErrPermission)
	if err != nil && !hidden {
		return false // a thread of the kernel, or it has ended
	}
	c := command{program: filepath.Base(strings.TrimSuffix(exe, deleted))}
	if !hidden && !c.isShim() && !c.isRuntime() {
		return false
	}
	raw, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return false
	}
	c.args = strings.Split(string(bytes.TrimRight(raw, "\x00")), "\x00")
	if hidden {
		c.program = filepath.Base(c.args[0])
	}
	if !wanted(c) {
		return false
	}
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	return err == nil && inSameNamespace(status) && (!hidden || isNodeRoot(status))
}

// inSameNamespace reports whether a process, by its /proc/PID/status, is in the PID namespace of that /proc. One further in has
// a second number there.
func inSameNamespace(status []byte) bool { return len(statusField(status, "NSpid")) == 1 }

// isNodeRoot reports whether a process, by its /proc/PID/status, has the user id 0 throughout and CAP_SYS_ADMIN.
func isNodeRoot(status []byte) bool {
	const sysAdmin = 1 << 21
	ids, caps := statusField(status, "Uid"), statusField(status, "CapEff")
	if len(ids) == 0 || len(caps) != 1 || slices.ContainsFunc(ids, func(id string) bool { return id != "0" }) {
		return false
	}
	set, err := strconv.ParseUint(caps[0], 16, 64)
	return err == nil && set&sysAdmin != 0
}

// statusField returns the values of a field of a /proc/PID/status.
func statusField(status []byte, name string) []string {
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.Fields(rest)
		}
	}
	return nil
}

func (c command) isShim() bool { return strings.HasPrefix(c.program, "containerd-shim") }

func (c command) isRuntime() bool { return c.program == "runc" || c.program == "crun" }

// isShimOf reports whether the command is the shim of a group of slots, which has the id of the first.
func (c command) isShimOf(namespace, group string) bool {
	return c.isShim() && c.hasFlag("-namespace", namespace) && c.hasFlag("-id", group) && !slices.Contains(c.args, "delete")
}

func (c command) hasFlag(flag, value string) bool {
	i := slices.Index(c.args, flag)
	return i > 0 && i+1 < len(c.args) && c.args[i+1] == value
}

// belongs reports whether the command is the container's shim, or the OCI runtime with the container, and whether it is removing
// the container. Namespace and id must match exactly, so that no other process is killed.
func (c command) belongs(namespace, id string) (ours, wait bool) {
	switch {
	case c.isShim():
		wait = slices.Contains(c.args, "delete")
		return c.hasFlag("-namespace", namespace) && c.hasFlag("-id", id) && (wait || !identity.IsSlotID(id)), wait
	case c.isRuntime():
		root := slices.Index(c.args, "--root")
		inNamespace := root > 0 && root+1 < len(c.args) && filepath.Base(c.args[root+1]) == namespace
		return inNamespace && c.args[len(c.args)-1] == id, slices.Contains(c.args, "delete") || slices.Contains(c.args, "kill")
	}
	return false, false
}
