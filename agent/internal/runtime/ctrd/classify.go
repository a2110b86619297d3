package ctrd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// classify turns an error of containerd's into a fault where its cause is known; what it does not know it wraps. format
// says what was being done.
func classify(err error, format string, args ...any) error {
	doing := fmt.Sprintf(format, args...)
	var known *fault.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	}
	if _, ok := status.FromError(err); ok && status.Code(err) != codes.OK {
		err = errgrpc.ToNative(err)
	}
	switch {
	case errors.Is(err, context.Canceled) || errdefs.IsCanceled(err):
		return fmt.Errorf("%s: %w", doing, errors.Join(context.Canceled, err))
	case errors.Is(err, context.DeadlineExceeded) || errdefs.IsDeadlineExceeded(err):
		return fmt.Errorf("%s: %w", doing, errors.Join(context.DeadlineExceeded, err))
	case errdefs.IsUnavailable(err) || isConnection(err):
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd cannot be reached while %s", doing)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

func isConnection(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || strings.Contains(err.Error(), "error reading from server: EOF")
}

// startFault is what the OCI runtime says when the request is to blame; nil if it is not. Runtimes know no codes, so the
// text is all there is: runc's and crun's are listed, each followed by what the other says.
func startFault(err error, command string) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	has := func(parts ...string) bool {
		for _, p := range parts {
			if !strings.Contains(text, p) {
				return false
			}
		}
		return true
	}
	switch {
	case has("chdir to cwd"), has("cannot chdir"), has("chdir `"), has("chdir to"), has("mkdir", "cwd"), has("setting up cwd"),
		has("current working directory"), has("not a directory", "mkdir") && !has("mounting"):
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.WorkingDirInvalid, "the working directory cannot be entered")
	case has("executable file not found"), has("exec:", "no such file or directory"), has("exec", "no such file or directory", "init process"),
		has("executable file `", "not found"), command != "" && has("exec", command, "no such file or directory"):
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.CommandNotFound, "the image has no command %q", command).With("command", command)
	case has("exec format error"), has("exec:", "permission denied"), command != "" && has("exec", command, "permission denied"), has("exec:", "is a directory"),
		has("open executable", "ermission denied"):
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.CommandNotExecutable, "command %q cannot be executed", command).With("command", command)
	case has("argument list too long"):
		return fault.Wrap(err, errdefs.ErrInvalidArgument, fault.InvalidField, "spec.args: the arguments and environment are too long for a process").
			With(fault.FieldKey, "spec.args")
	}
	return nil
}

// pullFault says why an image could not be brought: because it is not there (or is not shown to us), or because its
// registry could not be spoken to now.
func pullFault(err error, ref string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("pulling %s: %w", ref, err)
	case isBroken(err):
		return errBroken(err, ref)
	case fault.ReasonOf(err) != "":
		return err
	}
	var netErr net.Error
	text := err.Error()
	// A status with its words: a port or a digest has such a number in it, too.
	denied := errdefs.IsPermissionDenied(err) || errdefs.IsUnauthorized(err) || containsAny(text,
		"401 Unauthorized", "403 Forbidden", "authorization failed", "insufficient_scope", "no basic auth credentials", "pull access denied")
	switch {
	case errors.As(err, &netErr), containsAny(text, "connection refused", "no such host", "i/o timeout", "TLS handshake", "server gave HTTP response"):
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.ImagePullFailed, "image %s could not be pulled now", ref).With("image", ref)
	case denied:
		return fault.Wrap(err, errdefs.ErrNotFound, fault.ImageNotFound, "image %s does not exist or may not be pulled", ref).With("image", ref)
	case errdefs.IsNotFound(err), containsAny(text, "no match for platform", "404 Not Found"):
		return fault.Wrap(err, errdefs.ErrNotFound, fault.ImageNotFound, "there is no image %s for this platform", ref).With("image", ref)
	}
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.ImagePullFailed, "image %s could not be pulled now", ref).With("image", ref)
}

// isBroken tells whether an image's own content is what is wrong: it is there and cannot be unpacked. A download that breaks
// off, and a disk that is full, are not.
func isBroken(err error) bool {
	if err == nil || containsAny(err.Error(), "no space left", "disk quota") {
		return false
	}
	return containsAny(err.Error(), "invalid tar header", "wrong diff id", "mismatched rootfs and manifest layers") ||
		strings.Contains(err.Error(), "extract layer") && containsAny(err.Error(), "unexpected EOF", "gzip: invalid", "invalid checksum", "zstd:", "magic number")
}

func errBroken(err error, ref string) error {
	return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.ImageInvalid, "image %s cannot be unpacked: it is broken", ref).With("image", ref)
}

func containsAny(text string, parts ...string) bool {
	for _, p := range parts {
		if strings.Contains(text, p) {
			return true
		}
	}
	return false
}

// classifyPull is classify for a pull, in which an unavailable registry must not be taken for an unavailable containerd.
func classifyPull(err error) error {
	if isConnection(err) && !strings.Contains(err.Error(), "containerd.sock") {
		return err
	}
	if _, ok := status.FromError(err); ok && status.Code(err) == codes.Unavailable {
		return classify(err, "pulling an image")
	}
	return err
}

func isCancelled(err error) bool {
	return errors.Is(err, context.Canceled) || errdefs.IsCanceled(err)
}
