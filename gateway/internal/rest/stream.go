package rest

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/grpc-ecosystem/grpc-gateway/v2/utilities"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// streamWriteTimeout is how long the write of one message may take: a caller that reads nothing is disconnected.
const streamWriteTimeout = time.Minute

// routeStreams replaces grpc-gateway's own handlers of streams. These hold the headers back until the first message, write
// an early error in another form than all other errors, and have no raw output.
func (a *api) routeStreams() error {
	for _, r := range a.routes {
		if !r.streams() {
			continue
		}
		handler := func(w http.ResponseWriter, req *http.Request, params map[string]string) { a.stream(r, w, req, params) }
		if err := a.mux.HandlePath(r.verb, r.pattern, handler); err != nil {
			return err
		}
	}
	return nil
}

// wantsText reports whether text/plain is the first of the accepted types that the gateway can send.
func wantsText(accept []string) bool {
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		kind, _, err := mime.ParseMediaType(strings.TrimSpace(part))
		switch {
		case err != nil:
		case kind == "text/plain", kind == "text/*":
			return true
		case kind == "application/json", kind == "application/x-ndjson", kind == "*/*":
			return false
		}
	}
	return false
}

// stream serves one stream. Each message is a line {"result":{...}}, or raw bytes for a log that the caller accepts as
// text/plain. An error before the first message is an ordinary error. A later one is the last line {"error":{...}}, or, in
// raw output, which has no room for it, an aborted connection, so that a truncated log never looks complete.
func (a *api) stream(rt *route, w http.ResponseWriter, r *http.Request, params map[string]string) {
	in := newMessage(rt.method.Input())
	if err := a.fill(rt, in, r, params); err != nil {
		a.handleError(r.Context(), a.mux, nil, w, r, err)
		return
	}
	ctx, cancel := a.streamContext(r)
	defer cancel(nil)
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Time{}) // each message sets its own
	a.metrics.streams.Inc()
	defer a.metrics.streams.Dec()

	var s *openedStream
	err := again(ctx, a.config.Clock, func() (err error) {
		s, err = openStream(ctx, rt, in)
		return err
	})
	if err != nil {
		a.writeError(ctx, w, endOf(ctx, r, err), 0)
		return
	}
	_, isLog := s.message().(*sandboxv1.StreamLogsResponse)
	out := &lines{api: a, w: w, control: control, raw: isLog && wantsText(r.Header.Values("Accept"))}
	out.begin()
	for {
		message, err := s.next()
		switch {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			out.fail(ctx, endOf(ctx, r, err))
			return
		case !out.send(message):
			return
		}
	}
}

// endOf returns why a stream ended: the gateway's own reason if the gateway ended it, else the error of the call.
func endOf(ctx context.Context, r *http.Request, err error) error {
	if cause := context.Cause(ctx); cause != nil && r.Context().Err() == nil {
		return cause
	}
	return err
}

// openedStream is a stream that the server has accepted, with the first message or the end if that came before the headers.
type openedStream struct {
	route  *route
	stream grpc.ClientStream
	first  proto.Message
	end    error
}

// openStream opens a stream and waits until the server accepts or refuses it. A server that has nothing to send yet sends
// headers before its first message; a server that refuses sends none.
func openStream(ctx context.Context, rt *route, in proto.Message) (*openedStream, error) {
	stream, err := rt.upstream.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, rt.fullMethod())
	if err != nil {
		return nil, err
	}
	s := &openedStream{route: rt, stream: stream}
	if err := errors.Join(stream.SendMsg(in), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if md, err := stream.Header(); err == nil && md != nil {
		return s, nil
	}
	first := s.message()
	if err = stream.RecvMsg(first); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	s.first, s.end = first, err
	return s, nil
}

// message returns an empty message of the stream's type.
func (s *openedStream) message() proto.Message { return newMessage(s.route.method.Output()) }

// next returns the next message.
func (s *openedStream) next() (proto.Message, error) {
	if s.end != nil {
		return nil, s.end
	}
	if first := s.first; first != nil {
		s.first = nil
		return first, nil
	}
	message := s.message()
	return message, s.stream.RecvMsg(message)
}

// streamContext returns a context that ends with the request, or with errDraining when the process stops.
func (a *api) streamContext(r *http.Request) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(r.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-a.config.Draining:
			cancel(errDraining())
		case <-ctx.Done():
		}
	}()
	return ctx, func(cause error) { cancel(cause); <-done }
}

// fill sets in from the body, the path and the query. checkQuery has checked the names in the query before.
func (a *api) fill(rt *route, in proto.Message, r *http.Request, params map[string]string) error {
	if rt.body == "*" {
		if err := a.json.NewDecoder(r.Body).Decode(in); err != nil && !errors.Is(err, io.EOF) {
			return invalid(err.Error())
		}
	}
	filter := make([][]string, 0, len(params))
	for name, value := range params {
		filter = append(filter, strings.Split(name, "."))
		if err := runtime.PopulateFieldFromPath(in, name, value); err != nil {
			return invalid(err.Error())
		}
	}
	if rt.body == "*" {
		return nil
	}
	if err := runtime.PopulateQueryParameters(in, r.URL.Query(), utilities.NewDoubleArray(filter)); err != nil {
		return invalid(err.Error())
	}
	return nil
}

// lines writes the answer of a stream.
type lines struct {
	api     *api
	w       http.ResponseWriter
	control *http.ResponseController
	raw     bool
}

// begin sends the headers.
func (l *lines) begin() {
	kind := "application/x-ndjson"
	if l.raw {
		kind = "text/plain; charset=utf-8"
	}
	l.w.Header().Set("Content-Type", kind)
	l.w.WriteHeader(http.StatusOK)
	l.write(nil)
}

// send writes one message and reports whether the caller is still connected.
func (l *lines) send(message proto.Message) bool {
	if piece, ok := message.(*sandboxv1.StreamLogsResponse); ok && l.raw {
		return l.write(piece.GetData())
	}
	body, err := protojson.Marshal(message)
	if err != nil {
		l.api.config.Log.Error(err, "marshaling message")
		return false
	}
	line := make([]byte, 0, len(body)+12)
	line = append(line, `{"result":`...)
	line = append(line, compact(body)...)
	return l.write(append(line, "}\n"...))
}

// fail ends the answer with an error.
func (l *lines) fail(ctx context.Context, err error) {
	if l.raw {
		l.api.config.Log.Info("aborting raw output", obs.KeyError, err.Error())
		panic(http.ErrAbortHandler)
	}
	line := append([]byte(`{"error":`), l.api.statusJSON(l.api.statusOf(ctx, err))...)
	l.write(append(line, "}\n"...))
}

func (l *lines) write(p []byte) bool {
	_ = l.control.SetWriteDeadline(l.api.config.Clock.Now().Add(streamWriteTimeout))
	if _, err := l.w.Write(p); err != nil {
		return false
	}
	err := l.control.Flush()
	_ = l.control.SetWriteDeadline(time.Time{})
	return err == nil
}
