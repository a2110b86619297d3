package inside

import (
	"errors"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	files "github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// pathKey is the metadata key of the file that an error is about.
const pathKey = "path"

// FileFault classifies an error of a call of a helper.
func FileFault(err error) error {
	f, ok := errors.AsType[*files.Failure](err)
	if !ok {
		return Fault(err, "")
	}
	path := strings.ToValidUTF8(string(f.Path), "\uFFFD")
	about := func(class error, reason fault.Reason, text string) error {
		return fault.Wrap(f, class, reason, "%s: %s", path, text).With(pathKey, path)
	}
	switch f.Kind {
	case files.NotRegular:
		return about(errdefs.ErrFailedPrecondition, fault.FileConflict, "it is no regular file")
	case files.Changed:
		return about(errdefs.ErrFailedPrecondition, fault.FileChanged, "it is another one now, or does not exist")
	case files.Size:
		return fault.Wrap(f, errdefs.ErrInvalidArgument, fault.InvalidField, "header.size_bytes: another number of bytes has arrived").With(fault.FieldKey, "header.size_bytes")
	case files.Outside:
		return about(errdefs.ErrInvalidArgument, fault.InvalidField, "the archive leads out of the directory")
	case files.BadArchive:
		return fault.Wrap(f, errdefs.ErrInvalidArgument, fault.InvalidField, "data: it is no tar archive, or is cut off").With(fault.FieldKey, "data")
	case files.NoUser:
		return fault.Wrap(f, errdefs.ErrFailedPrecondition, fault.UserNotFound, "%s", f.Text)
	case files.Invalid:
		return about(errdefs.ErrInvalidArgument, fault.InvalidField, f.Text)
	}
	return errnoFault(f, about)
}

func errnoFault(f *files.Failure, about func(error, fault.Reason, string) error) error {
	switch e := f.Errno; e {
	case syscall.ENOENT:
		return about(errdefs.ErrNotFound, fault.FileNotFound, "there is no such file or directory")
	case syscall.EACCES, syscall.EPERM:
		return about(errdefs.ErrPermissionDenied, fault.FileAccessDenied, "the user may not do that")
	case syscall.EEXIST:
		return about(errdefs.ErrAlreadyExists, fault.FileExists, "it exists")
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG:
		return limitFault(nil, "disk space").(*fault.Error).With(pathKey, string(f.Path)) //nolint:errorlint,forcetypeassert // it returns nothing else
	case syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN:
		return limitFault(nil, "open files")
	case syscall.ENOMEM:
		return limitFault(nil, "memory")
	case syscall.ENAMETOOLONG, syscall.EINVAL:
		return about(errdefs.ErrInvalidArgument, fault.InvalidField, e.Error())
	case syscall.ENOTDIR, syscall.EISDIR, syscall.ENOTEMPTY, syscall.ELOOP, syscall.EXDEV, syscall.EROFS, syscall.EBUSY, syscall.ETXTBSY, syscall.EMLINK:
		return about(errdefs.ErrFailedPrecondition, fault.FileConflict, e.Error())
	}
	return f
}
