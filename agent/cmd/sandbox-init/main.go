// Command sandbox-init is pid 1 of a slot: a container without an image that an agent has started ahead of time. It waits
// for one claim on its socket, builds the root file system from the mounts that come with it, and confines itself as the
// claim requires. In a container of our shim it then starts the claim's command and stays as the supervisor of the sandbox. In
// one of an OCI runtime it executes the command itself, and nothing of it is left: no memory, file descriptor, mount,
// variable or capability. The shim also starts it for each process that containerd adds to a container: it confines itself in the
// same way, and executes the process. An agent has an OCI runtime start it in a container that runs, to join it as its supervisor.
//
// A host runs many of it, which mostly wait: it imports neither os, net nor fmt. It runs on one locked thread, because
// credentials, capabilities and filters belong to threads. It uses the raw system calls of golang.org/x/sys/unix, and of those of
// package syscall that act on every thread only one, to confine the others.
//
// It exits with 125 if the agent closed the connection before go, 126 if the claim failed, which it reports to the agent, and
// 127 if it could not wait for a claim.
package main

import (
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

const (
	socket = "/fsb/claim.sock"

	exitAbandoned = 125
	exitFailed    = 126
	exitNoSocket  = 127
)

func main() {
	runtime.LockOSThread()
	shim, users := noShim, -1
	switch task() {
	case wire.TypeExec:
		unix.Exit(execute(&channel{fd: wire.SetupFD, shim: noShim, users: -1}))
	case 0:
		if door := doorOf(); door != "" {
			unix.Exit(join(door))
		}
	case wire.TypeSetup:
		var code int
		if users, code = setup(); code != 0 {
			unix.Exit(code)
		}
		shim = shimFD
	}
	mapped := users >= 0
	listener, err := listen(socket)
	var reaper *supervisor.Reaper
	if err == nil && shim != noShim {
		if listener, err = move(listener, listenerFD); err == nil {
			err = openHelper(layout.HelperPath)
		}
		if err == nil {
			reaper, err = supervisor.NewReaper(endedFD, moreFD)
		}
	}
	fd := -1
	if err == nil {
		fd, err = accept(listener, mapped)
	}
	if err != nil {
		// This goes to the slot's log, which no sandbox inherits.
		_, _ = unix.Write(2, []byte("sandbox-init: waiting on "+socket+": "+err.Error()+"\n"))
		unix.Exit(exitNoSocket)
	}
	if shim == noShim {
		_ = unix.Unlink(socket)
		_ = unix.Close(listener)
	}
	unix.Exit(serve(&channel{fd: fd, shim: shim, users: users}, reaper, mapped))
}

// openHelper opens the program of helpers, while the slot's files can be reached.
func openHelper(path string) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err == nil {
		_, err = move(fd, helperFD)
	}
	return err
}

// task returns what a shim of ours has started this process for: to make a slot, or to execute one more process of a container. An OCI
// runtime has started it otherwise, and has made the slot. Package os, which has the arguments, is not used: the first message of the shim
// names the task.
func task() wire.Type {
	family, err := unix.GetsockoptInt(wire.SetupFD, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil || family != unix.AF_UNIX {
		return 0
	}
	var first [1]byte
	for {
		n, _, err := unix.Recvfrom(wire.SetupFD, first[:], unix.MSG_PEEK)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil || n == 0:
			unix.Exit(exitAbandoned)
		}
		return wire.Type(first[0])
	}
}

// serve takes the one claim. It returns the exit code of the sandbox, or that of a claim that failed. Without a shim of ours it becomes the
// claim's command, and returns only if that failed.
func serve(c *channel, reaper *supervisor.Reaper, mapped bool) (code int) {
	defer func() {
		if r := recover(); r != nil {
			c.fail(&wire.Failure{Detail: "panic"})
			code = exitFailed
		}
	}()
	claim, fds, failure := c.claim()
	entered := false
	if failure == nil {
		entered, failure = build(c, claim, fds)
	}
	if failure == nil && !c.ready() {
		failure = errAbandoned
	}
	if failure == nil {
		if c.shim == noShim {
			failure = become(claim, entered)
		} else {
			code, failure = supervise(c, claim, entered, reaper, mapped)
		}
	}
	switch failure {
	case nil:
		return code
	case errAbandoned:
		return exitAbandoned
	}
	c.fail(failure)
	return exitFailed
}

var failed = spawn.Failed
