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

// classify turns an error of containerd into a fault if its cause is known, and wraps it otherwise. format says what was
// being done.
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
	case isCanceled(err) || ended(err, context.Canceled):
		return fmt.Errorf("%s: %w", doing, errors.Join(context.Canceled, err))
	case errors.Is(err, context.DeadlineExceeded) || errdefs.IsDeadlineExceeded(err) || ended(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", doing, errors.Join(context.DeadlineExceeded, err))
	case errdefs.IsUnavailable(err) || isConnection(err):
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd cannot be reached while %s", doing)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// ended reports whether containerd says that the call's context ended: with an error that its shim returned, it does so only in
// words, under the code Unknown. The deadline of a call passes in containerd as well as here, and either may notice first.
func ended(err, cause error) bool {
	return errdefs.IsUnknown(err) && strings.HasSuffix(err.Error(), cause.Error())
}

func isConnection(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || strings.Contains(err.Error(), "error reading from server: EOF")
}

// startFault classifies an error of the OCI runtime if the request is at fault; otherwise it returns nil. Runtimes have no
// error codes, so the text decides: that of runc and that of crun are listed for each fault.
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
		has("current working directory"), has("not a directory", "mkdir") && !has("mounting"), has("error during container init: mkdir /"):
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

// pullFault classifies the error of a pull: the image does not exist (or may not be pulled), it is broken, or its registry
// could not be reached.
func pullFault(err error, ref string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("pulling %s: %w", ref, err)
	case isBroken(err):
		return errBroken(err, ref)
	case fault.ReasonOf(err) == fault.ImageInvalid:
		return contentFault(err, ref, "its content")
	case fault.ReasonOf(err) != "":
		return err
	}
	var netErr net.Error
	text := err.Error()
	// A status is matched with its text, because a port or a digest may contain the number.
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

// isBroken reports whether the image's content is at fault: it was downloaded and cannot be unpacked. An interrupted download
// and a full disk are other errors.
func isBroken(err error) bool {
	if err == nil || containsAny(err.Error(), "no space left", "disk quota") {
		return false
	}
	if containsAny(err.Error(), "invalid tar header", "wrong diff id", "mismatched rootfs and manifest layers") {
		return true
	}
	_, text, extracting := strings.Cut(err.Error(), "extract layer")
	return extracting && containsAny(text, "unexpected EOF", "gzip: invalid", "invalid checksum", "zstd:", "magic number",
		// Entries that contradict each other, or hard links to what the image does not have.
		": link /", "call to UtimesNanoAt", "unhandled tar header", "not a directory", "is a directory", "file exists", "file name too long", "too many levels of symbolic links")
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

// classifyPull is classify for a pull: an unavailable registry must not be taken for an unavailable containerd.
func classifyPull(err error) error {
	if isConnection(err) && !strings.Contains(err.Error(), "containerd.sock") {
		return err
	}
	if _, ok := status.FromError(err); ok && status.Code(err) == codes.Unavailable {
		return classify(err, "pulling an image")
	}
	return err
}

func isCanceled(err error) bool {
	return errors.Is(err, context.Canceled) || errdefs.IsCanceled(err)
}
