package caller

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// forged is an administrator, as the gateway would name one to the allocator.
const forged = `{"User":"admin","Groups":["system:masters"]}`

const answered = "the request is answered"

// listAs lists the target's namespace by gRPC.
func listAs(ctx context.Context, s *mesh.Scene, conn grpc.ClientConnInterface) (string, error) {
	_, err := sandboxv1.NewSandboxServiceClient(conn).ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: s.Victim.Namespace})
	return allowed(err)
}

func identities() []attempt {
	var out []attempt
	token := func(name string, of func(*mesh.Scene) string) {
		out = append(out, attempt{name: name + ", by gRPC", does: "lists the sandboxes of a tenant", success: answered, harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				conn, err := s.Dial(of(s))
				if err != nil {
					return "", suite.Brokenf("connecting: %w", err)
				}
				return listAs(ctx, s, conn)
			}}, attempt{name: name + ", by REST", does: "lists the sandboxes of a tenant", success: answered, harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
				a, err := c.do(ctx, of(s), http.MethodGet, "/v1/namespaces/"+s.Victim.Namespace+"/sandboxes", "")
				if err != nil {
					return "", suite.Brokenf("calling: %w", err)
				}
				return a.allowed()
			}})
	}
	token("no proof", func(*mesh.Scene) string { return "" })
	token("nonsense", func(*mesh.Scene) string { return "nonsense" })
	token("a token of the tenant for the API server", func(s *mesh.Scene) string { return s.Victim.KubeToken })
	token("a token without its signature", func(s *mesh.Scene) string { return unsigned(s.Victim.Token) })
	token("an API key that was guessed", func(*mesh.Scene) string { return "fsb_aaaaaaaaaaaaaaaa_bbbbbbbbbbbbbbbbbbbbbbbbbb" })
	for _, key := range []string{"fast-sandbox-caller-bin", "fast-sandbox-caller", "impersonate-user", "x-remote-user", "x-forwarded-user", "fast-sandbox-term"} {
		out = append(out, attempt{name: "metadata " + key, does: "names another user in the metadata, as the gateway does", success: answered, harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				return listAs(metadata.AppendToOutgoingContext(ctx, key, forged), s, s.Hostile.Conn)
			}})
	}
	for _, header := range []string{"Grpc-Metadata-Fast-Sandbox-Caller-Bin", "Grpc-Metadata-Authorization", "Impersonate-User", "X-Remote-User", "X-Forwarded-User", "Fast-Sandbox-Caller-Bin"} {
		out = append(out, attempt{name: "header " + header, does: "names another user in a header", success: answered, harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
				value := forged
				switch header {
				case "Grpc-Metadata-Authorization":
					value = "Bearer " + s.Victim.KubeToken
				case "Grpc-Metadata-Fast-Sandbox-Caller-Bin", "Fast-Sandbox-Caller-Bin":
					value = base64.StdEncoding.EncodeToString([]byte(forged))
				}
				a, err := c.do(ctx, s.Hostile.Token, http.MethodGet, "/v1/namespaces/"+s.Victim.Namespace+"/sandboxes", "", header, value)
				if err != nil {
					return "", suite.Brokenf("calling: %w", err)
				}
				return a.allowed()
			}})
	}
	return append(out, attempt{name: "a component's certificate of its own making", does: "calls as the controller with a certificate that no authority has signed", success: answered, harmless: true,
		run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			return asStranger(ctx, s, "controller")
		}})
}

// unsigned returns a JSON web token with the claims of another, and without a signature.
func unsigned(token string) string {
	header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none"}`))
	for i := range token {
		if token[i] == '.' {
			for j := i + 1; j < len(token); j++ {
				if token[j] == '.' {
					return header + token[i:j] + "."
				}
			}
		}
	}
	return header
}

func asStranger(ctx context.Context, s *mesh.Scene, role string) (string, error) {
	own, err := attack.SelfSigned(role)
	if err != nil {
		return "", suite.Brokenf("making a certificate: %w", err)
	}
	conn, err := grpc.NewClient(s.Addr, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		InsecureSkipVerify: true, MinVersion: tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &own, nil },
	})))
	if err != nil {
		return "", suite.Brokenf("connecting: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err = sandboxv1.NewSandboxServiceClient(conn).ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{})
	if err == nil {
		return "the call has succeeded", nil
	}
	return "", err // also if there is no connection
}

// componentCalls are calls that only components make.
func componentCalls() []attempt {
	fence := func(s *mesh.Scene) *agentv1.Fence {
		return &agentv1.Fence{SandboxUid: s.Target.UID, Attempt: s.Target.Attempt, AgentUid: s.Target.AgentUID}
	}
	out := []attempt{
		{name: "allocate", does: "reserves capacity as the controller does", success: answered, run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			_, err := s.Hostile.Allocator.Allocate(ctx, &allocatorv1.AllocateRequest{Namespace: s.Hostile.Namespace, Name: "x", SandboxUid: "x", Attempt: 1, Pool: s.Hostile.Pool, Image: "x"})
			return allowed(err)
		}},
		{name: "release", does: "ends the reservation of another tenant's sandbox", success: answered, run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			_, err := s.Hostile.Allocator.Release(ctx, &allocatorv1.ReleaseRequest{Fence: fence(s)})
			return allowed(err)
		}},
	}
	agent := func(name, does string, token func(ctx context.Context, s *mesh.Scene) (string, error), ask func(ctx context.Context, s *mesh.Scene, c agentv1.AgentServiceClient) error) {
		out = append(out, attempt{name: name, does: does, success: answered, run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			text, err := token(ctx, s)
			if err != nil {
				return "", suite.Brokenf("making a token: %w", err)
			}
			return atAgent(ctx, s, text, ask)
		}})
	}
	logs := func(ctx context.Context, s *mesh.Scene, c agentv1.AgentServiceClient) error {
		return firstMessage(c.StreamLogs(ctx, &agentv1.StreamLogsRequest{Fence: fence(s)}))
	}
	own := func(_ context.Context, s *mesh.Scene) (string, error) { return s.Hostile.Token, nil }
	agent("watch an agent", "asks another tenant's agent for its sandboxes, with a token", own, func(ctx context.Context, _ *mesh.Scene, c agentv1.AgentServiceClient) error {
		return firstMessage(c.WatchStatus(ctx, &agentv1.WatchStatusRequest{}))
	})
	agent("delete at an agent", "has another tenant's agent delete a sandbox, with a token", own, func(ctx context.Context, s *mesh.Scene, c agentv1.AgentServiceClient) error {
		return firstMessage(c.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: fence(s)}))
	})
	agent("drain an agent", "has another tenant's agent refuse sandboxes, with a token", own, func(ctx context.Context, s *mesh.Scene, c agentv1.AgentServiceClient) error {
		_, err := c.Drain(ctx, &agentv1.DrainRequest{AgentUid: s.Target.AgentUID})
		return err
	})
	agent("logs at an agent", "reads another tenant's output from its agent, with a token", own, logs)
	agent("logs at an agent with a ticket for an own sandbox", "reads another tenant's output with a ticket for a sandbox of its own", ownTicket, logs)
	agent("logs at an agent with a ticket of its own making", "reads another tenant's output with a ticket that it has signed itself", forgedTicket, logs)
	return out
}

// atAgent calls the agent of the target.
func atAgent(ctx context.Context, s *mesh.Scene, token string, ask func(ctx context.Context, s *mesh.Scene, c agentv1.AgentServiceClient) error) (string, error) {
	conn, err := rpc.Dial(agentAddress(s), rpc.ClientConfig{
		TLS: rpc.TLS{CAFile: s.TLS.CAFile}, AgentUID: s.Target.AgentUID, Token: func() (string, error) { return token, nil },
	})
	if err != nil {
		return "", suite.Brokenf("connecting: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return allowed(ask(ctx, s, agentv1.NewAgentServiceClient(conn)))
}

// ownTicket returns a ticket for the roommate, a sandbox of the hostile tenant.
func ownTicket(ctx context.Context, s *mesh.Scene) (string, error) {
	resp, err := s.Hostile.Sandboxes.CreateLogTicket(ctx, &sandboxv1.CreateLogTicketRequest{Namespace: s.Hostile.Namespace, Name: mesh.Roommate})
	return resp.GetTicket(), err
}

func forgedTicket(_ context.Context, s *mesh.Scene) (string, error) {
	own, err := attack.SelfSigned("allocator")
	if err != nil {
		return "", err
	}
	return auth.Ticket{
		User: "admin", Method: agentv1.AgentService_StreamLogs_FullMethodName, AgentUID: s.Target.AgentUID, SandboxUID: s.Target.UID,
		Attempt: s.Target.Attempt, Expires: time.Now().Add(auth.TicketLife),
	}.Sign(own.PrivateKey, own.Certificate)
}

// contains returns evidence if a list has a sandbox of the target's namespace.
func contains(s *mesh.Scene, list []*sandboxv1.Sandbox) (string, error) {
	for _, box := range list {
		if box.GetNamespace() != s.Hostile.Namespace {
			raw, _ := json.Marshal(box.GetName())
			return fmt.Sprintf("the answer has sandbox %s of %s", raw, box.GetNamespace()), nil
		}
	}
	return "", errors.New("the answer has none of another tenant")
}
