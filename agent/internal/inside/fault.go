package inside

import (
	"context"
	"errors"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Fault classifies an error of a call into a sandbox. command is the first argument of a process to start.
func Fault(err error, command string) error {
	switch {
	case err == nil, fault.ReasonOf(err) != "", errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errdefs.IsNotFound(err):
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the sandbox has no supervisor: it has ended, or its runtime handler has none")
	case errdefs.IsUnavailable(err):
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.SandboxUnresponsive, "the sandbox does not answer; it may have ended")
	}
	failure, ok := errors.AsType[*wire.Failure](err)
	if !ok {
		return err
	}
	if known := claim.Fault(err, command); fault.ReasonOf(known) != "" {
		return known
	}
	return failureFault(failure)
}

// failureFault classifies what the start of a sandbox's own process cannot fail with, or fails with for other reasons.
func failureFault(f *wire.Failure) error {
	switch f.Stage {
	case wire.StageUser:
		if f.Errno == syscall.ENOENT {
			return fault.Wrap(f, errdefs.ErrFailedPrecondition, fault.UserNotFound, "the sandbox has no user %q", f.Detail).With("user", f.Detail)
		}
		return fault.Wrap(f, errdefs.ErrFailedPrecondition, fault.UserNotFound, "the user cannot be used: %s", f.Error())
	case wire.StageProcess:
		return processFault(f)
	}
	switch f.Errno {
	case syscall.EAGAIN:
		return limitFault(f, "processes")
	case syscall.ENOMEM:
		return limitFault(f, "memory")
	case syscall.EMFILE, syscall.ENFILE:
		return limitFault(f, "open files")
	case syscall.ENOTTY:
		return fault.Wrap(f, errdefs.ErrFailedPrecondition, fault.ProcessConflict, "the process has no terminal")
	}
	return f
}

func processFault(f *wire.Failure) error {
	switch f.Errno {
	case syscall.ESRCH:
		switch f.Detail {
		case "":
			return fault.Wrap(f, errdefs.ErrNotFound, fault.ProcessNotFound, "the sandbox has no such process")
		case wire.DetailLost:
			return fault.Wrap(f, errdefs.ErrNotFound, fault.ProcessLost, "the sandbox has no such process: its supervisor was killed, and what that had started is lost")
		}
		return fault.Wrap(f, errdefs.ErrFailedPrecondition, fault.ProcessConflict, "the process has ended")
	case syscall.EEXIST:
		return fault.Wrap(f, errdefs.ErrAlreadyExists, fault.ProcessExists, "another process that runs has the tag")
	case syscall.EPIPE:
		return fault.Wrap(f, errdefs.ErrFailedPrecondition, fault.ProcessConflict, "the process has no input, or has closed it")
	case syscall.EPERM:
		return fault.Wrap(f, errdefs.ErrPermissionDenied, fault.PermissionDenied, "the sandbox may not do that: %s", f.Error())
	case syscall.EINVAL:
		return fault.Wrap(f, errdefs.ErrInvalidArgument, fault.InvalidField, "%s", f.Error())
	}
	return f
}

func limitFault(f error, limit string) error {
	return fault.Wrap(f, errdefs.ErrResourceExhausted, fault.SandboxLimitExceeded, "the sandbox has reached its limit of %s", limit).With("limit", limit)
}
