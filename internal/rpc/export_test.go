package rpc

import (
	"context"

	"buf.build/go/protovalidate"
	"github.com/go-logr/logr"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
)

// UnaryInterceptors returns the interceptors of the unary calls of a server with a configuration, without the server.
func UnaryInterceptors(ctx context.Context, cfg ServerConfig) ([]grpc.UnaryServerInterceptor, error) {
	log := logr.FromContextOrDiscard(ctx)
	validator, err := protovalidate.New()
	if err != nil {
		return nil, err
	}
	users, err := cfg.Users.audited(log, nil)
	if err != nil {
		return nil, err
	}
	cfg.MaxRecvBytes = defaultMaxRecvBytes
	s := &Server{config: cfg, metrics: grpcprom.NewServerMetrics()}
	unary, _ := s.interceptors(log, s.admission(validator, users))
	return unary, nil
}

// NewCodec returns the codec of servers and clients.
func NewCodec() encoding.CodecV2 { return newCodec() }

// Gathered returns credentials whose connections write the records of one write together.
func Gathered(c credentials.TransportCredentials) credentials.TransportCredentials {
	return gatherCredentials{c}
}
