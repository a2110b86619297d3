package edge

import (
	"context"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// NewStream implements grpc.ClientConnInterface. The stream is opened by its first message, which names the sandbox.
func (r *Router) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return &stream{router: r, ctx: ctx, desc: desc, method: method, opts: opts, opened: make(chan struct{})}, nil
}

// stream is a stream to the agent that its first message is for. As with any stream, one goroutine may send while another one receives.
type stream struct {
	router *Router
	ctx    context.Context //nolint:containedctx // of the call
	desc   *grpc.StreamDesc
	method string
	opts   []grpc.CallOption

	// opened is closed when there is an inner stream, or will be none.
	opened chan struct{}
	way    *way
	inner  grpc.ClientStream
	done   func()
	err    error
	first  any // the only request, which can be sent again
	began  bool
}

// open opens the stream for its first message. If the agent cannot be reached, it looks once where the sandbox is now: nothing was sent.
func (s *stream) open(m any) {
	for again := false; ; again = true {
		if s.way, s.done, s.err = s.router.route(s.ctx, s.method, m); s.err != nil {
			return
		}
		if s.inner, s.err = s.way.agent.conn.NewStream(s.way.context(s.ctx), s.desc, s.method, s.opts...); s.err == nil {
			return
		}
		s.done()
		s.inner, s.done = nil, nil
		if !isLost(s.err) {
			return
		}
		s.router.forget(s.way)
		if again {
			s.err = s.way.unreachable(s.ctx, s.err, false)
			return
		}
	}
}

// SendMsg implements grpc.ClientStream.
func (s *stream) SendMsg(m any) error {
	select {
	case <-s.opened:
	default:
		s.open(m)
		if !s.desc.ClientStreams {
			s.first = m
		}
		close(s.opened)
	}
	if s.err != nil {
		return s.err
	}
	return s.inner.SendMsg(m)
}

// CloseSend implements grpc.ClientStream. A stream that is closed before its first message ends without one.
func (s *stream) CloseSend() error {
	select {
	case <-s.opened:
	default:
		s.err = fault.Field("namespace", "the first message names the sandbox")
		close(s.opened)
	}
	if s.inner == nil {
		return nil
	}
	return s.inner.CloseSend()
}

// await waits for the first message.
func (s *stream) await() error {
	select {
	case <-s.opened:
		return s.err
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// RecvMsg implements grpc.ClientStream.
func (s *stream) RecvMsg(m any) error {
	if err := s.await(); err != nil {
		return err
	}
	err := s.inner.RecvMsg(m)
	if !s.began && s.first != nil && isRefused(err) {
		if err = s.reopen(); err == nil {
			err = s.inner.RecvMsg(m)
		}
	}
	s.began = true
	if err == nil {
		return nil
	}
	if isLost(err) || isRefused(err) {
		s.router.forget(s.way)
	}
	if s.done != nil {
		s.done()
		s.done = nil
	}
	return s.way.unreachable(s.ctx, err, true)
}

// reopen sends the only request to where the sandbox is now.
func (s *stream) reopen() error {
	s.done()
	s.router.forget(s.way)
	s.inner, s.done = nil, nil
	if s.open(s.first); s.err != nil {
		return s.err
	}
	if err := s.inner.SendMsg(s.first); err != nil && err != io.EOF { //nolint:errorlint // the contract of SendMsg
		return err
	}
	return s.inner.CloseSend()
}

// Header implements grpc.ClientStream. A stream that may be opened again has none before its first message.
func (s *stream) Header() (metadata.MD, error) {
	if err := s.await(); err != nil {
		return nil, err
	}
	if s.first != nil && !s.began {
		return nil, nil
	}
	return s.inner.Header()
}

// Trailer implements grpc.ClientStream.
func (s *stream) Trailer() metadata.MD {
	if s.inner == nil {
		return nil
	}
	return s.inner.Trailer()
}

// Context implements grpc.ClientStream.
func (s *stream) Context() context.Context { return s.ctx }
