// Package transfer copies files and directories between this machine and a sandbox. A file gets its name at the destination when it is complete, so that
// an interrupted copy leaves no partial file. What a sandbox sends is not trusted: an archive is unpacked inside its destination only. A Remote makes
// one copy at a time.
package transfer

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/status"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Reasons of this package's errors; no server of the project sends them.
const (
	// ReasonConflict: the destination is something else than the copy needs, for instance a file where a directory is copied to.
	ReasonConflict fault.Reason = "DESTINATION_CONFLICT"
	// ReasonUnsafe: an archive of a sandbox contains an entry that is not unpacked.
	ReasonUnsafe fault.Reason = "UNSAFE_ARCHIVE"
	// ReasonChanged: a local file changed while it was read.
	ReasonChanged fault.Reason = "SOURCE_CHANGED"
	// ReasonNotFound: a local file or directory does not exist.
	ReasonNotFound fault.Reason = "LOCAL_FILE_NOT_FOUND"
)

// chunk is the size of the data of a message: the server accepts messages of 1 MiB.
const chunk = 256 << 10

// Remote is the file system of a sandbox. The errors of its methods are those of gRPC calls, of the operating system, or have a reason above.
type Remote struct {
	Client                   filesystemv1.FilesystemServiceClient
	Namespace, Sandbox, User string
	// Stat returns a file of the sandbox, behind symbolic links. The error is errdefs.ErrNotFound if there is none.
	Stat func(ctx context.Context, path string) (*filesystemv1.File, error)
	// Count receives the number of bytes of each piece that is copied. Warn receives what is not copied, and why.
	Count func(n int)
	Warn  func(format string, args ...any)
}

func conflict(format string, args ...any) error {
	return fault.New(errdefs.ErrFailedPrecondition, ReasonConflict, format, args...)
}

func unsafe(format string, args ...any) error {
	return fault.New(errdefs.ErrFailedPrecondition, ReasonUnsafe, format, args...)
}

// missing gives a local file that does not exist its reason.
func missing(err error) error {
	if err != nil && errors.Is(err, fs.ErrNotExist) {
		return fault.New(errdefs.ErrNotFound, ReasonNotFound, "%s", err)
	}
	return err
}

// target returns the path of a copy in the sandbox whose name is name, with the rules of `cp -r`.
func (r *Remote) target(ctx context.Context, destination, name string, directory bool) (string, error) {
	st, err := r.Stat(ctx, destination)
	trimmed := strings.TrimRight(destination, "/")
	switch {
	case errdefs.IsNotFound(err) && fault.ReasonOf(err) == fault.FileNotFound:
		if trimmed != destination && !directory {
			return "", conflict("the directory %q does not exist in sandbox %q", destination, r.Sandbox)
		}
		return trimmed, r.parent(ctx, trimmed)
	case err != nil:
		return "", err
	case st.GetType() == filesystemv1.FileType_FILE_TYPE_DIRECTORY:
		if name == "" {
			return destination, nil
		}
		return trimmed + "/" + name, nil
	case directory:
		return "", conflict("%q in sandbox %q is not a directory", destination, r.Sandbox)
	}
	return destination, nil
}

// parent requires the directory of a path that does not exist.
func (r *Remote) parent(ctx context.Context, p string) error {
	dir := path.Dir(p)
	st, err := r.Stat(ctx, dir)
	switch {
	case errdefs.IsNotFound(err) && fault.ReasonOf(err) == fault.FileNotFound:
		return conflict("the directory %q does not exist in sandbox %q", dir, r.Sandbox)
	case err == nil && st.GetType() != filesystemv1.FileType_FILE_TYPE_DIRECTORY:
		return conflict("%q in sandbox %q is not a directory", dir, r.Sandbox)
	}
	return err
}

// origin returns the error of a call that another error wraps: the status says it all.
func origin(err error) error {
	if call, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err); ok {
		return call
	}
	return err
}

// received reads the pieces of a stream.
type received struct {
	next  func() ([]byte, error)
	count func(int)
	rest  []byte
}

// Read implements io.Reader.
func (r *received) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		var err error
		if r.rest, err = r.next(); err != nil {
			r.rest = nil
			return 0, err
		}
		r.count(len(r.rest))
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// sender is a stream to the sandbox. A send that fails has no cause of its own: the answer to the call has it.
type sender struct {
	send  func([]byte) error
	count func(int)
}

// errRefused means that the server has ended the call.
var errRefused = errors.New("the server has ended the call")

// Write implements io.Writer.
func (s *sender) Write(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		piece := b[n:min(n+chunk, len(b))]
		if err := s.send(piece); err != nil {
			return n, errRefused
		}
		s.count(len(piece))
		n += len(piece)
	}
	return n, nil
}

// interruptible returns a reader of in that ends with ctx, even while a read waits for a terminal or a pipe.
func interruptible(ctx context.Context, in io.Reader) (io.Reader, func()) {
	reader, writer := io.Pipe()
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{writer}, in, make([]byte, chunk))
		_ = writer.CloseWithError(err)
	}()
	stop := context.AfterFunc(ctx, func() { _ = reader.CloseWithError(ctx.Err()) })
	return reader, func() { stop(); _ = reader.Close() }
}

// shrunk is the error of a file that has become shorter while it was read.
func shrunk(name string, want, got int64) error {
	return fault.New(errdefs.ErrAborted, ReasonChanged, "%q changed while it was read: it has %d of %d bytes", name, got, want)
}
