package cmd

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// The exit codes, for scripts. `run --attach` and `run --rm` exit with the exit code of the process.
const (
	exitOK          = 0
	exitOther       = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitExists      = 4
	exitInvalid     = 5
	exitNoCapacity  = 6
	exitUnavailable = 7
	exitDeadline    = 8
	exitPermission  = 9
	exitInterrupted = 130
)

func exitCodesHelp() string {
	var b strings.Builder
	for _, e := range []struct {
		code int
		text string
	}{
		{exitOK, "success"},
		{exitOther, "any other error"},
		{exitUsage, "wrong usage or configuration"},
		{exitNotFound, "not found: a sandbox, pool, image, container, object, trace, janitor or garbage collector"},
		{exitExists, "already exists"},
		{exitInvalid, "invalid argument, or a state that does not allow the call"},
		{exitNoCapacity, "no capacity, over a quota or limit, or overloaded"},
		{exitUnavailable, "the allocator, an agent, a janitor, the garbage collector, Kubernetes or the trace store is unavailable"},
		{exitDeadline, "the deadline passed"},
		{exitPermission, "permission denied, credentials were not accepted, or the answer of \"auth can-i\" is no"},
		{exitInterrupted, "interrupted, or an edit was canceled"},
	} {
		fmt.Fprintf(&b, "  %-4d%s\n", e.code, e.text)
	}
	return b.String() + `"run --rm" and "run --attach" exit with the exit code of the process.`
}

// usageError is an error in the command line or the configuration.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// exitError is an exit code that says everything: that of a sandbox's process, or of a question whose answer was printed. It is not
// printed itself.
type exitError struct{ code int }

// Error implements error.
func (p exitError) Error() string {
	return fmt.Sprintf("exit code %d", p.code)
}

// failure is an error as people and scripts see it.
type failure struct {
	code          int
	message, hint string
	reason        fault.Reason
}

func explain(err error) failure {
	var usage usageError
	if errors.As(err, &usage) {
		return failure{code: exitUsage, message: err.Error()}
	}
	// Only errors of a server are statuses. All others have a class already.
	if st, ok := status.FromError(err); ok && st != nil {
		err = rpc.FromStatus(err)
	}
	f := failure{code: codeOf(err), message: err.Error(), reason: fault.ReasonOf(err)}
	f.hint = hint(f.reason, err)
	return f
}

func codeOf(err error) int {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return exitDeadline
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case fault.ReasonOf(err) == reasonNoIdentity, fault.ReasonOf(err) == tunnel.ReasonNoCluster:
		return exitUsage
	case fault.ReasonOf(err) == reasonCertificate:
		return exitPermission
	case errdefs.IsNotFound(err):
		return exitNotFound
	case errdefs.IsAlreadyExists(err):
		return exitExists
	case errdefs.IsInvalidArgument(err), errdefs.IsFailedPrecondition(err), errdefs.IsAborted(err):
		return exitInvalid
	case errdefs.IsResourceExhausted(err):
		return exitNoCapacity
	case errdefs.IsUnavailable(err):
		return exitUnavailable
	case errdefs.IsPermissionDenied(err), errdefs.IsUnauthorized(err):
		return exitPermission
	default:
		return exitOther
	}
}

// report prints an error on one line, and advice on a second one if there is any. It returns the exit code.
func (c *cli) report(ctx context.Context, path string, err error) int {
	var process exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &process):
		return process.code
	case ctx.Err() != nil:
		return exitInterrupted
	}
	f := explain(err)
	message := c.named(strings.Join(strings.Fields(strings.ReplaceAll(f.message, "\n", "; ")), " "))
	if f.reason != "" {
		message += " (" + string(f.reason) + ")"
	}
	fmt.Fprintf(c.Err, "error: %s\n", message)
	if f.code == exitUsage && f.hint == "" {
		f.hint = path + " --help"
	}
	if f.hint != "" {
		fmt.Fprintf(c.Err, "hint: %s\n", c.named(f.hint))
	}
	return f.code
}
