package supervisor

import (
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// unknown is the failure of a request about a process that is not known.
func (s *Supervisor) unknown() *wire.Failure {
	f := &wire.Failure{Stage: wire.StageProcess, Errno: unix.ESRCH}
	if s.config.Again {
		f.Detail = wire.DetailLost
	}
	return f
}

// signalOwn signals the sandbox's own process. One that is pid 1 gets no signal from within that it does not handle, and its group cannot be named
// in kill(2): the OCI runtime has to send it.
func (s *Supervisor) signalOwn(r *wire.Request) *wire.Failure {
	if s.config.Joined {
		return &wire.Failure{Stage: wire.StageProcess, Errno: unix.EPERM, Detail: "(the runtime signals pid 1)"}
	}
	return signal(s.config.Main, r)
}

// signal signals a process that has not been reaped, or its group.
func signal(pid int, r *wire.Request) *wire.Failure {
	if pid == 0 {
		return &wire.Failure{Stage: wire.StageProcess, Errno: unix.ESRCH}
	}
	if r.Group {
		pid = -pid
	}
	if err := unix.Kill(pid, unix.Signal(r.Signal)); err != nil {
		return spawn.Failed(wire.StageProcess, err, "(signaling)")
	}
	return nil
}

func (p *process) resize(t wire.Terminal) *wire.Failure {
	if !p.terminal {
		return &wire.Failure{Stage: wire.StageTerminal, Errno: unix.ENOTTY}
	}
	if !p.outputs[0].watch.open() {
		return &wire.Failure{Stage: wire.StageProcess, Errno: unix.ESRCH, Detail: wire.DetailEnded}
	}
	if err := unix.IoctlSetWinsize(p.outputs[0].watch.fd, unix.TIOCSWINSZ, &unix.Winsize{Row: t.Rows, Col: t.Columns}); err != nil {
		return spawn.Failed(wire.StageTerminal, err, "(size)")
	}
	return nil
}
