package main

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// supervise confines this process as the claim says, starts the claim's command in the same confinement, and stays as pid 1 of the sandbox. It
// returns the sandbox's exit code. The user is the command's alone: this process stays root of the sandbox, to start processes of any user.
//
// What needs a privilege or /proc comes before the command, which has no privilege that its user does not get by an exec. This process keeps its
// own until the command runs, and then gives up what the bounding set lacks, in all threads.
func supervise(c *channel, claim *wire.Claim, entered bool, reaper *supervisor.Reaper, mapped bool) (code int, failure *wire.Failure) {
	if failure := confine(claim); failure != nil {
		return 0, failure
	}
	pid, started := 0, uint64(0)
	if !claim.KeepAlive {
		main := &spawn.Process{
			Args: claim.Args, Env: claim.Env, User: spawn.User{UID: claim.UID, GID: claim.GID, Groups: claim.Groups},
			Ambient: claim.Capabilities.Ambient, Files: [3]int{0, 1, 2},
		}
		if !entered {
			main.Cwd = claim.Cwd
		}
		if pid, failure = spawn.Start(main); failure != nil {
			return 0, failure
		}
		started = now()
	}
	c.informShim(claim)
	_ = unix.Close(c.fd) // which tells the agent that it runs
	if failure := withdraw(claim); failure != nil {
		return exitFailed, nil //nolint:nilerr // of a claimed process: the exit code is what there is
	}
	if err := unix.SetNonblock(listenerFD, true); err != nil {
		return exitFailed, nil //nolint:nilerr // of a claimed process: the exit code is what there is
	}
	claim.Seccomp = nil
	code, err := supervisor.Run(supervisor.Config{
		Listener: listenerFD, Trusted: func(fd int) bool { return trusted(fd, mapped) }, Shim: shimFD, Reaper: reaper, Helper: helperFD,
		Claim: claim, Main: pid, Started: started,
	})
	if err != nil {
		return exitFailed, nil //nolint:nilerr // of a claimed process: the exit code is what there is
	}
	return code, nil
}

// confine does what the command inherits.
func confine(c *wire.Claim) *wire.Failure {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return failed(wire.StageClaim, err, "(access to this process)")
	}
	if failure := ignoreSignals(); failure != nil {
		return failure
	}
	if failure := prepare(c); failure != nil {
		return failure
	}
	if c.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return failed(wire.StageCapability, err, "(no new privileges)")
		}
	}
	if failure := limit(c.Rlimits); failure != nil {
		return failure
	}
	if failure := bound(c.Capabilities.Bounding); failure != nil {
		return failure
	}
	c.SeccompFlags |= unix.SECCOMP_FILTER_FLAG_TSYNC // all threads
	return filter(c)
}

// ignoreSignals has no signal of a process of the sandbox reach this one: the kernel discards those that pid 1 handles by default. The shim sends
// its own over its socket. The Go runtime's signal to all of its threads stays.
func ignoreSignals() *wire.Failure {
	const perThread = 33
	var byDefault [4]uint64 // struct sigaction of the kernel
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig == uintptr(unix.SIGKILL) || sig == uintptr(unix.SIGSTOP) || sig == perThread {
			continue
		}
		if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0); errno != 0 { //nolint:gosec // rt_sigaction(2)
			return failed(wire.StageClaim, errno, "(signals)")
		}
	}
	return nil
}

// withdraw gives up what the command has and this process does not need: privileges, standard streams, working directory.
func withdraw(c *wire.Claim) *wire.Failure {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	set := c.Capabilities.Bounding
	data := [2]unix.CapUserData{{Effective: uint32(set), Permitted: uint32(set)}, {Effective: uint32(set >> 32), Permitted: uint32(set >> 32)}}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0); errno != 0 { //nolint:gosec // capset(2)
		return failed(wire.StageCapability, errno, "")
	}
	for fd := range 3 {
		if failure := nullify(fd); failure != nil {
			return failure
		}
	}
	return nil
}

func now() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_REALTIME, &t)
	return uint64(t.Nano())
}
