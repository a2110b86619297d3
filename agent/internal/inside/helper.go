package inside

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/containerd/errdefs"

	files "github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// helperAttempts is how often a helper is asked for that ends before it takes the connection: it does when it had nothing to do for a while.
const helperAttempts = 3

// Helper is a connection to the helper of a user of a sandbox. It is for one goroutine at a time; Close is for any.
type Helper struct {
	conn   *line
	reader *bufio.Reader
	stop   func() bool
}

// Helper connects to the helper of a user; an empty name is the sandbox's own. The connection ends with ctx.
func (s Sandbox) Helper(ctx context.Context, user string) (*Helper, error) {
	// The span ends when the helper is there; the connection is for the caller's ctx.
	_, span := obs.Tracer().Start(ctx, "helper")
	defer span.End()
	var last error
	for range helperAttempts {
		h, err := s.helper(ctx, user)
		if err == nil || ctx.Err() != nil || !errors.Is(err, errTaken) {
			return h, err
		}
		last = err
	}
	return nil, last
}

var errTaken = fmt.Errorf("the helper of a sandbox has ended: %w", errdefs.ErrUnavailable)

func (s Sandbox) helper(ctx context.Context, user string) (_ *Helper, err error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return nil, err
	}
	conn.helper.Store(true)
	_ = conn.SetWriteBuffer(files.Buffer) // at most what the node permits
	h := &Helper{conn: conn, reader: bufio.NewReaderSize(conn, 64<<10), stop: endWith(ctx, conn)}
	defer func() {
		if err != nil {
			h.Close()
			if ctx.Err() != nil {
				err = ctx.Err()
			}
		}
	}()
	if _, err := conn.Write(wire.Frame(wire.TypeOpen, wire.EncodeRequest(&wire.Request{Data: user}))); err != nil {
		return nil, gone(err)
	}
	// The supervisor answers with a failure, or the helper with ready. Their frames have the same form.
	first, err := h.reader.Peek(1)
	if errors.Is(err, io.EOF) {
		return nil, errTaken
	}
	if err != nil {
		return nil, gone(err)
	}
	if wire.Type(first[0]) == wire.TypeFailure {
		if _, _, err := read(h.reader); err != nil {
			return nil, err
		}
	}
	if kind, _, err := files.Get(h.reader, nil); err != nil || kind != files.Ready {
		return nil, gone(errors.Join(err, errors.New("the helper is not ready")))
	}
	conn.helper.Store(false)
	return h, nil
}

// Close ends the connection.
func (h *Helper) Close() {
	h.stop()
	_ = h.conn.Close()
}

// Call makes a call that is answered at once.
func (h *Helper) Call(c *files.Call) (*files.Result, error) {
	if err := h.Begin(c); err != nil {
		return nil, err
	}
	return h.Answer()
}

// Begin sends a request.
func (h *Helper) Begin(c *files.Call) error {
	if err := files.PutJSON(h.conn, files.Request, c); err != nil {
		return gone(err)
	}
	return nil
}

// Send sends data of a request, and End its end.
func (h *Helper) Send(data []byte) error {
	for len(data) > 0 {
		n := min(len(data), files.Chunk)
		frame := net.Buffers{files.Header(files.Data, n), data[:n]}
		if _, err := frame.WriteTo(h.conn.UnixConn); err != nil {
			return gone(h.conn.judged(err))
		}
		data = data[n:]
	}
	return nil
}

// End ends the data of a request.
func (h *Helper) End() error {
	if err := files.Put(h.conn, files.End, nil); err != nil {
		return gone(err)
	}
	return nil
}

// Answer reads an answer. A *files.Failure is the error.
func (h *Helper) Answer() (*files.Result, error) {
	kind, payload, err := files.Get(h.reader, nil)
	if err != nil {
		return nil, gone(err)
	}
	if err := failed(kind, payload); err != nil {
		return nil, err
	}
	if kind != files.Answer {
		return nil, unexpectedAnswer(kind)
	}
	var r files.Result
	if err := json.Unmarshal(payload, &r); err != nil {
		return nil, fmt.Errorf("reading the answer of the helper of a sandbox: %w", errors.Join(err, errdefs.ErrInternal))
	}
	return &r, nil
}

// Data reads data of an answer into buffer. The error is io.EOF at the end.
func (h *Helper) Data(buffer []byte) ([]byte, error) {
	kind, payload, err := files.Get(h.reader, buffer)
	if err != nil {
		return nil, gone(err)
	}
	if err := failed(kind, payload); err != nil {
		return nil, err
	}
	switch kind {
	case files.Data:
		return payload, nil
	case files.End:
		return nil, io.EOF
	}
	return nil, unexpectedAnswer(kind)
}

// Stream returns what a connection carries after a Dial.
func (h *Helper) Stream() (io.Reader, *net.UnixConn) { return h.reader, h.conn.UnixConn }

func failed(kind files.Type, payload []byte) error {
	if kind != files.Failed {
		return nil
	}
	f := &files.Failure{}
	if err := json.Unmarshal(payload, f); err != nil {
		return fmt.Errorf("reading a failure of the helper of a sandbox: %w", errors.Join(err, errdefs.ErrInternal))
	}
	return f
}

func unexpectedAnswer(kind files.Type) error {
	return fmt.Errorf("unexpected message %q from the helper of a sandbox: %w", kind, errdefs.ErrInternal)
}
