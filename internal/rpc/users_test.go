package rpc_test

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// rights accepts tokens that are names of users, and allows what is listed. It notes what was asked.
type rights struct {
	allowed map[string]bool // "user: access"

	mu    sync.Mutex
	asked []string
}

func (r *rights) Authenticate(_ context.Context, token string) (auth.Caller, error) {
	if token != "alice" && token != "bob" {
		return auth.Caller{}, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "unknown token")
	}
	return auth.Caller{User: token, Method: auth.Token}, nil
}

func (r *rights) Decide(_ context.Context, c auth.Caller, what auth.Access) (auth.Decision, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, c.User+": "+what.String())
	if what.Namespace == "away" {
		return auth.Decision{}, fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the API server does not answer")
	}
	if r.allowed[c.User+": "+what.String()] {
		return auth.Decision{Allowed: true, Reason: "RBAC: allowed"}, nil
	}
	return auth.Decision{}, nil
}

// whoami answers with the user on whose behalf a call is made.
type whoami struct {
	sandboxv1.UnimplementedSandboxServiceServer
}

func (whoami) GetSandbox(ctx context.Context, _ *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	c, _ := auth.CallerOf(ctx)
	return &sandboxv1.GetSandboxResponse{Sandbox: &sandboxv1.Sandbox{Name: c.User}}, nil
}

func (whoami) UpdateSandbox(context.Context, *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
	return &sandboxv1.UpdateSandboxResponse{}, nil
}

func (whoami) WatchSandboxes(_ *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
	c, _ := auth.CallerOf(s.Context())
	return s.Send(&sandboxv1.WatchSandboxesResponse{Sandbox: &sandboxv1.Sandbox{Name: c.User}})
}

// TestUsers checks who may call what, by token, by certificate and through a proxy.
func TestUsers(t *testing.T) {
	const service = "/fastsandbox.sandbox.v1.SandboxService/"
	ca := pki.New(t)
	r := &rights{allowed: map[string]bool{
		"alice: get sandboxes in namespace a": true, "alice: update sandboxes in namespace a": true, "alice: watch sandboxes in all namespaces": true,
	}}
	rule := func(verb, namespace string) rpc.Rule {
		return rpc.Rule{Access: auth.Access{Verb: verb, Resource: "sandboxes"}, Namespace: namespace}
	}
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: ca.TLS(t, rpc.RoleAllocator), DrainTimeout: time.Second,
		Allow: map[string][]rpc.Role{"fastsandbox.sandbox.v1.SandboxService": {rpc.RoleController, rpc.RoleGateway}},
		Users: &rpc.Users{Tokens: r, Access: r, Proxies: []rpc.Role{rpc.RoleGateway}, Rules: map[string]rpc.Rule{
			service + "GetSandbox": rule("get", "namespace"), service + "UpdateSandbox": rule("update", "sandbox.namespace"),
			service + "WatchSandboxes": rule("watch", "namespace"),
		}},
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, whoami{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })

	token := func(user string) func() (string, error) { return func() (string, error) { return user, nil } }
	noCert := rpc.TLS{CAFile: ca.TLS(t, rpc.RoleAllocator).CAFile}
	clients := map[string]rpc.ClientConfig{
		"anonymous":  {TLS: noCert},
		"alice":      {TLS: noCert, Token: token("alice")},
		"bob":        {TLS: noCert, Token: token("bob")},
		"stranger":   {TLS: noCert, Token: token("mallory")},
		"alice-cert": {TLS: ca.User(t, "alice", "devs")},
		"both":       {TLS: ca.User(t, "alice", "devs"), Token: token("bob")},
		"controller": {TLS: ca.TLS(t, rpc.RoleController)},
		"gateway":    {TLS: ca.TLS(t, rpc.RoleGateway)},
		"agent":      {TLS: ca.TLS(t, rpc.RoleAgent)},
	}
	behalf := func(ctx context.Context, user string) context.Context {
		return rpc.ForCaller(auth.WithCaller(ctx, auth.Caller{User: user, Groups: []string{"devs"}, Extra: map[string][]string{"a.io/Key": {"v"}}}))
	}
	tests := []struct {
		client, behalf, namespace string
		reason                    fault.Reason // empty: allowed
		user                      string
	}{
		{"anonymous", "", "a", fault.Unauthenticated, ""},
		{"stranger", "", "a", fault.Unauthenticated, ""},
		{"alice", "", "a", "", "alice"},
		{"alice", "", "b", fault.PermissionDenied, ""},
		{"bob", "", "a", fault.PermissionDenied, ""},
		{"alice-cert", "", "a", "", "alice"},
		{"alice-cert", "", "b", fault.PermissionDenied, ""},
		{"both", "", "a", fault.PermissionDenied, ""}, // the token is the more particular proof
		{"controller", "", "b", "", ""},
		{"agent", "", "a", fault.PermissionDenied, ""},
		{"gateway", "alice", "a", "", "alice"},
		{"gateway", "alice", "b", fault.PermissionDenied, ""},
		{"gateway", "", "b", "", ""},
		{"bob", "alice", "a", fault.PermissionDenied, ""}, // only a proxy names others
		{"anonymous", "alice", "a", fault.Unauthenticated, ""},
		{"controller", "alice", "b", "", ""},
	}
	for _, test := range tests {
		t.Run(test.client+" for "+test.behalf+" in "+test.namespace, func(t *testing.T) {
			cfg := clients[test.client]
			cfg.ServerName = rpc.RoleAllocator.ServerName()
			ctx := t.Context()
			if test.behalf != "" {
				ctx = behalf(ctx, test.behalf)
			}
			answer, err := dial(t, server, cfg).GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: test.namespace, Name: "n"})
			require.Equal(t, test.reason, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
			require.Equal(t, test.user, answer.GetSandbox().GetName())
		})
	}

	alice := clients["alice"]
	alice.ServerName = rpc.RoleAllocator.ServerName()
	client := dial(t, server, alice)
	t.Run("the namespace may be in another message", func(t *testing.T) {
		for namespace, reason := range map[string]fault.Reason{"a": "", "b": fault.PermissionDenied} {
			_, err := client.UpdateSandbox(t.Context(), &sandboxv1.UpdateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Namespace: namespace, Name: "n"}})
			require.Equal(t, reason, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
		}
	})
	t.Run("streams", func(t *testing.T) {
		for namespace, reason := range map[string]fault.Reason{"": "", "a": fault.PermissionDenied} {
			stream, err := client.WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{Namespace: namespace})
			require.NoError(t, err)
			first, err := stream.Recv()
			require.Equal(t, reason, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
			require.Equal(t, reason == "", first.GetSandbox().GetName() == "alice")
		}
	})
	t.Run("a method without a rule is closed", func(t *testing.T) {
		_, err := client.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: "a", Name: "n"})
		require.Equal(t, fault.PermissionDenied, fault.ReasonOf(rpc.FromStatus(err)))
		require.ErrorContains(t, err, "only components call")
	})
	t.Run("health and reflection are for those who prove who they are", func(t *testing.T) {
		for name, reason := range map[string]fault.Reason{"anonymous": fault.Unauthenticated, "stranger": fault.Unauthenticated, "bob": "", "alice-cert": "", "agent": ""} {
			cfg := clients[name]
			cfg.ServerName = rpc.RoleAllocator.ServerName()
			conn, err := rpc.Dial(server.Addr().String(), cfg)
			require.NoError(t, err)
			_, err = healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
			require.Equal(t, reason, fault.ReasonOf(rpc.FromStatus(err)), "%s: %v", name, err)
			stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
			require.NoError(t, err)
			if err := stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
				require.ErrorIs(t, err, io.EOF, "it was refused already")
			}
			_, err = stream.Recv()
			require.Equal(t, reason, fault.ReasonOf(rpc.FromStatus(err)), "%s: %v", name, err)
			require.NoError(t, conn.Close())
		}
	})
	t.Run("the message of a stranger is not read", func(t *testing.T) {
		for name, code := range map[string]codes.Code{"anonymous": codes.Unauthenticated, "bob": codes.Internal} {
			cfg := clients[name]
			cfg.ServerName = rpc.RoleAllocator.ServerName()
			conn, err := rpc.Dial(server.Addr().String(), cfg)
			require.NoError(t, err)
			var out []byte
			err = conn.Invoke(t.Context(), sandboxv1.SandboxService_GetSandbox_FullMethodName, []byte{0xff}, &out, grpc.ForceCodecV2(rawCodec{}))
			require.Equal(t, code, status.Code(err), "%s: %v", name, err)
			require.NoError(t, conn.Close())
		}
	})
	t.Run("a connection of strangers is closed", func(t *testing.T) {
		for name, strange := range map[string]bool{"anonymous": true, "stranger": true, "bob": false} {
			relay := newRelay(t, server.Addr().String())
			cfg := clients[name]
			cfg.ServerName = rpc.RoleAllocator.ServerName()
			conn, err := rpc.Dial("passthrough:///"+relay.listener.Addr().String(), cfg)
			require.NoError(t, err)
			client := healthv1.NewHealthClient(conn)
			for range 100 {
				_, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true))
				require.Equal(t, strange, err != nil)
			}
			opened, _ := relay.counts()
			require.Equal(t, strange, opened > 2, "%s: %d connections", name, opened)
			require.NoError(t, conn.Close())
		}
	})
	t.Run("malformed proofs", func(t *testing.T) {
		anyone := dial(t, server, rpc.ClientConfig{TLS: noCert, ServerName: rpc.RoleAllocator.ServerName()})
		for _, pairs := range [][]string{
			{"authorization", "Basic YTpi"}, {"authorization", "Bearer"}, {"authorization", "Bearer alice", "authorization", "Bearer bob"}, {"authorization", ""},
		} {
			_, err := anyone.GetSandbox(metadata.AppendToOutgoingContext(t.Context(), pairs...), &sandboxv1.GetSandboxRequest{Namespace: "a", Name: "n"})
			require.Equal(t, fault.Unauthenticated, fault.ReasonOf(rpc.FromStatus(err)), "%v", pairs)
		}
		gateway := clients["gateway"]
		gateway.ServerName = rpc.RoleAllocator.ServerName()
		for _, value := range []string{"", "{}", "no JSON", `{"User":""}`} {
			_, err := dial(t, server, gateway).GetSandbox(metadata.AppendToOutgoingContext(t.Context(), "fast-sandbox-caller-bin", value),
				&sandboxv1.GetSandboxRequest{Namespace: "a", Name: "n"})
			require.Equal(t, fault.Unauthenticated, fault.ReasonOf(rpc.FromStatus(err)), "%q", value)
		}
	})
}

// rawCodec sends bytes as they are.
type rawCodec struct{}

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func (rawCodec) Name() string { return "proto" }
