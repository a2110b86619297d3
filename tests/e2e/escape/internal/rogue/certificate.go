package rogue

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// callTime bounds one call.
const callTime = 5 * time.Second

// certificate is that of an agent, as files and as it is.
type certificate struct {
	files rpc.TLS
	pair  tls.Certificate
	own   *corev1.Pod
}

// withCertificate makes attempts with the certificate of the hostile agent, which it has in its Pod.
func withCertificate(ctx context.Context, s *mesh.Scene, pod *corev1.Pod) error {
	dir, err := os.MkdirTemp("", "escape-certificate-")
	if err != nil {
		return fmt.Errorf("keeping a certificate: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var secret corev1.Secret
	if err := s.Kube.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: pod.Name + "-tls"}, &secret); err != nil {
		return fmt.Errorf("reading the certificate of the agent: %w", err)
	}
	c := &certificate{files: rpc.TLS{CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"), CAFile: s.TLS.CAFile}, own: pod}
	for path, key := range map[string]string{c.files.CertFile: corev1.TLSCertKey, c.files.KeyFile: corev1.TLSPrivateKeyKey} {
		if err := os.WriteFile(path, secret.Data[key], 0o600); err != nil {
			return fmt.Errorf("keeping a certificate: %w", err)
		}
	}
	if c.pair, err = tls.LoadX509KeyPair(c.files.CertFile, c.files.KeyFile); err != nil {
		return fmt.Errorf("reading a certificate: %w", err)
	}
	for _, a := range []struct {
		name, does, success string
		run                 func(ctx context.Context, s *mesh.Scene, c *certificate) (string, error)
	}{
		{"call the allocator as a user", "lists the sandboxes of its own tenant", "the call succeeds", listsSandboxes},
		{"call the allocator as a component", "watches all agents, as the controller does", "the call succeeds", watchesAgents},
		{"call another agent", "watches the sandboxes of another tenant's agent", "the call succeeds", watchesAgent},
		{"delete at another agent", "has another tenant's agent delete a sandbox", "the call succeeds", deletesAtAgent},
		{"sign a ticket", "signs a ticket for the output of another tenant's sandbox with its own key", "the output is sent", signsTicket},
		{"read metrics", "reads the metrics of the allocator", "they are sent", readsMetrics},
		{"pose as the allocator", "serves with its certificate where a client expects the allocator", "the client accepts it", posesAsAllocator},
		{"pose as another agent", "serves with its certificate where the allocator expects another tenant's agent", "the client accepts it", posesAsAgent},
	} {
		calling, cancel := context.WithTimeout(ctx, 4*callTime)
		evidence, refused := a.run(calling, s, c)
		if evidence == "" {
			if harm := s.Harmed(calling, s.Target); harm != "" {
				evidence = "the sandbox of the other tenant was changed: " + harm
			}
		}
		cancel()
		s.Log.Made(suite.Attempt{Name: "agent, certificate: " + a.name, Does: a.does + ", with the certificate of an agent", Success: a.success}, "", evidence, refused)
	}
	return nil
}

// call makes a call with the certificate.
func (c *certificate) call(ctx context.Context, target string, cfg rpc.ClientConfig, call func(context.Context, *grpc.ClientConn) error) (string, error) {
	cfg.TLS = c.files
	conn, err := rpc.Dial(target, cfg)
	if err != nil {
		return "", suite.Brokenf("connecting: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	if err := call(ctx, conn); err != nil {
		return "", err
	}
	return "the call has succeeded", nil
}

func listsSandboxes(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	return c.call(ctx, s.Addr, rpc.ClientConfig{}, func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := sandboxv1.NewSandboxServiceClient(conn).ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: s.Hostile.Namespace})
		return err
	})
}

func watchesAgents(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	return c.call(ctx, s.Addr, rpc.ClientConfig{}, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := allocatorv1.NewAllocatorServiceClient(conn).WatchAgents(ctx, &allocatorv1.WatchAgentsRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	})
}

func target(s *mesh.Scene) string { return s.Target.AgentIP + ":" + s.AgentPort() }

func watchesAgent(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	return c.call(ctx, target(s), rpc.ClientConfig{AgentUID: s.Target.AgentUID}, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := agentv1.NewAgentServiceClient(conn).WatchStatus(ctx, &agentv1.WatchStatusRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	})
}

func fenceOf(s *mesh.Scene) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: s.Target.UID, Attempt: s.Target.Attempt, AgentUid: s.Target.AgentUID}
}

func deletesAtAgent(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	return c.call(ctx, target(s), rpc.ClientConfig{AgentUID: s.Target.AgentUID}, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := agentv1.NewAgentServiceClient(conn).DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: fenceOf(s)})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	})
}

// signsTicket calls without the certificate, which is the signer of the ticket.
func signsTicket(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	ticket, err := auth.Ticket{
		User: "admin", Method: agentv1.AgentService_StreamLogs_FullMethodName, AgentUID: s.Target.AgentUID, SandboxUID: s.Target.UID,
		Attempt: s.Target.Attempt, Expires: time.Now().Add(auth.TicketLife),
	}.Sign(c.pair.PrivateKey, c.pair.Certificate)
	if err != nil {
		return "", suite.Brokenf("signing a ticket: %w", err)
	}
	plain := &certificate{files: rpc.TLS{CAFile: s.TLS.CAFile}}
	return plain.call(ctx, target(s), rpc.ClientConfig{AgentUID: s.Target.AgentUID, Token: func() (string, error) { return ticket, nil }},
		func(ctx context.Context, conn *grpc.ClientConn) error {
			stream, err := agentv1.NewAgentServiceClient(conn).StreamLogs(ctx, &agentv1.StreamLogsRequest{Fence: fenceOf(s)})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		})
}

func readsMetrics(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	pods := corev1.PodList{}
	if err := s.Kube.List(ctx, &pods, client.InNamespace(mesh.System), client.MatchingLabels{"app.kubernetes.io/name": "allocator"}); err != nil || len(pods.Items) == 0 {
		return "", suite.Brokenf("looking for the allocator: %w", err)
	}
	cfg, err := c.files.ClientConfig(rpc.RoleAllocator.ServerName())
	if err != nil {
		return "", suite.Brokenf("connecting: %w", err)
	}
	transport := &http.Transport{TLSClientConfig: cfg}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+pods.Items[0].Status.PodIP+":9091/metrics", nil)
	if err != nil {
		return "", suite.Brokenf("connecting: %w", err)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusOK {
		return "the metrics are sent", nil
	}
	return "", fmt.Errorf("the answer is %s", resp.Status)
}

func posesAsAllocator(ctx context.Context, _ *mesh.Scene, c *certificate) (string, error) {
	return c.poses(ctx, rpc.ClientConfig{ServerName: rpc.RoleAllocator.ServerName()})
}

func posesAsAgent(ctx context.Context, s *mesh.Scene, c *certificate) (string, error) {
	return c.poses(ctx, rpc.ClientConfig{AgentUID: s.Target.AgentUID})
}

// poses serves with the certificate and has a client connect that expects another server. The same client accepts it as what it is: that
// proves that it would notice.
func (c *certificate) poses(ctx context.Context, expects rpc.ClientConfig) (string, error) {
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{c.pair}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13})
	if err != nil {
		return "", suite.Brokenf("listening: %w", err)
	}
	server := grpc.NewServer()
	agentv1.RegisterAgentServiceServer(server, agentv1.UnimplementedAgentServiceServer{})
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	accepts := func(cfg rpc.ClientConfig) error {
		_, err := c.call(ctx, l.Addr().String(), cfg, func(ctx context.Context, conn *grpc.ClientConn) error {
			_, err := agentv1.NewAgentServiceClient(conn).AnnounceLeader(ctx, &agentv1.AnnounceLeaderRequest{})
			if unimplemented(err) {
				return nil // the server was asked
			}
			return err
		})
		return err
	}
	if err := accepts(rpc.ClientConfig{AgentUID: string(c.own.UID)}); err != nil {
		return "", suite.Brokenf("the agent is not accepted as what it is: %w", err)
	}
	if err := accepts(expects); err != nil {
		return "", err
	}
	return "the client has accepted it", nil
}

func unimplemented(err error) bool { return status.Code(err) == codes.Unimplemented }
