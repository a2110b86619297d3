package rpc

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/sercand/kuberesolver/v6"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// KubernetesScheme is the scheme of targets that are Services: kubernetes:///NAME.NAMESPACE:PORT.
const KubernetesScheme = "kubernetes"

// ClientConfig configures a client connection.
type ClientConfig struct {
	// TLS of the client.
	TLS TLS
	// ServerName is the name that the server's certificate must have. Empty: the host of the target.
	ServerName string
	// OrName is another name that the certificate may have instead; empty for none.
	OrName string
	// AgentUID is the uid of the Pod whose agent the server must be, by its certificate; ServerName is that of agents then. Empty: any
	// server.
	AgentUID string
	// Token returns the bearer token that calls carry. Nil: calls carry none. It is never sent in plaintext.
	Token func() (string, error)
	// Leader supplies the term that calls carry. Nil: calls carry none.
	Leader Leader
	// Silence is how long a server may take to say that it has received a unary call, before the call fails as UNAVAILABLE. Zero: for
	// ever; for clients of the API DefaultSilence.
	Silence time.Duration
	// Bulk says that a connection carries streams of data: its buffers are larger, and a transfer takes a third of the processor time.
	Bulk bool
	// Files says that it carries nothing but files: as much as filesWindow of one is on its way before it is read. On a connection with terminals, what
	// was sent last would wait behind that.
	Files bool
	// Options are added after the defaults.
	Options []grpc.DialOption
}

// Sizes of the buffers of a connection, in bytes. A write buffer is there while something is written.
const (
	smallBuffer     = 4 << 10
	bulkReadBuffer  = 32 << 10
	bulkWriteBuffer = 64 << 10
)

// How much of one stream, and of all streams of a connection, is on its way at most before it is read. gRPC's own window begins with 64 KiB and follows
// what it measures, up to 16 MiB; between processes of one node it stays small, and both sides wait for each other.
const (
	filesWindow     = 4 << 20
	filesConnWindow = 16 << 20
)

// Dial returns a connection that is established on first use and re-established within about a second whenever it breaks.
// It reads the certificates and does no other I/O.
func Dial(target string, cfg ClientConfig) (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if !cfg.TLS.Insecure {
		name := cfg.ServerName
		switch {
		case cfg.AgentUID != "":
			name = RoleAgent.ServerName()
		case name == "":
			name = hostOf(target)
		}
		c, err := cfg.TLS.clientConfig(name, cfg.OrName, cfg.AgentUID)
		if err != nil {
			return nil, fmt.Errorf("dialing %s: %w", target, err)
		}
		creds = alertCredentials{gatherCredentials{credentials.NewTLS(c)}}
	}
	var silent *silence
	if cfg.Silence > 0 {
		silent = &silence{limit: cfg.Silence, conns: map[link]*trackedConn{}}
		creds = silent.over(creds)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithStatsHandler(obs.ClientHandler()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(hardMaxRecvBytes), grpc.ForceCodecV2(newCodec())),
	}
	options = append(options, cfg.buffers()...)
	if strings.HasPrefix(target, KubernetesScheme+":") {
		options = append(options, grpc.WithResolvers(kuberesolver.NewBuilder(nil, KubernetesScheme)),
			grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`))
	}
	if cfg.Token != nil {
		options = append(options, grpc.WithPerRPCCredentials(bearer(cfg.Token)))
	}
	if cfg.Leader != nil {
		options = append(options, carryTerm(cfg.Leader)...)
	}
	if silent != nil {
		options = append(options, silent.options()...)
	}
	conn, err := grpc.NewClient(target, append(options, cfg.Options...)...)
	if err != nil {
		return nil, fmt.Errorf("dialing %s: %w", target, err)
	}
	return conn, nil
}

// buffers returns the sizes of the buffers of a connection. An allocator has one to every agent, and most carry little data: TLS has a read buffer
// already, and 2,000 agents to which something is announced at once have a write buffer each.
func (c ClientConfig) buffers() []grpc.DialOption {
	read, write := smallBuffer, smallBuffer
	if c.Bulk || c.Files {
		read, write = bulkReadBuffer, bulkWriteBuffer
	}
	options := []grpc.DialOption{grpc.WithReadBufferSize(read), grpc.WithWriteBufferSize(write)}
	if c.Files {
		options = append(options, grpc.WithInitialWindowSize(filesWindow), grpc.WithInitialConnWindowSize(filesConnWindow))
	}
	return options
}

// bearer adds a token to calls.
type bearer func() (string, error)

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := b()
	if err != nil {
		return nil, fmt.Errorf("reading the bearer token: %w", err)
	}
	return map[string]string{authorizationKey: "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (b bearer) RequireTransportSecurity() bool { return true }

// hostOf returns the host of a target such as `dns:///host:port` or `host:port`.
func hostOf(target string) string {
	if i := strings.LastIndex(target, "/"); i >= 0 {
		target = target[i+1:]
	}
	if host, _, err := net.SplitHostPort(target); err == nil {
		return host
	}
	return target
}
