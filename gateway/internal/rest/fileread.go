package rest

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// read sends a file, or a range of it, or nothing if the caller has it already. net/http decides which, by the entity tag of the file
// that is open: what follows is of that one or fails.
func (c *contents) read(w http.ResponseWriter, r *http.Request, p parameters) error {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	f := &file{ctx: ctx, service: c.service, request: &filesystemv1.ReadFileRequest{
		Namespace: p.namespace, Name: p.name, User: p.text("user"), Path: p.text("path"),
	}}
	singleRange(r.Header)
	probe := r.Method == http.MethodHead || r.Header.Get("Range") != "" || r.Header.Get("If-None-Match") != ""
	if err := f.begin(probe); err != nil {
		return err
	}
	h := w.Header()
	if tag := f.about.GetEtag(); isTag(tag) {
		h.Set("ETag", `"`+tag+`"`)
	}
	attach(h, p.text("path"), "application/octet-stream")
	out := newBytes(c.api, w)
	http.ServeContent(out, r, "", f.about.GetModifyTime().AsTime(), f)
	return c.end(out, r, f.err)
}

// end ends an answer with bytes. An error before the first byte is an ordinary error. A later one aborts the connection, so that a truncated
// file never looks complete.
func (c *contents) end(out *bytesWriter, r *http.Request, err error) error {
	h := out.Header()
	switch {
	case err != nil && out.begun:
		c.api.config.Log.Info("aborting raw output", obs.KeyError, err.Error(), obs.KeyRequestID, exchangeOf(r.Context()).requestID)
		panic(http.ErrAbortHandler)
	case err != nil, out.code >= http.StatusBadRequest:
		for _, name := range []string{"ETag", "Last-Modified", "Content-Disposition", "Accept-Ranges", "Content-Length"} {
			h.Del(name)
		}
	}
	switch {
	case err != nil:
		h.Del("Content-Range")
		return err
	case out.code == http.StatusPreconditionFailed:
		return &runtime.HTTPStatusError{HTTPStatus: out.code, Err: fault.New(errdefs.ErrFailedPrecondition, fault.FileChanged,
			"the file is not the one that the conditions of the request name")}
	case out.code == http.StatusRequestedRangeNotSatisfiable:
		return &runtime.HTTPStatusError{HTTPStatus: out.code, Err: fault.Field("Range", "the file does not have these bytes")}
	case out.code >= http.StatusBadRequest:
		return fault.New(errdefs.ErrInternal, fault.Internal, "internal error")
	}
	out.finish()
	return nil
}

// singleRange removes what net/http would understand and a file cannot serve well: several ranges would be a call for each, and the time of a
// file is no strong validator. HTTP lets a server ignore both, and the whole file is the answer.
func singleRange(h http.Header) {
	validator := h.Get("If-Range")
	if strings.Contains(h.Get("Range"), ",") || validator != "" && !strings.HasPrefix(validator, `"`) {
		h.Del("Range")
		h.Del("If-Range")
	}
}

// isTag reports whether a text may be an entity tag. It comes from a sandbox.
func isTag(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c == '"' || c > '~' })
}

// attach sets the headers of a file. Its type is one that no browser shows: a file of a sandbox must not become a page of the gateway's.
func attach(h http.Header, filePath, kind string) {
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "private, no-cache")
	if d := mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(filePath)}); d != "" {
		h.Set("Content-Disposition", d)
	}
}

// file is an open file, as http.ServeContent wants it. A read at another place than where the last one ended is another call.
type file struct {
	ctx     context.Context //nolint:containedctx // of the request
	service filesystemv1.FilesystemServiceClient
	request *filesystemv1.ReadFileRequest
	about   *filesystemv1.File

	stream grpc.ServerStreamingClient[filesystemv1.ReadFileResponse]
	end    context.CancelFunc // ends the stream
	next   int64              // offset of the next byte of the stream
	at     int64              // offset of the next byte that is wanted
	rest   []byte             // bytes of the stream that were not read
	err    error              // why a read failed
}

// begin opens the file. A probe has no bytes.
func (f *file) begin(probe bool) error {
	if probe {
		f.request.Length = 1
	}
	about, err := f.open()
	if err != nil {
		return err
	}
	if about.GetSizeBytes() < 0 {
		return fault.New(errdefs.ErrInternal, fault.Internal, "the sandbox reports a file of %d bytes", about.GetSizeBytes())
	}
	f.about = about
	if probe {
		f.end()
		f.stream = nil
	}
	f.request.Length, f.request.IfMatch = 0, about.GetEtag()
	return nil
}

// open makes the call for the bytes from request.Offset on.
func (f *file) open() (*filesystemv1.File, error) {
	ctx, cancel := context.WithCancel(f.ctx)
	stream, err := f.service.ReadFile(ctx, f.request)
	if err != nil {
		cancel()
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		cancel()
		if errors.Is(err, io.EOF) {
			err = fault.New(errdefs.ErrInternal, fault.Internal, "the agent sent no file")
		}
		return nil, err
	}
	f.stream, f.end, f.next, f.rest = stream, cancel, f.request.GetOffset(), first.GetData()
	return first.GetFile(), nil
}

// Seek implements io.Seeker.
func (f *file) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.about.GetSizeBytes()
	}
	f.at = offset
	return offset, nil
}

// Read implements io.Reader.
func (f *file) Read(p []byte) (int, error) {
	if f.err == nil {
		f.err = f.fill()
	}
	if f.err != nil {
		return 0, f.err
	}
	n := copy(p, f.rest)
	f.rest, f.next, f.at = f.rest[n:], f.next+int64(n), f.at+int64(n)
	return n, nil
}

// fill has bytes at the wanted offset in rest.
func (f *file) fill() error {
	if f.stream == nil || f.next != f.at {
		if f.stream != nil {
			f.end()
		}
		f.request.Offset = f.at
		if _, err := f.open(); err != nil {
			return err
		}
	}
	for len(f.rest) == 0 {
		m, err := f.stream.Recv()
		if errors.Is(err, io.EOF) {
			return fault.New(errdefs.ErrFailedPrecondition, fault.FileChanged, "the file became shorter while it was read")
		}
		if err != nil {
			return err
		}
		f.rest = m.GetData()
	}
	return nil
}

// readArchive sends a file or directory as a tar archive.
func (c *contents) readArchive(w http.ResponseWriter, r *http.Request, p parameters) error {
	follow, err := p.flag("follow")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	stream, err := c.service.ReadArchive(ctx, &filesystemv1.ReadArchiveRequest{
		Namespace: p.namespace, Name: p.name, User: p.text("user"), Path: p.text("path"), Follow: follow,
	})
	if err != nil {
		return err
	}
	piece, err := stream.Recv()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	attach(w.Header(), strings.TrimRight(path.Clean(p.text("path")), "/.")+".tar", "application/x-tar")
	out := newBytes(c.api, w)
	for r.Method != http.MethodHead && err == nil {
		if _, err := out.Write(piece.GetData()); err != nil {
			return nil // the caller has left
		}
		piece, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return c.end(out, r, err)
}

// bytesWriter writes an answer with bytes. It holds the headers back until the first byte, so that a failure to read that is still an
// ordinary error, and the text of an error of net/http, which has another form than all others.
type bytesWriter struct {
	http.ResponseWriter
	api     *api
	control *http.ResponseController
	code    int
	begun   bool
}

func newBytes(a *api, w http.ResponseWriter) *bytesWriter {
	return &bytesWriter{ResponseWriter: w, api: a, control: http.NewResponseController(w)}
}

// WriteHeader implements http.ResponseWriter.
func (b *bytesWriter) WriteHeader(code int) { b.code = code }

// Write implements http.ResponseWriter.
func (b *bytesWriter) Write(p []byte) (int, error) {
	if b.code >= http.StatusBadRequest {
		return len(p), nil
	}
	b.finish()
	_ = b.control.SetWriteDeadline(b.api.config.Clock.Now().Add(streamWriteTimeout))
	n, err := b.ResponseWriter.Write(p)
	_ = b.control.SetWriteDeadline(time.Time{})
	return n, err
}

// finish sends the headers.
func (b *bytesWriter) finish() {
	if b.begun {
		return
	}
	b.begun = true
	if b.code == 0 {
		b.code = http.StatusOK
	}
	b.ResponseWriter.WriteHeader(b.code)
}
