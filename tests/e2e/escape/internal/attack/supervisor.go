package attack

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// supervised is the first process of a sandbox: it belongs to the sandbox, and starts processes for those who may use it.
const supervised = 1

// isSupervisor reports whether a process is the sandbox's supervisor.
func isSupervisor(pid int) bool {
	comm, err := os.ReadFile(procPath(pid, "comm"))
	return err == nil && pid == supervised && string(bytes.TrimSpace(comm)) == "sandbox-init"
}

// supervisor attacks the process that carries out what users ask for: who takes it over is every user of the sandbox.
func supervisor() []Attack {
	supervisor := func(name, does, success string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "supervisor: " + name, Does: does, Success: success}, run: run}
	}
	kill := supervisor("kill", "sends every signal to the first process", "it is stopped", func(*Env) (string, error) {
		return killSupervisor()
	})
	kill.Unprovable = "the first process is the node's in the open container"
	sockets := supervisor("sockets", "connects to the sockets that the first process listens on, by path and by descriptor", "one accepts", func(*Env) (string, error) {
		return first([]string{"/run/fast-sandbox/claim.sock", procPath(supervised, "fd/5"), procPath(supervised, "root/claim.sock")}, dialUnix)
	})
	sockets.Unprovable = "no process of the open container listens there"
	on := func(name, does, success string, try func(pid int) (string, error)) Attack {
		return supervisor(name, does, success, func(*Env) (string, error) { return onSupervisor(try) })
	}
	return []Attack{
		kill,
		on("trace", "attaches to the first process by ptrace", "it is attached", trace),
		on("memory", "opens the memory of the first process", "it is open", func(pid int) (string, error) {
			fd, err := unix.Open(procPath(pid, "mem"), unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return "", err
			}
			_ = unix.Close(fd)
			return "it is open for reading and writing", nil
		}),
		on("environment", "reads the environment, the memory map and the auxiliary vector of the first process", "one can be read", func(pid int) (string, error) {
			return first([]string{"environ", "maps", "auxv"}, func(name string) (string, error) { return readable(procPath(pid, name)) })
		}),
		on("descriptors", "takes the file descriptors of the first process by pidfd_getfd, and by their links", "it has one", func(pid int) (string, error) {
			if evidence, err := takeDescriptor(pid); err == nil {
				return evidence, nil
			}
			links, _ := filepath.Glob(procPath(pid, "fd/*"))
			return first(append(links, procPath(pid, "fd/3")), os.Readlink)
		}),
		sockets,
	}
}

var errNoSupervisor = errors.New("the first process is not the supervisor of a sandbox")

// onSupervisor tries the first process. In the open container, which has no supervisor, the processes of the node stand in for it. Where
// the user's program is the first process itself, as with the handler runc, there is nothing to attack.
func onSupervisor(try func(pid int) (string, error)) (string, error) {
	switch {
	case isSupervisor(supervised):
		return try(supervised)
	case isOwn(supervised):
		return "", errNoSupervisor
	}
	return firstForeign(try)
}

// dialUnix connects to a socket in the file system.
func dialUnix(path string) (string, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return "", err
	}
	return path + " accepts", nil
}

// killSupervisor sends signals. One that ended the supervisor would end this process.
func killSupervisor() (string, error) {
	if !isSupervisor(supervised) {
		return "", errNoSupervisor
	}
	for sig := unix.Signal(1); sig <= 64; sig++ {
		_ = unix.Kill(supervised, sig)
	}
	<-time.After(100 * time.Millisecond)
	status, err := os.ReadFile(procPath(supervised, "status"))
	if err != nil {
		return "", fmt.Errorf("reading its status: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "State:\t"); ok && (value[0] == 'T' || value[0] == 't') {
			return "it is stopped", nil
		}
	}
	return "", errors.New("it runs on after 64 signals")
}
