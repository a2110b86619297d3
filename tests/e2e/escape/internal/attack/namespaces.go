package attack

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// namespace is a kind of namespace.
type namespace struct {
	name string
	flag uintptr
}

func (n namespace) String() string { return n.name }

func namespaceKinds() []namespace {
	return []namespace{
		{"user", unix.CLONE_NEWUSER}, {"mnt", unix.CLONE_NEWNS}, {"pid", unix.CLONE_NEWPID}, {"net", unix.CLONE_NEWNET},
		{"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS}, {"cgroup", unix.CLONE_NEWCGROUP},
	}
}

func namespaces() []Attack {
	attack := func(name, does, success string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "namespaces: " + name, Does: does, Success: success}, run: run}
	}
	return []Attack{
		attack("a new user namespace", "starts a process in a user namespace, in which it has all capabilities", "the process runs", func(*Env) (string, error) {
			return startIn(namespaceKinds()[0])
		}),
		attack("other new namespaces", "starts a process in a mount, PID, network, IPC, UTS or cgroup namespace", "the process runs", func(*Env) (string, error) {
			return first(namespaceKinds()[1:], startIn)
		}),
		attack("unshare", "leaves its namespaces", "the kernel looks at the arguments", func(*Env) (string, error) {
			return first(namespaceKinds(), func(n namespace) (string, error) {
				// A thread among others may not, so that the kernel does nothing in any case.
				_, _, errno := unix.RawSyscall(unix.SYS_UNSHARE, n.flag|unix.CLONE_VM, 0, 0)
				return reached("unshare", errno)
			})
		}),
		attack("enter", "enters the namespaces of every process that it can see", "it has entered one", func(*Env) (string, error) {
			return first(all(), enter)
		}),
		attack("IPC of others", "looks for shared memory, semaphores and message queues of others", "there is one", func(*Env) (string, error) {
			return first([]string{"/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"}, entriesOf)
		}),
		attack("ids of the node", "compares its user ids with those of the node", "uid 0 of the sandbox is uid 0 of the node", func(*Env) (string, error) {
			return sharedIDs()
		}),
	}
}

// ChildArg makes the program end at once. It is what an attack starts in a namespace.
const ChildArg = "end"

func startIn(n namespace) (string, error) {
	cmd := exec.Command("/proc/self/exe", ChildArg)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: n.flag}
	return done(cmd.Run(), "a process has run in another %s namespace", n)
}

func enter(pid int) (string, error) {
	return first(namespaceKinds(), func(n namespace) (string, error) {
		fd, err := unix.Open(procPath(pid, "ns/"+n.name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		defer func() { _ = unix.Close(fd) }()
		return done(unix.Setns(fd, int(n.flag)), "it is in the %s namespace of process %d", n, pid)
	})
}

// entriesOf returns evidence if a table has an entry below its headline.
func entriesOf(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	if len(lines) > 1 {
		return path + ": " + strings.Join(strings.Fields(lines[1]), " "), nil
	}
	return "", errors.New("there is none")
}

func sharedIDs() (string, error) {
	raw, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return "", suite.Brokenf("reading the ids: %w", err)
	}
	fields := strings.Fields(string(raw))
	if len(fields) != 3 || fields[0] != "0" || fields[1] != "0" {
		return "", fmt.Errorf("the ids are mapped: %s", strings.Join(fields, " "))
	}
	return "the map of ids is " + strings.Join(fields, " "), nil
}
