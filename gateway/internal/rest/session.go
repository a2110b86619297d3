package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// pingInterval is how often a caller is asked whether it is there, and pingTimeout how long it may take to answer.
	pingInterval = 30 * time.Second
	pingTimeout  = 15 * time.Second
	// inputQueue is how many messages of input wait for a process that does not read. Then nothing is read from the caller.
	inputQueue = 4
	// callTimeout bounds what a control message asks for.
	callTimeout = 10 * time.Second
)

// session is a WebSocket and a process. The parts that move its bytes:
//
//	process --events--> run --frames--> caller
//	caller --frames--> read --input--> feed --StreamInput--> process
//	                        --control messages--> process
//
// run owns the others and waits for them.
type session struct {
	api        *api
	service    processv1.ProcessServiceClient
	parameters parameters
	start      *processv1.StartProcessRequest   // nil to attach
	attach     *processv1.ConnectProcessRequest // nil to start
	conn       *websocket.Conn

	// started is closed when process is known.
	started chan struct{}
	process *processv1.ProcessSelector
	input   chan piece
	// busy: read waits for something else than the caller, so that no answer to a ping can arrive.
	busy atomic.Bool
	next int64 // offset of the next byte of output
	seen bool  // output was sent
}

// piece is input, or its end.
type piece struct {
	data []byte
	end  bool
}

// control is a text message. Its fields depend on the type.
type control struct {
	Type    string          `json:"type"`
	Process json.RawMessage `json:"process,omitempty"`
	Offset  *int64          `json:"offset,omitempty"`
	Exit    json.RawMessage `json:"exit,omitempty"`
	Error   json.RawMessage `json:"error,omitempty"`
	// Of is the type of the control message that an error is about; empty if it ends the session.
	Of string `json:"of,omitempty"`
}

// request is a text message of a caller.
type request struct {
	Type    string `json:"type"`
	Rows    int32  `json:"rows"`
	Columns int32  `json:"columns"`
	Signal  int32  `json:"signal"`
	Group   bool   `json:"group"`
}

// errLeft is the end of a session by its caller.
func errLeft() error {
	return fault.New(context.Canceled, fault.Cancelled, "the caller has left")
}

// run passes messages on until the process ends, the caller leaves, or the gateway stops.
func (s *session) run(parent context.Context) {
	ctx, cancel := context.WithCancelCause(parent)
	s.conn.SetReadLimit(maxFrame)
	var parts sync.WaitGroup
	err := s.follow(ctx, cancel, &parts)
	code, reason := websocket.StatusNormalClosure, ""
	cause := context.Cause(ctx)
	switch {
	case s.stopping():
		code, reason = websocket.StatusGoingAway, "the gateway is stopping; connect again"
	case err != nil && cause == nil:
		st := s.api.statusOf(parent, err)
		_ = s.tell(parent, &control{Type: "error", Error: s.api.statusJSON(st)})
		code, reason = websocket.StatusInternalError, string(fault.ReasonOf(rpc.FromStatus(st.Err())))
	}
	cancel(errLeft()) // a message to the caller does not use ctx, which would break its connection
	if cause == nil || s.stopping() {
		_ = s.conn.Close(code, reason)
	}
	_ = s.conn.CloseNow()
	parts.Wait()
}

// stopping reports whether the gateway stops.
func (s *session) stopping() bool {
	select {
	case <-s.api.config.Draining:
		return true
	default:
		return false
	}
}

// follow sends the output of the process until it has ended.
func (s *session) follow(ctx context.Context, cancel context.CancelCauseFunc, parts *sync.WaitGroup) error {
	parts.Go(func() {
		select {
		case <-s.api.config.Draining:
			cancel(errDraining())
		case <-ctx.Done():
		}
	})
	events, err := s.events(ctx)
	if err != nil {
		return err
	}
	parts.Go(func() { s.read(ctx, cancel) })
	parts.Go(func() { s.feed(ctx) })
	parts.Go(func() { s.ping(ctx, cancel) })
	started, err := s.begin(events)
	if err != nil {
		return err
	}
	s.process = byPID(started.GetPid())
	close(s.started)
	if err := s.tell(ctx, &control{Type: "started", Process: messageJSON(started)}); err != nil {
		return err
	}
	for {
		event, err := events()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent ended the stream; connect again")
			}
			return err
		}
		switch e := event.GetEvent().(type) {
		case *processv1.ProcessEvent_Output:
			if err := s.output(ctx, e.Output); err != nil {
				cancel(errLeft())
				return err
			}
		case *processv1.ProcessEvent_Ended:
			return s.tell(ctx, &control{Type: "ended", Exit: messageJSON(e.Ended)})
		}
	}
}

// events starts the process or attaches to it, and returns what receives its events.
func (s *session) events(ctx context.Context) (func() (*processv1.ProcessEvent, error), error) {
	if s.start != nil {
		stream, err := s.service.StartProcess(ctx, s.start)
		return func() (*processv1.ProcessEvent, error) {
			m, err := stream.Recv()
			return m.GetEvent(), err
		}, err
	}
	stream, err := s.service.ConnectProcess(ctx, s.attach)
	return func() (*processv1.ProcessEvent, error) {
		m, err := stream.Recv()
		return m.GetEvent(), err
	}, err
}

// begin returns the process, which the first event describes.
func (s *session) begin(events func() (*processv1.ProcessEvent, error)) (*processv1.Process, error) {
	first, err := events()
	if err != nil {
		return nil, err
	}
	if first.GetStarted() == nil {
		return nil, fault.New(errdefs.ErrInternal, fault.Internal, "the agent did not say which process it is")
	}
	return first.GetStarted(), nil
}

// output sends a piece of output: bytes of the terminal as they are, those of other streams after a byte that says which.
func (s *session) output(ctx context.Context, out *processv1.ProcessOutput) error {
	if !s.seen || out.GetOffset() != s.next {
		offset := out.GetOffset()
		if err := s.tell(ctx, &control{Type: "offset", Offset: &offset}); err != nil {
			return err
		}
	}
	s.seen, s.next = true, out.GetOffset()+int64(len(out.GetData()))
	data := out.GetData()
	if out.GetStream() != processv1.ProcessOutput_STREAM_TERMINAL {
		data = append([]byte{byte(out.GetStream())}, data...)
	}
	return s.write(ctx, websocket.MessageBinary, data)
}

// tell sends a control message.
func (s *session) tell(ctx context.Context, c *control) error {
	raw, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return s.write(ctx, websocket.MessageText, raw)
}

func (s *session) write(ctx context.Context, kind websocket.MessageType, data []byte) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), streamWriteTimeout)
	defer cancel()
	return s.conn.Write(ctx, kind, data)
}

func messageJSON(m proto.Message) json.RawMessage {
	raw, err := protojson.Marshal(m)
	if err != nil {
		return json.RawMessage("{}")
	}
	return compact(raw)
}

// read handles what the caller sends. Its end is the end of the session.
func (s *session) read(ctx context.Context, cancel context.CancelCauseFunc) {
	defer cancel(errLeft())
	for {
		// A context that ends would close the connection, and run has a last message for it.
		kind, data, err := s.conn.Read(context.WithoutCancel(ctx))
		if err != nil {
			return
		}
		s.busy.Store(true)
		select {
		case <-s.started:
		case <-ctx.Done():
			return
		}
		if kind == websocket.MessageText {
			s.control(ctx, data)
		} else {
			s.push(ctx, piece{data: data})
		}
		s.busy.Store(false)
		if ctx.Err() != nil {
			return
		}
	}
}

func (s *session) push(ctx context.Context, p piece) {
	select {
	case s.input <- p:
	case <-ctx.Done():
	}
}

// control does what a control message asks for. An error is reported, and the session continues.
func (s *session) control(ctx context.Context, data []byte) {
	var r request
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&r)
	if err != nil {
		err = fault.Field("type", "invalid control message: %v", err)
	} else {
		err = s.do(ctx, r)
	}
	if err != nil {
		s.report(ctx, r.Type, err)
	}
}

func (s *session) do(ctx context.Context, r request) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	namespace, name := s.parameters.namespace, s.parameters.name
	var err error
	switch r.Type {
	case "resize":
		_, err = s.service.ResizeTerminal(ctx, &processv1.ResizeTerminalRequest{
			Namespace: namespace, Name: name, Process: s.process, Size: &processv1.TerminalSize{Rows: r.Rows, Columns: r.Columns},
		})
	case "signal":
		_, err = s.service.SendSignal(ctx, &processv1.SendSignalRequest{Namespace: namespace, Name: name, Process: s.process, Signal: r.Signal, Group: r.Group})
	case "closeInput":
		s.push(ctx, piece{end: true})
	default:
		err = fault.Field("type", "is %q, want resize, signal or closeInput", r.Type)
	}
	return err
}

// report sends the error of something that the caller asked for.
func (s *session) report(ctx context.Context, of string, err error) {
	if ctx.Err() != nil {
		return
	}
	if of == "" {
		of = "unknown"
	}
	_ = s.tell(ctx, &control{Type: "error", Error: s.api.statusJSON(s.api.statusOf(ctx, err)), Of: of})
}

// feed passes input on, in its order. After an error, what follows is another call.
func (s *session) feed(ctx context.Context) {
	var stream grpc.ClientStreamingClient[processv1.StreamInputRequest, processv1.StreamInputResponse]
	for {
		var p piece
		select {
		case p = <-s.input:
		case <-ctx.Done():
			return
		}
		var err error
		if stream == nil && !p.end {
			stream, err = s.service.StreamInput(ctx)
		}
		if err == nil && !p.end {
			err = stream.Send(&processv1.StreamInputRequest{
				Namespace: s.parameters.namespace, Name: s.parameters.name, Process: s.process, Data: p.data,
			})
			if err == nil {
				continue
			}
		}
		if stream != nil { // it has failed, or its end was asked for
			if _, end := stream.CloseAndRecv(); end != nil {
				err = end
			}
			stream = nil
		}
		if err == nil {
			_, err = s.service.CloseInput(ctx, &processv1.CloseInputRequest{
				Namespace: s.parameters.namespace, Name: s.parameters.name, Process: s.process,
			})
		}
		if err != nil {
			s.report(ctx, "input", err)
		}
	}
}

// ping ends the session if the caller does not answer.
func (s *session) ping(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		select {
		case <-s.api.config.Clock.After(pingInterval):
		case <-ctx.Done():
			return
		}
		if s.busy.Load() {
			continue
		}
		asking, done := context.WithTimeout(context.WithoutCancel(ctx), pingTimeout)
		err := s.conn.Ping(asking)
		done()
		if err != nil && !s.busy.Load() {
			cancel(errLeft())
			_ = s.conn.CloseNow() // read waits for it
			return
		}
	}
}
