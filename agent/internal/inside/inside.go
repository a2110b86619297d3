// Package inside is the agent's side of the supervisor of a running sandbox: sandbox-init, which starts processes there. Package wire has the
// protocol. A supervisor may be controlled by hostile code: what it sends is bounded and checked, and a call never waits for it longer than its
// context, nor without end while it does not answer at all. The package keeps no state; each call has a connection of its own.
package inside

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/propagation"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// maxFrame is the largest frame that is accepted: what a list of processes takes.
const maxFrame = 8 << 20

// Sandbox is the supervisor of one sandbox.
type Sandbox struct {
	// Socket is the path of its socket.
	Socket string
	// Container is that of the sandbox; nil if nothing is known of it.
	Container Container
	// Timeouts of calls.
	Timeouts Timeouts
}

// dial connects, and has the container get a supervisor if there is none. NotFound: there is none, and there will be none.
func (s Sandbox) dial(ctx context.Context) (*line, error) {
	conn, err := claim.Dial(ctx, s.Socket)
	if isMissing(err) && s.Container != nil {
		if err := s.Container.Join(ctx); err != nil {
			return nil, err
		}
		conn, err = claim.Dial(ctx, s.Socket)
	}
	switch {
	case err == nil:
		return s.watched(ctx, conn), nil
	case isMissing(err):
		err = errors.Join(err, errdefs.ErrNotFound)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case isFull(err):
		return nil, s.silence(ctx, err)
	}
	return nil, fmt.Errorf("connecting to the supervisor of a sandbox: %w", err)
}

// isMissing reports whether nothing listens at a socket.
func isMissing(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED)
}

// Start starts a process, and follows its output from the first byte on. The process has the trace of ctx in its environment, as TRACEPARENT. A
// *wire.Failure says why it was not started.
func (s Sandbox) Start(ctx context.Context, start *wire.Start) (*Stream, error) {
	ctx, span := obs.Tracer().Start(ctx, "process.start")
	defer span.End()
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	if parent := carrier["traceparent"]; parent != "" {
		start.Env = append([]string{"TRACEPARENT=" + parent}, start.Env...)
	}
	payload, err := wire.EncodeStart(start)
	if err != nil {
		return nil, err
	}
	return s.open(ctx, wire.TypeStart, payload)
}

// Follow follows the output of a process.
func (s Sandbox) Follow(ctx context.Context, follow *wire.Follow) (*Stream, error) {
	return s.open(ctx, wire.TypeFollow, wire.EncodeFollow(follow))
}

func (s Sandbox) open(ctx context.Context, kind wire.Type, payload []byte) (*Stream, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return nil, err
	}
	stream := &Stream{conn: conn, reader: bufio.NewReaderSize(conn, 64<<10)}
	stop := endWith(ctx, conn)
	defer stop()
	err = stream.begin(kind, payload)
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	return stream, nil
}

// endWith ends the I/O of a connection when ctx does, until stop is called.
func endWith(ctx context.Context, conn net.Conn) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
}

// List returns the processes that are known, the sandbox's own one first.
func (s Sandbox) List(ctx context.Context) ([]*wire.Process, error) {
	kind, payload, err := s.call(ctx, wire.TypeList, nil)
	if err != nil {
		return nil, err
	}
	if kind != wire.TypeProcesses {
		return nil, unexpected(kind)
	}
	return wire.DecodeProcesses(payload)
}

// Do sends a request about a process: TypeInput, TypeCloseInput, TypeSignal or TypeResize.
func (s Sandbox) Do(ctx context.Context, kind wire.Type, r *wire.Request) error {
	if handled, err := s.signalMain(ctx, kind, r); handled {
		return err
	}
	kind, _, err := s.call(ctx, kind, wire.EncodeRequest(r))
	if err == nil && kind != wire.TypeDone {
		err = unexpected(kind)
	}
	return err
}

func (s Sandbox) call(ctx context.Context, kind wire.Type, payload []byte) (wire.Type, string, error) {
	ctx, span := obs.Tracer().Start(ctx, "supervisor")
	defer span.End()
	conn, err := s.dial(ctx)
	if err != nil {
		return 0, "", err
	}
	defer conn.Close()
	stop := endWith(ctx, conn)
	defer stop()
	var answer string
	if _, err = conn.Write(wire.Frame(kind, payload)); err == nil {
		kind, answer, err = read(conn)
	}
	_, failed := errors.AsType[*wire.Failure](err)
	switch {
	case err == nil:
		return kind, answer, nil
	case failed:
		return 0, "", err
	case ctx.Err() != nil:
		return 0, "", ctx.Err()
	}
	return 0, "", gone(err)
}

// Input sends a process any number of pieces of input, one after another.
func (s Sandbox) Input(ctx context.Context, target wire.Target) (*Input, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &Input{conn: conn, target: target, stop: endWith(ctx, conn)}, nil
}

// Input is a connection for the input of a process.
type Input struct {
	conn   *line
	target wire.Target
	stop   func() bool
}

// Write passes data on, and returns when the process has it in its pipe or terminal.
func (i *Input) Write(data []byte) (int, error) {
	if _, err := i.conn.Write(wire.Frame(wire.TypeInput, wire.EncodeRequest(&wire.Request{Target: i.target, Data: string(data)}))); err != nil {
		return 0, gone(err)
	}
	kind, _, err := read(i.conn)
	if err == nil && kind != wire.TypeDone {
		err = unexpected(kind)
	}
	if err != nil {
		return 0, err
	}
	return len(data), nil
}

// Close ends the connection, not the input.
func (i *Input) Close() error {
	i.stop()
	return i.conn.Close()
}

// Stream is a process whose output is followed. Next is for one goroutine; Send and Close for any.
type Stream struct {
	conn    *line
	reader  *bufio.Reader
	process *wire.Process

	mu sync.Mutex // of writes
}

// begin sends the request, and reads which process it is about.
func (s *Stream) begin(kind wire.Type, payload []byte) error {
	if _, err := s.conn.Write(wire.Frame(kind, payload)); err != nil {
		return gone(err)
	}
	kind, answer, err := read(s.reader)
	if err != nil {
		return err
	}
	if kind != wire.TypeStarted {
		return unexpected(kind)
	}
	list, err := wire.DecodeProcesses(answer)
	if err != nil {
		return err
	}
	if len(list) != 1 {
		return fmt.Errorf("the supervisor of a sandbox names %d processes: %w", len(list), errdefs.ErrInternal)
	}
	s.process = list[0]
	return nil
}

// Process describes the process when the stream began.
func (s *Stream) Process() *wire.Process { return s.process }

// Event is output, or the end of a process if Exit is not nil.
type Event struct {
	Stream wire.Stream
	// Offset is that of the first byte of Data in all output of the process.
	Offset uint64
	Data   string
	Exit   *wire.Exit
}

// Next returns the next event. After the end of the process it is io.EOF. errdefs.ErrUnavailable: the sandbox has ended, or its connection.
func (s *Stream) Next() (Event, error) {
	kind, payload, err := read(s.reader)
	if err != nil {
		return Event{}, err
	}
	switch kind {
	case wire.TypeOutput:
		stream, offset, data, err := wire.DecodeOutput(payload)
		return Event{Stream: stream, Offset: offset, Data: data}, err
	case wire.TypeEnded:
		exit, err := wire.DecodeExit(payload)
		return Event{Exit: exit}, err
	}
	return Event{}, unexpected(kind)
}

// Send sends a request about the process, which is not answered.
func (s *Stream) Send(kind wire.Type, r *wire.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.conn.Write(wire.Frame(kind, wire.EncodeRequest(r))); err != nil {
		return gone(err)
	}
	return nil
}

// Close ends following. The process runs on.
func (s *Stream) Close() error { return s.conn.Close() }

// read reads a frame. A failure is the error.
func read(r io.Reader) (wire.Type, string, error) {
	kind, payload, err := claim.ReadFrame(io.LimitReader(r, maxFrame))
	if err != nil {
		return 0, "", gone(err)
	}
	if kind != wire.TypeFailure {
		return kind, payload, nil
	}
	failure, err := wire.DecodeFailure(payload)
	if err != nil {
		return 0, "", err
	}
	return 0, "", failure
}

func unexpected(kind wire.Type) error {
	return fmt.Errorf("unexpected message of type %d from the supervisor of a sandbox: %w", kind, errdefs.ErrInternal)
}

// gone is the error of a connection that has ended without an answer.
func gone(err error) error {
	if fault.ReasonOf(err) != "" {
		return err
	}
	return fmt.Errorf("the supervisor of a sandbox does not answer: %w: %v", errdefs.ErrUnavailable, err) //nolint:errorlint // it is none of ours
}
