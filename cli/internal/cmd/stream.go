package cmd

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// begun is a stream with its first message; nil if it has none.
type begun[T any] struct {
	stream grpc.ServerStreamingClient[T]
	first  *T
}

// openStream opens a stream. Only the opening is repeated while the server is unavailable, and bounded by the timeout. The
// error of a stream without messages is io.EOF.
func openStream[T any](ctx context.Context, c *cli, doing string, open func(context.Context) (grpc.ServerStreamingClient[T], error)) (begun[T], error) {
	return call(ctx, c, doing, func(callCtx context.Context) (begun[T], error) {
		return opening(ctx, callCtx, false, func(streamCtx context.Context) (begun[T], error) {
			stream, err := open(streamCtx)
			if err != nil {
				return begun[T]{}, err
			}
			first, err := stream.Recv()
			return begun[T]{stream, first}, err
		})
	})
}

// opening opens a stream, which lives as long as ctx. Until it is open it also ends with callCtx, unless forever is set; then the
// error is that of callCtx. The end of ctx frees its resources.
func opening[T any](ctx, callCtx context.Context, forever bool, open func(context.Context) (T, error)) (T, error) {
	if forever {
		return open(ctx)
	}
	streamCtx, cancel := context.WithCancel(ctx)
	release := context.AfterFunc(callCtx, cancel)
	out, err := open(streamCtx)
	if !release() {
		err = status.FromContextError(callCtx.Err()).Err()
	}
	return out, err
}

// ended returns the error of a stream that ended although it should not have.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return status.Error(codes.Unavailable, "the server ended the stream")
	}
	return err
}

// openOnce is openStream for a call that must not be repeated: it may have had its effect.
func openOnce[T any](ctx context.Context, c *cli, doing string, open func(context.Context) (grpc.ServerStreamingClient[T], error)) (begun[T], error) {
	callCtx, cancel := context.WithTimeout(ctx, c.settings.Timeout)
	defer cancel()
	c.progress.start(doing)
	defer c.progress.stop()
	out, err := opening(ctx, callCtx, false, func(streamCtx context.Context) (begun[T], error) {
		stream, err := open(streamCtx)
		if err != nil {
			return begun[T]{}, err
		}
		first, err := stream.Recv()
		return begun[T]{stream, first}, err
	})
	if err != nil {
		return out, c.classify(err)
	}
	c.connected = true
	return out, nil
}
