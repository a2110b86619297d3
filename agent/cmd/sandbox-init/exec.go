package main

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// execute becomes one more process of a container. A shim has started this process in its namespaces and its cgroup, with all privileges: until
// it is confined, no process of the container may access it, and it executes nothing of the image. It returns the exit code if that failed.
func execute(shim *channel) (code int) {
	defer func() {
		if r := recover(); r != nil {
			shim.fail(&wire.Failure{Detail: "panic"})
			code = exitFailed
		}
	}()
	failure := executeFor(shim)
	if failure != errAbandoned {
		shim.fail(failure)
	}
	return exitFailed
}

func executeFor(shim *channel) *wire.Failure {
	// The exec of the command makes the process accessible again, as its credentials permit.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return failed(wire.StageClaim, err, "(access to this process)")
	}
	payload, _, failure := shim.read(wire.TypeExec, nil)
	if failure != nil {
		return failure
	}
	e, err := wire.DecodeExec(payload)
	if err != nil {
		return err.(*wire.Failure) //nolint:errorlint // DecodeExec returns nothing else
	}
	if failure := shim.closeOthers(); failure != nil {
		return failure
	}
	if failure := newSession(); failure != nil {
		return failure
	}
	terminal := -1
	if e.Terminal != nil {
		if terminal, failure = openTerminal(e.Terminal); failure != nil {
			return failure
		}
	} else if failure := ownNull(); failure != nil {
		return failure
	}
	entered := true
	if failure := spawn.Enter(e.Claim.Cwd); failure != nil {
		if failure.Errno != unix.EACCES {
			return failure
		}
		entered = false // only the user may enter it
	}
	if !shim.readyWith(terminal) {
		return errAbandoned
	}
	if terminal >= 0 {
		_ = unix.Close(terminal)
	}
	return become(e.Claim, entered)
}

// newSession leaves the session and the keys of the shim.
func newSession() *wire.Failure {
	if failure := dropKeys(); failure != nil {
		return failure
	}
	if _, err := unix.Setsid(); err != nil {
		return failed(wire.StageClaim, err, "(session)")
	}
	return nil
}

// dropKeys gives this process a session keyring of its own: no process of the container is to have the keys of who started containerd.
func dropKeys() *wire.Failure {
	if _, _, errno := unix.RawSyscall(unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0); errno != 0 && errno != unix.ENOSYS && errno != unix.EPERM {
		return failed(wire.StageRoot, errno, "(session keyring)")
	}
	return nil
}

// ownNull replaces each standard stream that is /dev/null of the host with that of the container: its file mode and owner could be changed
// through the descriptor.
func ownNull() *wire.Failure {
	device := unix.Mkdev(1, 3)
	for fd := range 3 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return failed(wire.StageStdio, err, "(standard streams)")
		}
		if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != device {
			continue
		}
		if failure := nullify(fd); failure != nil {
			return failure
		}
	}
	return nil
}

// nullify makes a standard stream the /dev/null of the container.
func nullify(fd int) *wire.Failure {
	null, err := spawn.OpenNull()
	if err == nil {
		err = unix.Dup3(null, fd, 0)
		_ = unix.Close(null)
	}
	if err != nil {
		return failed(wire.StageStdio, err, "/dev/null")
	}
	return nil
}
