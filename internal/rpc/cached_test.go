package rpc_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"io"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// reviewer is an API server that accepts every token, and allows everything. It counts what it was asked.
type reviewer struct{ asked atomic.Int64 }

type reviewerOfTokens struct{ *reviewer }

func (r reviewerOfTokens) Create(_ context.Context, review *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	r.asked.Add(1)
	review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: []string{auth.Audience}, User: authenticationv1.UserInfo{
		Username: "system:serviceaccount:team:builder", UID: "8a3c6e1c-6f0d-4c2f-9b58-2f4f3b0f6e11",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:team", "system:authenticated"},
		Extra: map[string]authenticationv1.ExtraValue{"authentication.kubernetes.io/credential-id": {"JTI=5b1f6b9c-4f3b-4c6e-8d6e-1f2a3b4c5d6e"},
			"authentication.kubernetes.io/pod-name": {"builder-7d9c5b6f4-x2x7v"}, "authentication.kubernetes.io/pod-uid": {"c0ffee00-0000-4000-8000-000000000000"}},
	}}
	return review, nil
}

type reviewerOfAccess struct{ *reviewer }

func (r reviewerOfAccess) Create(_ context.Context, review *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error) {
	r.asked.Add(1)
	review.Status = authorizationv1.SubjectAccessReviewStatus{Allowed: true, Reason: `RBAC: allowed by RoleBinding "builder/team" of ClusterRole "fast-sandbox-edit"`}
	return review, nil
}

// BenchmarkCachedCall is a create through all interceptors of a server, without its transport and its handler, with all that the API
// server is asked remembered: what authentication, authorization, limits and the audit log cost the fast path. The budget is that of a
// user with a token (tests/bench, suite registry). A component, which is known by its certificate, is for comparison.
func BenchmarkCachedCall(b *testing.B) {
	cert := func(name string, uris ...*url.URL) *tls.ConnectionState {
		c := &x509.Certificate{Subject: pkix.Name{CommonName: name, Organization: []string{"devs"}}, URIs: uris}
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{c}, VerifiedChains: [][]*x509.Certificate{{c}}}
	}
	role := func(r rpc.Role) *url.URL { return &url.URL{Scheme: "spiffe", Host: rpc.Domain, Path: "/" + string(r)} }
	token := strings.Repeat("h", 60) + "." + base64.RawURLEncoding.EncodeToString([]byte(`{"exp":4102444800,"pad":"`+strings.Repeat("x", 600)+`"}`)) + "." + strings.Repeat("s", 342)
	forwarded := rpc.ForCaller(auth.WithCaller(b.Context(), auth.Caller{User: "alice", Groups: []string{"devs", "system:authenticated"}, Method: auth.Token}))
	onBehalf, _ := metadata.FromOutgoingContext(forwarded)
	for _, call := range []struct {
		caller string
		state  *tls.ConnectionState
		header metadata.MD
	}{
		{"component", cert("controller", role(rpc.RoleController)), nil},
		{"certificate", cert("alice"), nil},
		{"token", &tls.ConnectionState{}, metadata.Pairs("authorization", "Bearer "+token)},
		{"gateway", cert("gateway", role(rpc.RoleGateway)), onBehalf},
	} {
		b.Run("caller="+call.caller, func(b *testing.B) {
			handle, api := cachedChain(b)
			ctx := metadata.NewIncomingContext(peer.NewContext(b.Context(), &peer.Peer{
				Addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 40000}, AuthInfo: credentials.TLSInfo{State: *call.state},
			}), call.header)
			req := &sandboxv1.CreateSandboxRequest{Namespace: "team", Name: "web", RequestId: "5b1f6b9c-4f3b-4c6e-8d6e-1f2a3b4c5d6e",
				Spec: &sandboxv1.SandboxSpec{Image: "docker.io/fast-sandbox/busybox:demo", Pool: "default", Command: []string{"httpd", "-f"}, Ports: []int32{8080}}}
			_, err := handle(ctx, req) // the first call asks the API server
			require.NoError(b, err)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := handle(ctx, req); err != nil {
					b.Fatal(err)
				}
			}
			require.LessOrEqual(b, api.asked.Load(), int64(2+int(b.Elapsed().Seconds()/5)), "the API server is asked only when its answers have become old")
		})
	}
}

// cachedChain returns a create through the interceptors of a server with real authentication and authorization, and their API server.
func cachedChain(b *testing.B) (grpc.UnaryHandler, *reviewer) {
	api := &reviewer{}
	bounds, err := limit.New(limit.Options{Rate: 1e9, Burst: 1e9, Creates: 1000, Streams: 1000}, clock.RealClock{}, nil)
	require.NoError(b, err)
	chain, err := rpc.UnaryInterceptors(logr.NewContext(b.Context(), logr.FromSlogHandler(slog.NewJSONHandler(io.Discard, nil))), rpc.ServerConfig{
		Allow: map[string][]rpc.Role{"fastsandbox.sandbox.v1.SandboxService": {rpc.RoleController}},
		Users: &rpc.Users{
			Tokens: auth.NewTokens(reviewerOfTokens{api}, auth.DefaultTiming(), clock.RealClock{}),
			Access: auth.NewAuthorizer(reviewerOfAccess{api}, auth.DefaultTiming(), clock.RealClock{}), Limits: bounds, Proxies: []rpc.Role{rpc.RoleGateway},
			Rules: map[string]rpc.Rule{service + "CreateSandbox": {
				Access: auth.Access{Verb: "create", Group: "fast-sandbox.io", Resource: "sandboxes"}, Namespace: "namespace", Creates: true,
			}},
		},
	})
	require.NoError(b, err)
	handle := grpc.UnaryHandler(func(context.Context, any) (any, error) { return &sandboxv1.CreateSandboxResponse{}, nil })
	info := &grpc.UnaryServerInfo{FullMethod: service + "CreateSandbox"}
	for i := len(chain) - 1; i >= 0; i-- {
		next := handle
		handle = func(ctx context.Context, req any) (any, error) { return chain[i](ctx, req, info, next) }
	}
	return handle, api
}
