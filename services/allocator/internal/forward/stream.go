package forward

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// errChanged is the cause of a call to a former leader that was canceled.
var errChanged = errors.New("the leader has changed")

// Stream is the interceptor of server-streaming calls. A stream that is handled here ends with NOT_LEADER when this replica
// loses leadership: its data would be that of a former leader.
func (f *Forwarder) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !f.forwards(info.FullMethod) {
		return handler(srv, ss)
	}
	request, _, err := messages(info.FullMethod)
	if err != nil {
		return err
	}
	if err := ss.RecvMsg(request); err != nil {
		return err
	}
	return f.route(ss.Context(), call{
		local: func() (bool, error) { return true, f.local(srv, ss, request, handler) },
		remote: func(ctx context.Context, conn *grpc.ClientConn, _ epoch) (bool, error) {
			return f.pass(ctx, ss, conn, info.FullMethod, request)
		},
	})
}

func (f *Forwarder) local(srv any, ss grpc.ServerStream, request proto.Message, handler grpc.StreamHandler) error {
	ctx, cancel := context.WithCancelCause(ss.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.watch(ctx, request, cancel)
	}()
	err := handler(srv, &readStream{ServerStream: ss, ctx: ctx, request: request})
	cancel(nil)
	<-ended
	if err != nil && errors.Is(context.Cause(ctx), errChanged) {
		return errNotLeader(nil)
	}
	return err
}

// watch ends a stream that is handled here when this replica loses leadership, and an endless one also when the process is about
// to end.
func (f *Forwarder) watch(ctx context.Context, request proto.Message, end context.CancelCauseFunc) {
	ending := f.ending
	if logs, ok := request.(*sandboxv1.StreamLogsRequest); ok && !logs.GetFollow() {
		ending = nil
	}
	for {
		state, changed := f.config.Lead.State()
		if !state.Leads {
			end(errChanged)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-ending:
			end(errChanged)
			return
		case <-changed:
		}
	}
}

// pass forwards a stream to the leader. It can be repeated until its first header or message was sent.
func (f *Forwarder) pass(ctx context.Context, ss grpc.ServerStream, conn *grpc.ClientConn, method string, request proto.Message) (bool, error) {
	ctx, cancel := context.WithCancelCause(outgoing(ctx))
	ended := make(chan struct{})
	defer func() { <-ended }()
	defer cancel(nil)
	go func() {
		defer close(ended)
		select {
		case <-ctx.Done():
		case <-f.ending:
			cancel(errChanged)
		}
	}()
	source, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return !again(nil, err, true), err
	}
	if err := source.SendMsg(request); err != nil && !errors.Is(err, io.EOF) { // after EOF the first read returns the error
		return !again(nil, err, true), err
	}
	if err := source.CloseSend(); err != nil {
		return !again(nil, err, true), err
	}
	begun := false
	// Headers are passed on at once. Without headers and without an error the call was refused; the read returns why.
	header, err := source.Header()
	if err == nil && header != nil {
		begun = true
		if err := ss.SendHeader(passed(header)); err != nil {
			return true, err
		}
	}
	for {
		_, reply, err := messages(method)
		if err == nil {
			err = source.RecvMsg(reply)
		}
		switch {
		case errors.Is(err, io.EOF):
			ss.SetTrailer(passed(source.Trailer()))
			return true, nil
		case err != nil && errors.Is(context.Cause(ctx), errChanged):
			return true, errNotLeader(err)
		case err != nil:
			ss.SetTrailer(passed(source.Trailer()))
			return begun || !again(nil, err, true), err
		}
		begun = true
		if err := ss.SendMsg(reply); err != nil {
			return true, err
		}
	}
}

// readStream is a stream whose request has been read.
type readStream struct {
	grpc.ServerStream
	ctx     context.Context //nolint:containedctx // a stream's context is reached through the stream
	request proto.Message
}

// Context implements grpc.ServerStream. It also ends when this replica loses leadership.
func (s *readStream) Context() context.Context { return s.ctx }

// RecvMsg implements grpc.ServerStream: it returns the request once.
func (s *readStream) RecvMsg(m any) error {
	if s.request == nil {
		return io.EOF
	}
	proto.Merge(m.(proto.Message), s.request)
	s.request = nil
	return nil
}
