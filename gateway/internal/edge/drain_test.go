package edge_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/edge"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// registered keeps the description of the service that is registered.
type registered struct{ desc *grpc.ServiceDesc }

func (r *registered) RegisterService(desc *grpc.ServiceDesc, _ any) { r.desc = desc }

// quietStream is a stream of a caller that sends nothing.
type quietStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // as every gRPC stream
}

func (s *quietStream) Context() context.Context     { return s.ctx }
func (s *quietStream) SetHeader(metadata.MD) error  { return nil }
func (s *quietStream) SendHeader(metadata.MD) error { return nil }
func (s *quietStream) SetTrailer(metadata.MD)       {}
func (s *quietStream) RecvMsg(any) error            { <-s.ctx.Done(); return s.ctx.Err() }

// ending is an agent whose stream ends when over is closed.
type ending struct {
	grpc.ClientConnInterface
	over chan struct{}
}

func (e *ending) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return &endingStream{ctx: ctx, over: e.over}, nil
}

type endingStream struct {
	grpc.ClientStream
	ctx  context.Context //nolint:containedctx // as every gRPC stream
	over chan struct{}
}

func (s *endingStream) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (s *endingStream) Trailer() metadata.MD         { return nil }
func (s *endingStream) CloseSend() error             { return nil }
func (s *endingStream) SendMsg(any) error            { return nil }

func (s *endingStream) RecvMsg(any) error {
	select {
	case <-s.over:
		return io.EOF
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// TestProxyDrainOfTunnels: when the process stops, the tunnels of its own HTTP requests finish, and those of callers end.
func TestProxyDrainOfTunnels(t *testing.T) {
	r, e, closing := &registered{}, &ending{over: make(chan struct{})}, make(chan struct{})
	edge.Register(r, tunnelv1.File_fastsandbox_tunnel_v1_tunnel_service_proto.Services().ByName("TunnelService"), e, closing)
	begin := func(cert *x509.Certificate) <-chan error {
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		state := tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{cert}}}
		ctx = peer.NewContext(ctx, &peer.Peer{AuthInfo: credentials.TLSInfo{State: state}})
		done := make(chan error, 1)
		go func() { done <- r.desc.Streams[0].Handler(nil, &quietStream{ctx: ctx}) }()
		return done
	}
	own := begin(&x509.Certificate{URIs: []*url.URL{{Scheme: "spiffe", Host: rpc.Domain, Path: "/" + string(rpc.RoleGateway)}}})
	callers := begin(&x509.Certificate{})
	close(closing)
	requireReason(t, rpc.ToStatus(<-callers), fault.AgentUnavailable)
	select {
	case err := <-own:
		require.Fail(t, "it has ended", "%v", err)
	default:
	}
	close(e.over)
	require.NoError(t, <-own)
}
