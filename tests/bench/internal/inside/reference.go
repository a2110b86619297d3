package inside

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
)

// reference is a gRPC server on the loopback interface, with TLS and gRPC's defaults, that takes and gives bytes.
type reference struct {
	filesystemv1.UnimplementedFilesystemServiceServer

	server  *grpc.Server
	conn    *grpc.ClientConn
	client  filesystemv1.FilesystemServiceClient
	content []byte // of what it gives
}

func startReference() (*reference, error) {
	certificate, pool, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("making a certificate: %w", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("starting the reference: %w", err)
	}
	r := &reference{server: grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(certificate)))}
	filesystemv1.RegisterFilesystemServiceServer(r.server, r)
	go func() { _ = r.server.Serve(listener) }()
	if r.conn, err = grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(pool, ""))); err != nil {
		r.server.Stop()
		return nil, fmt.Errorf("starting the reference: %w", err)
	}
	r.client = filesystemv1.NewFilesystemServiceClient(r.conn)
	return r, nil
}

// selfSigned returns a certificate for the loopback address, and a pool with it.
func selfSigned() (*tls.Certificate, *x509.CertPool, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	leaf, err := x509.ParseCertificate(raw)
	if err != nil {
		return nil, nil, err
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return &tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key, Leaf: leaf}, pool, nil
}

func (r *reference) close() error {
	r.server.Stop()
	return r.conn.Close()
}

// WriteFile takes bytes.
func (r *reference) WriteFile(stream grpc.ClientStreamingServer[filesystemv1.WriteFileRequest, filesystemv1.WriteFileResponse]) error {
	var n int64
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&filesystemv1.WriteFileResponse{WrittenBytes: n})
		} else if err != nil {
			return err
		}
		n += int64(len(m.GetData()))
	}
}

// ReadFile gives bytes.
func (r *reference) ReadFile(_ *filesystemv1.ReadFileRequest, stream grpc.ServerStreamingServer[filesystemv1.ReadFileResponse]) error {
	for at := 0; at < len(r.content); at += chunk {
		if err := stream.Send(&filesystemv1.ReadFileResponse{Data: r.content[at:min(at+chunk, len(r.content))]}); err != nil {
			return err
		}
	}
	return nil
}

func (r *reference) up(ctx context.Context, content []byte) error {
	return send(ctx, r.client, content)
}

func (r *reference) down(ctx context.Context, content []byte) error {
	r.content = content
	return receive(ctx, r.client, len(content))
}
