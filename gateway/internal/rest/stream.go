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
)

// The streams' paths, as the proto's annotations have them. grpc-gateway's own handlers of these are replaced: they would
// hold the headers back until the first message, show an early error in another form than every other error, and know
// no raw output.
const (
	watchPattern    = "/v1/namespaces/{namespace=*}/sandboxes:watch"
	watchAllPattern = "/v1/sandboxes:watch"
	logsPattern     = "/v1/namespaces/{namespace=*}/sandboxes/{name=*}:logs"
)

// streamWriteTimeout is how long one message may take to leave: a caller that reads nothing is cut off.
const streamWriteTimeout = time.Minute

// isStream goes by the route that matched, so it holds behind routed only.
func isStream(r *http.Request) bool { return isStreamRoute(exchangeOf(r.Context()).route) }

func isStreamRoute(route string) bool {
	return route == watchPattern || route == watchAllPattern || route == logsPattern
}

func (a *api) routeStreams() error {
	for pattern, h := range map[string]runtime.HandlerFunc{watchPattern: a.watch, watchAllPattern: a.watch, logsPattern: a.logs} {
		if err := a.mux.HandlePath(http.MethodGet, pattern, h); err != nil {
			return err
		}
	}
	return nil
}

func (a *api) watch(w http.ResponseWriter, r *http.Request, params map[string]string) {
	in := &sandboxv1.WatchSandboxesRequest{}
	stream(a, w, r, in, params, func(ctx context.Context) (grpc.ServerStreamingClient[sandboxv1.WatchSandboxesResponse], error) {
		return a.client.WatchSandboxes(ctx, in)
	}, nil)
}

// logs sends the output as JSON, or, to who accepts text/plain before JSON, the bytes themselves.
func (a *api) logs(w http.ResponseWriter, r *http.Request, params map[string]string) {
	in := &sandboxv1.StreamLogsRequest{}
	var raw func(*sandboxv1.StreamLogsResponse) []byte
	if wantsText(r.Header.Values("Accept")) {
		raw = (*sandboxv1.StreamLogsResponse).GetData
	}
	stream(a, w, r, in, params, func(ctx context.Context) (grpc.ServerStreamingClient[sandboxv1.StreamLogsResponse], error) {
		return a.client.StreamLogs(ctx, in)
	}, raw)
}

// wantsText tells whether text/plain comes first among the types that a caller accepts and that we have.
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

// stream runs one stream: it fills in, opens, and sends each message as a line {"result":{...}}, or raw. An error before
// the first message is an ordinary error; a later one is the last line {"error":{...}}, or, where the output is raw and
// has no place for it, a connection broken off, so that a cut log never passes for a whole one.
func stream[T any](a *api, w http.ResponseWriter, r *http.Request, in proto.Message, params map[string]string,
	open func(context.Context) (grpc.ServerStreamingClient[T], error), raw func(*T) []byte,
) {
	if err := fill(in, r, params); err != nil {
		a.handleError(r.Context(), a.mux, nil, w, r, err)
		return
	}
	ctx, cancel := a.streamContext(r)
	defer cancel(nil)
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Time{}) // each message sets its own
	a.metrics.streams.Inc()
	defer a.metrics.streams.Dec()

	out := &lines[T]{api: a, w: w, control: control, raw: raw}
	s, err := again(ctx, func() (*opened[T], error) { return begin(ctx, open) })
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && r.Context().Err() == nil {
			err = cause
		}
		a.writeError(ctx, w, err, 0)
		return
	}
	out.begin()
	for {
		message, err := s.next()
		if errors.Is(err, io.EOF) {
			return
		}
		if cause := context.Cause(ctx); err != nil && cause != nil && r.Context().Err() == nil {
			err = cause
		}
		if err != nil {
			out.fail(ctx, err)
			return
		}
		if !out.send(message) {
			return
		}
	}
}

// opened is a stream that the server has accepted, with the first message or the end if that came before its headers.
type opened[T any] struct {
	stream grpc.ServerStreamingClient[T]
	first  *T
	end    error
}

// begin opens a stream and waits until the server accepts or refuses it. Headers come before the first message from a
// server that has nothing to say yet; from one that refuses, none do.
func begin[T any](ctx context.Context, open func(context.Context) (grpc.ServerStreamingClient[T], error)) (*opened[T], error) {
	s, err := open(ctx)
	if err != nil {
		return nil, err
	}
	if md, err := s.Header(); err == nil && md != nil {
		return &opened[T]{stream: s}, nil
	}
	first, err := s.Recv()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return &opened[T]{s, first, err}, nil
}

// next is the next message.
func (o *opened[T]) next() (*T, error) {
	if o.end != nil {
		return nil, o.end
	}
	if first := o.first; first != nil {
		o.first = nil
		return first, nil
	}
	return o.stream.Recv()
}

// streamContext ends with the request, or with errDraining when the process does.
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

// fill sets in from the path and the query, which checkQuery has seen already.
func fill(in proto.Message, r *http.Request, params map[string]string) error {
	filter := make([][]string, 0, len(params))
	for name, value := range params {
		filter = append(filter, []string{name})
		if err := runtime.PopulateFieldFromPath(in, name, value); err != nil {
			return invalid(err.Error())
		}
	}
	if err := runtime.PopulateQueryParameters(in, r.URL.Query(), utilities.NewDoubleArray(filter)); err != nil {
		return invalid(err.Error())
	}
	return nil
}

// lines writes a stream's answer.
type lines[T any] struct {
	api     *api
	w       http.ResponseWriter
	control *http.ResponseController
	raw     func(*T) []byte
}

// begin sends the headers.
func (l *lines[T]) begin() {
	kind := "application/x-ndjson"
	if l.raw != nil {
		kind = "text/plain; charset=utf-8"
	}
	l.w.Header().Set("Content-Type", kind)
	l.w.WriteHeader(http.StatusOK)
	l.write(nil)
}

// send writes one message and reports whether the caller is still there.
func (l *lines[T]) send(message *T) bool {
	if l.raw != nil {
		return l.write(l.raw(message))
	}
	m, ok := any(message).(proto.Message)
	if !ok {
		return false
	}
	body, err := protojson.Marshal(m)
	if err != nil {
		l.api.config.Log.Error(err, "marshalling message")
		return false
	}
	line := make([]byte, 0, len(body)+12)
	line = append(line, `{"result":`...)
	line = append(line, compact(body)...)
	return l.write(append(line, "}\n"...))
}

// fail ends the answer with an error.
func (l *lines[T]) fail(ctx context.Context, err error) {
	if l.raw != nil {
		l.api.config.Log.Info("ending raw output early", "err", err.Error())
		panic(http.ErrAbortHandler)
	}
	line := append([]byte(`{"error":`), l.api.statusJSON(l.api.statusOf(ctx, err))...)
	l.write(append(line, "}\n"...))
}

func (l *lines[T]) write(p []byte) bool {
	_ = l.control.SetWriteDeadline(l.api.config.Clock.Now().Add(streamWriteTimeout))
	if _, err := l.w.Write(p); err != nil {
		return false
	}
	err := l.control.Flush()
	_ = l.control.SetWriteDeadline(time.Time{})
	return err == nil
}
