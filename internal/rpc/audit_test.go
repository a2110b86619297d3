package rpc_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

const service = "/fastsandbox.sandbox.v1.SandboxService/"

// slow is a service whose creates and watches last until they are released.
type slow struct {
	whoami
	release chan struct{}
}

func (s slow) CreateSandbox(ctx context.Context, _ *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	select {
	case <-s.release:
	case <-ctx.Done():
	}
	return &sandboxv1.CreateSandboxResponse{}, nil
}

func (s slow) WatchSandboxes(_ *sandboxv1.WatchSandboxesRequest, stream sandboxv1.SandboxService_WatchSandboxesServer) error {
	if err := stream.Send(&sandboxv1.WatchSandboxesResponse{}); err != nil {
		return err
	}
	select {
	case <-s.release:
	case <-stream.Context().Done():
	}
	return nil
}

// audited is a server that users may call, and its log.
type audited struct {
	ca      *pki.Authority
	server  *rpc.Server
	logs    *logBuffer
	release func()
}

func serveUsers(t *testing.T, r *rights, limits limit.Options) *audited {
	t.Helper()
	a := &audited{ca: pki.New(t), logs: &logBuffer{}}
	otel.SetTracerProvider(sdktrace.NewTracerProvider())
	ctx := logr.NewContext(t.Context(), logr.FromSlogHandler(slog.NewJSONHandler(a.logs, &slog.HandlerOptions{Level: slog.Level(-4)})))
	registry := obs.NewRegistry()
	bounds, err := limit.New(limits, clock.RealClock{}, registry)
	require.NoError(t, err)
	rule := func(verb, namespace string) rpc.Rule {
		return rpc.Rule{Access: auth.Access{Verb: verb, Resource: "sandboxes"}, Namespace: namespace, Creates: verb == "create"}
	}
	a.server, err = rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: a.ca.TLS(t, rpc.RoleAllocator), DrainTimeout: time.Second, Registry: registry,
		Allow: map[string][]rpc.Role{"fastsandbox.sandbox.v1.SandboxService": {rpc.RoleController}},
		Users: &rpc.Users{Tokens: r, Access: r, Limits: bounds, Proxies: []rpc.Role{rpc.RoleGateway, rpc.RoleAllocator}, Rules: map[string]rpc.Rule{
			service + "GetSandbox": rule("get", "namespace"), service + "UpdateSandbox": starts(rule("update", "sandbox.namespace")),
			service + "CreateSandbox": rule("create", "namespace"), service + "WatchSandboxes": rule("watch", "namespace"),
		}},
	})
	require.NoError(t, err)
	release := make(chan struct{})
	a.release = sync.OnceFunc(func() { close(release) })
	sandboxv1.RegisterSandboxServiceServer(a.server, slow{release: release})
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- a.server.Run(ctx) }()
	t.Cleanup(func() {
		a.release()
		cancel()
		require.NoError(t, <-done)
	})
	return a
}

// starts has a rule name the command that a call runs.
func starts(r rpc.Rule) rpc.Rule {
	r.Command = "sandbox.spec.command"
	return r
}

// as returns a client with a token, or the certificate of a role.
func (a *audited) as(t *testing.T, token string, role rpc.Role) sandboxv1.SandboxServiceClient {
	t.Helper()
	cfg := rpc.ClientConfig{TLS: rpc.TLS{CAFile: a.ca.TLS(t, rpc.RoleAllocator).CAFile}, ServerName: rpc.RoleAllocator.ServerName()}
	if token != "" {
		cfg.Token = func() (string, error) { return token, nil }
	}
	if role != "" {
		cfg.TLS = a.ca.TLS(t, role)
	}
	return dial(t, a.server, cfg)
}

// records returns the records of the audit log.
func (a *audited) records(t *testing.T) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(a.logs.String()) {
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record), line)
		if record["logger"] == "audit" {
			all = append(all, record)
		}
	}
	return all
}

// behalf returns the context of a call that a proxy makes for a user.
func behalf(ctx context.Context, user string) context.Context {
	return rpc.ForCaller(auth.WithCaller(ctx, auth.Caller{User: user, Groups: []string{"devs"}, Method: auth.APIKey, Address: "192.0.2.7:7"}))
}

func TestAuditLog(t *testing.T) {
	r := &rights{allowed: map[string]bool{"alice: get sandboxes in namespace a": true, "alice: update sandboxes in namespace a": true}}
	get := func(namespace string) func(context.Context, sandboxv1.SandboxServiceClient) error {
		return func(ctx context.Context, c sandboxv1.SandboxServiceClient) error {
			_, err := c.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: namespace, Name: "n"})
			return err
		}
	}
	type fields = map[string]any
	tests := map[string]struct {
		token  string
		role   rpc.Role
		behalf string
		call   func(context.Context, sandboxv1.SandboxServiceClient) error
		want   fields // nil: no record
	}{
		"allowed": {"alice", "", "", get("a"), fields{
			obs.KeyUser: "alice", obs.KeyAuthentication: "token", obs.KeyVerb: "get", obs.KeyResource: "sandboxes", obs.KeyNamespace: "a",
			obs.KeyName: "n", obs.KeyDecision: "allow", obs.KeyReason: "RBAC: allowed", obs.KeyMethod: service + "GetSandbox",
		}},
		"denied":    {"bob", "", "", get("a"), fields{obs.KeyUser: "bob", obs.KeyNamespace: "a", obs.KeyName: "n", obs.KeyDecision: "deny", obs.KeyReason: "PERMISSION_DENIED"}},
		"undecided": {"alice", "", "", get("away"), fields{obs.KeyUser: "alice", obs.KeyNamespace: "away", obs.KeyDecision: "error", obs.KeyReason: "API_UNAVAILABLE"}},
		"invalid":   {"alice", "", "", get("NO"), fields{obs.KeyUser: "alice", obs.KeyNamespace: "NO", obs.KeyDecision: "error", obs.KeyReason: "INVALID_FIELD"}},
		"a request id, and fields of another message": {"alice", "", "", func(ctx context.Context, c sandboxv1.SandboxServiceClient) error {
			_, err := c.UpdateSandbox(ctx, &sandboxv1.UpdateSandboxRequest{
				Sandbox: &sandboxv1.Sandbox{Namespace: "a", Name: "n"}, RequestId: "r1", UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}},
			})
			return err
		}, fields{obs.KeyNamespace: "a", obs.KeyName: "n", obs.KeyRequestID: "r1", obs.KeyVerb: "update", obs.KeyDecision: "allow"}},
		"a command": {"alice", "", "", func(ctx context.Context, c sandboxv1.SandboxServiceClient) error {
			_, err := c.UpdateSandbox(ctx, &sandboxv1.UpdateSandboxRequest{
				Sandbox:    &sandboxv1.Sandbox{Namespace: "a", Name: "n", Spec: &sandboxv1.SandboxSpec{Command: []string{"/bin/sh", "-c", "secret"}}},
				UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}},
			})
			return err
		}, fields{obs.KeyName: "n", obs.KeyCommand: "/bin/sh", obs.KeyArguments: 3.0, obs.KeyDecision: "allow"}},
		"a stream": {"alice", "", "", func(ctx context.Context, c sandboxv1.SandboxServiceClient) error {
			s, err := c.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: "a"})
			require.NoError(t, err)
			_, err = s.Recv()
			return err
		}, fields{obs.KeyUser: "alice", obs.KeyVerb: "watch", obs.KeyNamespace: "a", obs.KeyDecision: "deny"}},
		"without credentials":    {"", "", "", get("a"), fields{obs.KeyUser: "", obs.KeyVerb: "get", obs.KeyDecision: "deny", obs.KeyReason: "UNAUTHENTICATED"}},
		"with wrong credentials": {"mallory", "", "", get("a"), fields{obs.KeyUser: "", obs.KeyVerb: "get", obs.KeyDecision: "deny", obs.KeyReason: "UNAUTHENTICATED"}},
		"a method of components": {"alice", "", "", func(ctx context.Context, c sandboxv1.SandboxServiceClient) error {
			_, err := c.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: "a", Name: "n"})
			return err
		}, fields{obs.KeyUser: "alice", obs.KeyDecision: "deny", obs.KeyReason: "PERMISSION_DENIED", obs.KeyMethod: service + "DeleteSandbox"}},
		"through the gateway": {"", rpc.RoleGateway, "alice", get("a"), fields{
			obs.KeyUser: "alice", obs.KeyGroups: []any{"devs"}, obs.KeyAuthentication: "api-key", obs.KeyAddress: "192.0.2.7:7", obs.KeyDecision: "allow",
		}},
		"through the gateway, denied":     {"", rpc.RoleGateway, "bob", get("a"), fields{obs.KeyUser: "bob", obs.KeyAddress: "192.0.2.7:7", obs.KeyDecision: "deny"}},
		"forwarded by a replica":          {"", rpc.RoleAllocator, "alice", get("a"), nil},
		"forwarded by a replica, denied":  {"", rpc.RoleAllocator, "bob", get("a"), fields{obs.KeyUser: "bob", obs.KeyAddress: "192.0.2.7:7", obs.KeyDecision: "deny"}},
		"a component":                     {"", rpc.RoleController, "", get("a"), nil},
		"a component that is no proxy":    {"", rpc.RoleController, "alice", get("a"), nil},
		"a user who claims to be a proxy": {"bob", "", "alice", get("a"), fields{obs.KeyUser: "bob", obs.KeyDecision: "deny"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			a := serveUsers(t, r, limit.Options{})
			ctx := t.Context()
			if test.behalf != "" {
				ctx = behalf(ctx, test.behalf)
			}
			_ = test.call(ctx, a.as(t, test.token, test.role))
			got := a.records(t)
			if test.want == nil {
				require.Empty(t, got)
				return
			}
			require.Len(t, got, 1)
			require.Subset(t, got[0], test.want)
			if test.token != "" || test.role != "" { // a call without credentials is refused before its trace begins
				require.Contains(t, got[0], obs.KeyTraceID)
			}
			if test.role == "" {
				require.True(t, strings.HasPrefix(got[0][obs.KeyAddress].(string), "127.0.0.1:"), "%v", got[0][obs.KeyAddress])
			}
		})
	}
}

// TestAuditLogHasNoSecrets: no log holds what a caller passes to a sandbox, with any outcome of the call.
func TestAuditLogHasNoSecrets(t *testing.T) {
	const secret = "s3cr3t"
	request := &sandboxv1.CreateSandboxRequest{
		Namespace: "a", Name: "n", RequestId: "r1", Labels: map[string]string{"label": secret},
		Spec: &sandboxv1.SandboxSpec{
			Image: "registry.example/" + secret, Pool: "p", Command: []string{secret}, Args: []string{"--password=" + secret},
			Env: map[string]string{"TOKEN": secret, secret: "x"}, WorkingDir: "/" + secret,
		},
	}
	for user, allowed := range map[string]bool{"alice": true, "bob": false} {
		for name, change := range map[string]func(){"valid": func() {}, "invalid": func() { request.Name = "NO" }} {
			t.Run(user+" "+name, func(t *testing.T) {
				a := serveUsers(t, &rights{allowed: map[string]bool{"alice: create sandboxes in namespace a": true}}, limit.Options{})
				a.release()
				change()
				_, err := a.as(t, user, "").CreateSandbox(t.Context(), request)
				require.Equal(t, allowed && name == "valid", err == nil, "%v", err)
				request.Name = "n"
				require.Len(t, a.records(t), 1)
				require.NotContains(t, a.logs.String(), secret)
			})
		}
	}
}

// TestLimitsOfCallers: what one user has used up, others still have, through one gateway, too.
func TestLimitsOfCallers(t *testing.T) {
	allowed := map[string]bool{}
	for _, user := range []string{"alice", "bob"} {
		for _, what := range []string{"get sandboxes", "create sandboxes", "watch sandboxes"} {
			allowed[user+": "+what+" in namespace a"] = true
		}
	}
	exceeded := func(t *testing.T, err error, name string) {
		t.Helper()
		f := rpc.FromStatus(err)
		require.Equal(t, fault.CallerLimitExceeded, fault.ReasonOf(f), "%v", err)
		var e *fault.Error
		require.ErrorAs(t, f, &e)
		require.Equal(t, name, e.Metadata()["limit"])
		_, ok := fault.RetryAfter(f)
		require.True(t, ok)
	}
	get := func(ctx context.Context, c sandboxv1.SandboxServiceClient) error {
		_, err := c.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "a", Name: "n"})
		return err
	}
	t.Run("requests", func(t *testing.T) {
		a := serveUsers(t, &rights{allowed: maps.Clone(allowed)}, limit.Options{Rate: 0.001, Burst: 5})
		alice, gateway := a.as(t, "alice", ""), a.as(t, "", rpc.RoleGateway)
		for range 5 {
			require.NoError(t, get(t.Context(), alice))
		}
		exceeded(t, get(t.Context(), alice), "requests")
		exceeded(t, get(behalf(t.Context(), "alice"), gateway), "requests")
		for range 5 {
			require.NoError(t, get(behalf(t.Context(), "bob"), gateway))
		}
		controller := a.as(t, "", rpc.RoleController)
		for range 20 {
			require.NoError(t, get(t.Context(), controller), "components have no limits")
		}
		got := a.records(t)
		require.Len(t, got, 12)
		require.Subset(t, got[5], map[string]any{obs.KeyUser: "alice", obs.KeyDecision: "deny", obs.KeyReason: "CALLER_LIMIT_EXCEEDED", obs.KeyVerb: "get"})
		for range 300 {
			require.Error(t, get(t.Context(), alice))
		}
		require.Less(t, len(a.records(t)), 300, "records of floods are bounded")
	})
	t.Run("creates", func(t *testing.T) {
		a := serveUsers(t, &rights{allowed: maps.Clone(allowed)}, limit.Options{Creates: 2})
		gateway := a.as(t, "", rpc.RoleGateway)
		create := func(user string) error {
			_, err := gateway.CreateSandbox(behalf(t.Context(), user), &sandboxv1.CreateSandboxRequest{Namespace: "a", Name: "n", Spec: &sandboxv1.SandboxSpec{Image: "i", Pool: "p"}})
			return err
		}
		first := make(chan error, 10)
		for range 10 {
			go func() { first <- create("alice") }()
		}
		for range 8 {
			exceeded(t, <-first, "creates")
		}
		second := make(chan error, 1)
		go func() { second <- create("bob") }()
		require.NoError(t, get(behalf(t.Context(), "alice"), gateway), "other calls go on")
		a.release()
		require.NoError(t, <-second)
		require.NoError(t, <-first)
		require.NoError(t, <-first)
		require.NoError(t, create("alice"), "what has ended does not count")
	})
	t.Run("streams", func(t *testing.T) {
		a := serveUsers(t, &rights{allowed: maps.Clone(allowed)}, limit.Options{Streams: 2})
		gateway := a.as(t, "", rpc.RoleGateway)
		watch := func(ctx context.Context, user string) error {
			s, err := gateway.WatchSandboxes(behalf(ctx, user), &sandboxv1.WatchSandboxesRequest{Namespace: "a"})
			require.NoError(t, err)
			_, err = s.Recv()
			return err
		}
		ctx, end := context.WithCancel(t.Context())
		require.NoError(t, watch(ctx, "alice"))
		require.NoError(t, watch(t.Context(), "alice"))
		exceeded(t, watch(t.Context(), "alice"), "streams")
		require.NoError(t, watch(t.Context(), "bob"))
		end()
		require.Eventually(t, func() bool { return watch(t.Context(), "alice") == nil }, testkit.Timeout, testkit.Tick, "a stream that has ended does not count")
	})
}

// TestForgedAddressDoesNotCount: the client address, as the user, counts from a proxy alone.
func TestForgedAddressDoesNotCount(t *testing.T) {
	a := serveUsers(t, &rights{allowed: map[string]bool{"alice: get sandboxes in namespace a": true}}, limit.Options{})
	ctx := metadata.AppendToOutgoingContext(behalf(t.Context(), "bob"), "x-forwarded-for", "192.0.2.8", "forwarded", "for=192.0.2.8")
	_, err := a.as(t, "alice", "").GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "a", Name: "n"})
	require.NoError(t, err)
	got := a.records(t)
	require.Len(t, got, 1)
	require.NotContains(t, got[0][obs.KeyAddress], "192.0.2")
}

// BenchmarkCallOfUser is a call of one user by one connection, with limits and the audit log, as fast as it goes.
func BenchmarkCallOfUser(b *testing.B) {
	ca := pki.New(b)
	ctx := logr.NewContext(b.Context(), logr.FromSlogHandler(slog.NewJSONHandler(io.Discard, nil)))
	for name, options := range map[string]limit.Options{"no limits": {}, "limits": {Rate: 1e9, Burst: 1e9, Creates: 1000, Streams: 1000}} {
		b.Run(name, func(b *testing.B) {
			bounds, err := limit.New(options, clock.RealClock{}, nil)
			require.NoError(b, err)
			server, err := rpc.NewServer(ctx, rpc.ServerConfig{Address: "127.0.0.1:0", TLS: ca.TLS(b, rpc.RoleAllocator), Users: &rpc.Users{
				Tokens: users.Tokens{"t": {User: "alice", Method: auth.Token}}, Access: users.Anything{}, Limits: bounds, Rules: map[string]rpc.Rule{
					service + "GetSandbox": {Access: auth.Access{Verb: "get", Resource: "sandboxes"}, Namespace: "namespace"},
				}}})
			require.NoError(b, err)
			sandboxv1.RegisterSandboxServiceServer(server, whoami{})
			running, stop := context.WithCancel(ctx)
			done := make(chan error, 1)
			go func() { done <- server.Run(running) }()
			conn, err := rpc.Dial("passthrough:///"+server.Addr().String(), rpc.ClientConfig{
				TLS: rpc.TLS{CAFile: ca.TLS(b, rpc.RoleAllocator).CAFile}, ServerName: rpc.RoleAllocator.ServerName(), Token: func() (string, error) { return "t", nil },
			})
			require.NoError(b, err)
			client := sandboxv1.NewSandboxServiceClient(conn)
			b.SetParallelism(32)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "a", Name: "n"}); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
			require.NoError(b, conn.Close())
			stop()
			require.NoError(b, <-done)
		})
	}
}
