package main

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor"
)

// ownPid is the sandbox's own process in a container of an OCI runtime.
const ownPid = 1

// join supervises a container in which an OCI runtime has executed this process. The runtime has confined it; only the filter may be missing: the
// runtime knows none of a container that was a slot. It returns the exit code.
func join(door string) (code int) {
	c := &channel{shim: noShim, users: -1}
	var err error
	if c.fd, err = connect(door); err != nil {
		return exitNoSocket
	}
	defer func() {
		if r := recover(); r != nil {
			c.fail(&wire.Failure{Detail: "panic"})
			code = exitFailed
		}
	}()
	code, failure := c.join()
	switch failure {
	case nil:
		return code
	case errAbandoned:
		return exitAbandoned
	}
	c.fail(failure)
	return exitFailed
}

func connect(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	}
	return fd, err
}

func (c *channel) join() (code int, failure *wire.Failure) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 0, failed(wire.StageClaim, err, "(access to this process)")
	}
	if failure := dropKeys(); failure != nil {
		return 0, failure
	}
	j, listener, failure := c.receive()
	if failure != nil {
		return 0, failure
	}
	config := supervisor.Config{
		Listener: listenerFD, Trusted: func(fd int) bool { return trusted(fd, false) }, Shim: noShim, Helper: helperFD, Joined: true, Again: j.Again,
		Claim: j.Claim, Main: ownPid, Started: startOf(ownPid),
	}
	if _, err := move(listener, listenerFD); err != nil {
		return 0, failed(wire.StageClaim, err, "(socket)")
	}
	if err := unix.SetNonblock(listenerFD, true); err != nil {
		return 0, failed(wire.StageClaim, err, "(socket)")
	}
	if err := openHelper(layout.ProgramsDir + layout.HelperPath); err != nil {
		return 0, failed(wire.StageLookup, err, layout.HelperPath)
	}
	if config.Reaper, failure = newReaper(); failure != nil {
		return 0, failure
	}
	// What a process leaves behind is this one's to reap, as it would be that of pid 1.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, failed(wire.StageProcess, err, "(reaping)")
	}
	if failure := filterIfNone(j.Claim); failure != nil {
		return 0, failure
	}
	if !c.write(wire.TypeReady, nil) {
		return 0, errAbandoned
	}
	_ = unix.Close(c.fd)
	code, err := supervisor.Run(config)
	if err != nil {
		return exitFailed, nil //nolint:nilerr // the agent has its answer: the exit code is what there is
	}
	return code, nil
}

// receive greets the agent, and takes what it has for this process.
func (c *channel) receive() (j *wire.Join, listener int, failure *wire.Failure) {
	if !c.hello() {
		return nil, -1, errAbandoned
	}
	payload, rights, failure := c.read(wire.TypeJoin, make([]byte, unix.CmsgSpace(4)))
	if failure != nil {
		return nil, -1, failure
	}
	j, err := wire.DecodeJoin(payload)
	if err != nil {
		return nil, -1, err.(*wire.Failure) //nolint:errorlint // DecodeJoin returns nothing else
	}
	fds, err := descriptors(rights)
	if err != nil {
		return nil, -1, failed(wire.StageClaim, err, "(file descriptors)")
	}
	if len(fds) != 1 {
		return nil, -1, &wire.Failure{Stage: wire.StageClaim, Detail: "(no socket)"}
	}
	return j, fds[0], nil
}

func newReaper() (*supervisor.Reaper, *wire.Failure) {
	r, err := supervisor.NewReaper(endedFD, moreFD)
	if err != nil {
		return nil, failed(wire.StageProcess, err, "(reaping)")
	}
	return r, nil
}

// filterIfNone loads the filter in all threads unless there is one.
func filterIfNone(c *wire.Claim) *wire.Failure {
	if mode, err := unix.PrctlRetInt(unix.PR_GET_SECCOMP, 0, 0, 0, 0); err != nil || mode != 0 {
		return nil //nolint:nilerr // a kernel without filters: the runtime would have refused the container
	}
	c.SeccompFlags |= unix.SECCOMP_FILTER_FLAG_TSYNC
	return filter(c)
}

// startOf returns when a process was started, in nanoseconds of the Unix time; zero if that is not known.
func startOf(pid int) uint64 {
	const tick = 1e7 // of USER_HZ, which is 100 wherever Go runs
	const field = 20 // starttime, counted from what follows the name
	fd, err := proc("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY)
	if err != nil {
		return 0
	}
	defer func() { _ = unix.Close(fd) }()
	var b [1024]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return 0
	}
	stat := string(b[:n])
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < field {
		return 0
	}
	ticks, err := strconv.ParseUint(fields[field-1], 10, 64)
	if err != nil {
		return 0
	}
	var boot unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil {
		return 0
	}
	return now() - uint64(boot.Nano()) + ticks*tick
}

// doorOf returns the path of the agent's socket if this process is to join a container. Package os, which has the environment as well, is not used.
func doorOf() string {
	door, _ := syscall.Getenv(layout.DoorVariable)
	return door
}
