package attack

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Program is the path of the program in its image. Every process of a hostile sandbox executes it.
const Program = "/hostile"

func processes() []Attack {
	process := func(name, does, success string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "processes: " + name, Does: does, Success: success}, run: run}
	}
	return []Attack{
		process("see", "lists all processes", "one of another sandbox or of the node is among them", func(*Env) (string, error) {
			for _, pid := range foreign() {
				return fmt.Sprintf("process %d: %s", pid, commandOf(pid)), nil
			}
			return "", errNoneVisible
		}),
		process("signal", "sends signal 0 to every process id that may exist", "one that is not its own exists", func(*Env) (string, error) { return signalAll() }),
		process("trace", "attaches to every process of another by ptrace", "it is attached", func(*Env) (string, error) { return firstForeign(trace) }),
		process("memory", "reads the environment and the memory map of every process of another", "they can be read", func(*Env) (string, error) {
			return firstForeign(func(pid int) (string, error) {
				return first([]string{"environ", "maps"}, func(name string) (string, error) { return readable(procPath(pid, name)) })
			})
		}),
		process("files", "reads the canary through the root of every process", "the canary on the node can be read", func(e *Env) (string, error) {
			return first(all(), func(pid int) (string, error) { return canary(e, procPath(pid, "root")+e.Canary) })
		}),
		process("descriptors", "takes a file descriptor of every process of another by pidfd_getfd", "it has a descriptor", func(*Env) (string, error) { return firstForeign(takeDescriptor) }),
	}
}

var errNoneVisible = errors.New("no process of another can be seen")

func procPath(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// all returns all processes in /proc.
func all() (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// foreign returns the processes that do not execute this program, without the sandbox's own supervisor.
func foreign() (pids []int) {
	for _, pid := range all() {
		if !isOwn(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func isOwn(pid int) bool {
	status, err := os.ReadFile(procPath(pid, "status"))
	if err != nil || bytes.Contains(status, []byte("\nState:\tZ")) || bytes.Contains(status, []byte("\nState:\tX")) {
		return true // it has ended
	}
	if isSupervisor(pid) {
		return true
	}
	own, err := os.Executable()
	if err != nil {
		own = Program
	}
	first, _, _ := strings.Cut(commandOf(pid), " ")
	return first == own || first == Program
}

func commandOf(pid int) string {
	raw, _ := os.ReadFile(procPath(pid, "cmdline"))
	return strings.TrimSpace(strings.ReplaceAll(string(raw), "\x00", " "))
}

// firstForeign tries every process of another that is not a thread of the kernel, which nothing can be done to.
func firstForeign(try func(pid int) (string, error)) (string, error) {
	list := foreign()
	if len(list) == 0 {
		return "", errNoneVisible
	}
	return first(list, func(pid int) (string, error) {
		if commandOf(pid) == "" {
			return "", errors.New("a thread of the kernel")
		}
		return try(pid)
	})
}

// signalAll finds processes that /proc does not show.
func signalAll() (string, error) {
	limit := 4 << 20
	if raw, err := os.ReadFile("/proc/sys/kernel/pid_max"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil {
			limit = n
		}
	}
	own := map[int]bool{}
	for _, pid := range all() {
		if !isOwn(pid) {
			continue
		}
		threads, _ := os.ReadDir(procPath(pid, "task"))
		for _, t := range threads {
			if id, err := strconv.Atoi(t.Name()); err == nil {
				own[id] = true
			}
		}
		own[pid] = true
	}
	for pid := 1; pid <= limit; pid++ {
		if own[pid] || unix.Kill(pid, 0) != nil {
			continue
		}
		if pid != unix.Gettid() && !isThreadOfOwn(pid) {
			return fmt.Sprintf("process %d can be signaled: %s", pid, commandOf(pid)), nil
		}
	}
	return "", fmt.Errorf("none of %d ids is a process of another", limit)
}

// isThreadOfOwn reports whether an id is a thread that this program has started meanwhile, or a process that has ended.
func isThreadOfOwn(id int) bool {
	raw, err := os.ReadFile(procPath(id, "status"))
	if err != nil {
		return unix.Kill(id, 0) != nil
	}
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "Tgid:"); ok {
			group, err := strconv.Atoi(strings.TrimSpace(value))
			return err == nil && isOwn(group)
		}
	}
	return false
}

// ptraceSeize attaches without stopping the process.
const ptraceSeize = 0x4206

// trace attaches to a process. The kernel detaches when this one ends.
func trace(pid int) (string, error) {
	runtime.LockOSThread()
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(pid), 0, 0, 0, 0); errno != 0 {
		return "", errno
	}
	return fmt.Sprintf("process %d is traced: %s", pid, commandOf(pid)), nil
}

func takeDescriptor(pid int) (string, error) {
	handle, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(handle) }()
	for fd := range 16 {
		var taken int
		if taken, err = unix.PidfdGetfd(handle, fd, 0); err == nil {
			_ = unix.Close(taken)
			return fmt.Sprintf("descriptor %d of process %d: %s", fd, pid, commandOf(pid)), nil
		}
	}
	return "", err
}
