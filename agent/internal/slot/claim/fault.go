package claim

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Fault classifies an error of Send or Go, with the same reasons and messages as the cold path, if the request is at fault.
// It wraps any other error. command is the claim's first argument.
func Fault(err error, command string) error {
	var f *Failure
	if err == nil || !errors.As(err, &f) {
		return err
	}
	switch f.Stage {
	case wire.StageCwd:
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.WorkingDirInvalid, "the working directory cannot be entered")
	case wire.StageLookup, wire.StageExec:
		switch f.Errno {
		case syscall.ENOENT, syscall.ENOTDIR, syscall.ELOOP, syscall.ENAMETOOLONG:
			return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.CommandNotFound, "the image has no command %q", command).With("command", command)
		case syscall.EACCES, syscall.EPERM, syscall.ENOEXEC, syscall.EISDIR, syscall.ELIBBAD, syscall.EINVAL, syscall.ETXTBSY:
			return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.CommandNotExecutable, "command %q cannot be executed", command).With("command", command)
		case syscall.E2BIG:
			return fault.Wrap(err, errdefs.ErrInvalidArgument, fault.InvalidField, "spec.args: the arguments and environment are too long for a process").
				With(fault.FieldKey, "spec.args")
		}
	}
	return fmt.Errorf("claiming a slot: %w", err)
}
