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

// TermKey is the metadata key of a leader's term, which proto/fastsandbox/agent/v1/agent_service.proto documents.
const TermKey = "fast-sandbox-term"

// Leader is the leader that makes a client's calls.
type Leader interface {
	// Term returns the term that calls carry now, 0 for none.
	Term() int64
	// Superseded is called when a server refuses a call because it knows the given higher term. It must not block.
	Superseded(term int64)
}

// TermOf returns the term that a received call carries, 0 for none. An error names the metadata key.
func TermOf(ctx context.Context) (int64, error) {
	values := metadata.ValueFromIncomingContext(ctx, TermKey)
	if len(values) == 0 {
		return 0, nil
	}
	term, err := strconv.ParseInt(values[0], 10, 64)
	if err != nil || term < 0 || len(values) > 1 {
		return 0, fault.Field(TermKey, "must be one number that is not negative")
	}
	return term, nil
}

// carryTerm returns interceptors that add a leader's term to calls and report refusals to the leader.
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
			reportSuperseded(l, err)
			return err
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			s, err := open(carry(ctx), desc, cc, method, opts...)
			reportSuperseded(l, err)
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

// RecvMsg reports a refusal that ends the stream.
func (s termStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil && !errors.Is(err, io.EOF) {
		reportSuperseded(s.leader, err)
	}
	return err
}

func reportSuperseded(l Leader, err error) {
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
