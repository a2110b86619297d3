package rest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// pieceBytes is the size of the messages that a body is passed on in.
	pieceBytes = 256 << 10
	// pieceTimeout is how long a caller may take to send something more.
	pieceTimeout = time.Minute
	maxMode      = 0o7777
)

// write writes a file. It is replaced when the whole body has arrived; a body that breaks off leaves the old one.
func (c *contents) write(w http.ResponseWriter, r *http.Request, p parameters) error {
	header, err := fileHeader(r, p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	stream, err := c.service.WriteFile(ctx)
	if err != nil {
		return err
	}
	resp, err := upload(c.api, w, r, cancel, stream, &filesystemv1.WriteFileRequest{Namespace: p.namespace, Name: p.name, Header: header},
		func(b []byte) *filesystemv1.WriteFileRequest { return &filesystemv1.WriteFileRequest{Data: b} })
	if err != nil {
		return err
	}
	if tag := resp.GetFile().GetEtag(); isTag(tag) {
		w.Header().Set("ETag", `"`+tag+`"`)
	}
	return c.answer(w, resp)
}

// fileHeader returns what a request writes.
func fileHeader(r *http.Request, p parameters) (*filesystemv1.WriteFileHeader, error) {
	header := &filesystemv1.WriteFileHeader{User: p.text("user"), Path: p.text("path"), Owner: p.text("owner")}
	for name, flag := range map[string]*bool{"append": &header.Append, "makeParents": &header.MakeParents, "noReplace": &header.NoReplace} {
		var err error
		if *flag, err = p.flag(name); err != nil {
			return nil, err
		}
	}
	mode, err := p.number("mode", 8, 64)
	switch {
	case err != nil:
		return nil, err
	case mode != nil && (*mode < 0 || *mode > maxMode):
		return nil, fault.Field("mode", "is %o, want at most %o (octal)", *mode, maxMode)
	case mode != nil:
		header.Mode = proto.Uint32(uint32(*mode))
	}
	if err := checkBody(r); err != nil {
		return nil, err
	}
	if r.ContentLength >= 0 {
		header.SizeBytes = proto.Int64(r.ContentLength)
	}
	return header, conditions(r.Header, header)
}

// conditions sets those of a write.
func conditions(h http.Header, header *filesystemv1.WriteFileHeader) error {
	if match := h.Values("If-Match"); len(match) > 0 {
		tag, ok := strings.CutPrefix(match[0], `"`)
		if tag, ok2 := strings.CutSuffix(tag, `"`); len(match) == 1 && ok && ok2 && isTag(tag) {
			header.IfMatch = tag
		} else {
			return fault.Field("If-Match", "must be one strong entity tag")
		}
	}
	if match := h.Values("If-None-Match"); len(match) > 0 {
		if len(match) > 1 || match[0] != "*" {
			return fault.Field("If-None-Match", "must be * for a write")
		}
		header.NoReplace = true
	}
	for _, name := range []string{"If-Unmodified-Since", "If-Modified-Since", "Content-Range"} {
		if h.Get(name) != "" {
			return fault.Field(name, "is not supported for a write")
		}
	}
	return nil
}

// checkBody refuses a body that is not the bytes themselves.
func checkBody(r *http.Request) error {
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return &runtime.HTTPStatusError{HTTPStatus: http.StatusUnsupportedMediaType, Err: fault.Field("Content-Encoding",
			"%q is not supported; send the body without an encoding", encoding)}
	}
	return nil
}

// writeArchive unpacks a tar archive into a directory.
func (c *contents) writeArchive(w http.ResponseWriter, r *http.Request, p parameters) error {
	owners, err := p.flag("owners")
	if err != nil {
		return err
	}
	if err := checkBody(r); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	stream, err := c.service.WriteArchive(ctx)
	if err != nil {
		return err
	}
	resp, err := upload(c.api, w, r, cancel, stream, &filesystemv1.WriteArchiveRequest{
		Namespace: p.namespace, Name: p.name, Header: &filesystemv1.WriteArchiveHeader{User: p.text("user"), Path: p.text("path"), Owners: owners},
	}, func(b []byte) *filesystemv1.WriteArchiveRequest { return &filesystemv1.WriteArchiveRequest{Data: b} })
	if err != nil {
		return err
	}
	return c.answer(w, resp)
}

// upload passes the body of a request on, and returns the answer. The answer may come before the end of the body, if the call is refused: the
// rest is not read then. cancel ends the call.
func upload[Q, A any](
	a *api, w http.ResponseWriter, r *http.Request, cancel func(), stream grpc.ClientStreamingClient[Q, A], first *Q, piece func([]byte) *Q,
) (*A, error) {
	b := &body{api: a, from: r.Body, control: http.NewResponseController(w), reading: true}
	answer, answered := new(A), make(chan error, 1)
	go func() {
		err := stream.RecvMsg(answer)
		b.interrupt()
		answered <- err
	}()
	sent := stream.Send(first)
	buffer := make([]byte, pieceBytes)
	for sent == nil {
		var n int
		n, sent = b.fill(buffer)
		if n > 0 {
			if err := stream.Send(piece(buffer[:n])); err != nil {
				sent = err
			}
		}
	}
	var failed *readError
	interrupted := b.done()
	switch {
	case errors.Is(sent, io.EOF): // all was sent, or the answer is there
		_ = stream.CloseSend()
	case interrupted:
	case errors.As(sent, &failed):
		cancel()
		_ = <-answered
		w.Header().Set("Connection", "close")
		return nil, failed.refusal()
	default:
		cancel()
		_ = <-answered
		return nil, sent
	}
	err := <-answered
	if err != nil || interrupted {
		w.Header().Set("Connection", "close") // the rest of the body is not read
	}
	return answer, err
}

// body reads the body of a request. A caller that sends nothing for a time is disconnected.
type body struct {
	api     *api
	from    io.Reader
	control *http.ResponseController

	mu          sync.Mutex
	reading     bool
	interrupted bool
}

// readError is a failure to read a body.
type readError struct{ err error }

func (e *readError) Error() string { return "reading the body: " + e.err.Error() }

func (e *readError) refusal() error {
	if errors.Is(e.err, os.ErrDeadlineExceeded) {
		return &runtime.HTTPStatusError{HTTPStatus: http.StatusRequestTimeout, Err: fault.Field("body", "nothing arrived for %s", pieceTimeout)}
	}
	return fault.Field("body", "ended before all had arrived")
}

// fill reads until the buffer is full or the body ends, which is io.EOF: a body that breaks off ends with another error.
func (b *body) fill(buffer []byte) (n int, err error) {
	for n < len(buffer) && err == nil {
		b.extend()
		var m int
		m, err = b.from.Read(buffer[n:])
		n += m
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = &readError{err}
	}
	return n, err
}

// extend sets the time until which something more has to arrive.
func (b *body) extend() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.interrupted {
		_ = b.control.SetReadDeadline(b.api.config.Clock.Now().Add(pieceTimeout))
	}
}

// interrupt ends a read that waits.
func (b *body) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reading {
		b.interrupted = true
		_ = b.control.SetReadDeadline(time.Unix(1, 0))
	}
}

// done ends the reading, and reports whether it was interrupted. Without a deadline from then on, net/http sees when the caller leaves.
func (b *body) done() (interrupted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading = false
	if !b.interrupted {
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return b.interrupted
}

// withoutDeadlines ends the deadlines of the request before on the same connection.
func (a *api) withoutDeadlines(w http.ResponseWriter) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{})
	_ = control.SetWriteDeadline(time.Time{})
}
