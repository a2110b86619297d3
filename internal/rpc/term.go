package rpc

import (
	"context"
	"errors"
	"io"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// TermKey is the metadata key of a leader's term. proto/fastsandbox/agent/v1/agent_service.proto tells what it is for.
const TermKey = "fast-sandbox-term"

// Leader is whom a client's calls are made for.
type Leader interface {
	// Term is the term that calls carry now; 0 for none.
	Term() int64
	// Superseded tells that a server has refused a call because it knows a higher term.
	Superseded(term int64)
}

// TermOf is the term that a call carries, 0 if none. An error names the metadata key.
func TermOf(ctx context.Context) (int64, error) {
	values := metadata.ValueFromIncomingContext(ctx, TermKey)
	if len(values) == 0 {
		return 0, nil
	}
	term, err := strconv.ParseInt(values[0], 10, 64)
	if err != nil || term < 0 || len(values) > 1 {
		return 0, fault.Field(TermKey, "the metadata is one number that is not negative")
	}
	return term, nil
}

// carryTerm has calls carry a leader's term and tells it of refusals.
func carryTerm(l Leader) []grpc.DialOption {
	carry := func(ctx context.Context) context.Context {
		if term := l.Term(); term > 0 {
			return metadata.AppendToOutgoingContext(ctx, TermKey, strconv.FormatInt(term, 10))
		}
		return ctx
	}
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoke(carry(ctx), method, req, reply, cc, opts...)
			tellSuperseded(l, err)
			return err
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			s, err := open(carry(ctx), desc, cc, method, opts...)
			tellSuperseded(l, err)
			if err != nil {
				return nil, err
			}
			return termStream{s, l}, nil
		}),
	}
}

type termStream struct {
	grpc.ClientStream
	leader Leader
}

// RecvMsg looks at the stream's end.
func (s termStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil && !errors.Is(err, io.EOF) {
		tellSuperseded(s.leader, err)
	}
	return err
}

func tellSuperseded(l Leader, err error) {
	var f *fault.Error
	if err == nil || !errors.As(FromStatus(err), &f) || f.Reason() != fault.LeaderSuperseded {
		return
	}
	if term, err := strconv.ParseInt(f.Metadata()[TermMetadata], 10, 64); err == nil {
		l.Superseded(term)
	}
}

// TermMetadata is the key under which a LeaderSuperseded error names the highest term that the server knows.
const TermMetadata = "term"
