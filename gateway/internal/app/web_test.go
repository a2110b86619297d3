package app_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// apiServer knows the tokens token-NAME of the users NAME, and lets all but carol do everything.
func apiServer(t *testing.T) (url string, asked func() []authorizationv1.SubjectAccessReviewSpec) {
	t.Helper()
	var mu sync.Mutex
	var reviews []authorizationv1.SubjectAccessReviewSpec
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		raw, _ := io.ReadAll(r.Body)
		object, _, _ := scheme.Codecs.UniversalDeserializer().Decode(raw, nil, nil) // JSON or protobuf
		switch review := object.(type) {
		case *authenticationv1.TokenReview:
			if name, ok := strings.CutPrefix(review.Spec.Token, "token-"); ok {
				review.Status = authenticationv1.TokenReviewStatus{
					Authenticated: true, Audiences: review.Spec.Audiences, User: authenticationv1.UserInfo{Username: name},
				}
			}
		case *authorizationv1.SubjectAccessReview:
			mu.Lock()
			reviews = append(reviews, review.Spec)
			mu.Unlock()
			review.Status.Allowed = review.Spec.User != "carol"
		default:
			w.WriteHeader(http.StatusNotFound)
		}
		_ = json.NewEncoder(w).Encode(object)
	}))
	t.Cleanup(server.Close)
	return server.URL, func() []authorizationv1.SubjectAccessReviewSpec {
		mu.Lock()
		defer mu.Unlock()
		return reviews
	}
}

// agentProcesses is the ProcessService of an agent: a process writes its arguments.
type agentProcesses struct {
	processv1.UnimplementedProcessServiceServer
	targets chan rpc.Target
	ended   chan struct{}
}

func (a *agentProcesses) RunProcess(_ context.Context, in *processv1.RunProcessRequest) (*processv1.RunProcessResponse, error) {
	if in.GetProcess().GetArgs()[0] == "missing" {
		return nil, fault.New(errdefs.ErrNotFound, fault.CommandNotFound, "missing: not found")
	}
	return &processv1.RunProcessResponse{Stdout: []byte(strings.Join(in.GetProcess().GetArgs(), " "))}, nil
}

func (a *agentProcesses) StartProcess(in *processv1.StartProcessRequest, stream grpc.ServerStreamingServer[processv1.StartProcessResponse]) error {
	target, err := rpc.TargetOf(stream.Context())
	if err != nil {
		return err
	}
	a.targets <- target
	for _, arg := range in.GetProcess().GetArgs() {
		if arg == "wait" {
			<-stream.Context().Done()
			close(a.ended)
			return stream.Context().Err()
		}
		event := &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{Output: &processv1.ProcessOutput{Data: []byte(arg)}}}
		if err := stream.Send(&processv1.StartProcessResponse{Event: event}); err != nil {
			return err
		}
	}
	return nil
}

// startWithAgent starts a gateway, an API server and an agent that runs all sandboxes in the namespace ns1.
func startWithAgent(t *testing.T, f *fake, change ...func(*app.Config)) (*gateway, *agentProcesses, func() []authorizationv1.SubjectAccessReviewSpec) {
	t.Helper()
	api, asked := apiServer(t)
	var agentAddress string
	f.locate = func(in *allocatorv1.LocateSandboxRequest) (*allocatorv1.LocateSandboxResponse, error) {
		if in.GetNamespace() != "ns1" {
			return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s/%s", in.GetNamespace(), in.GetName())
		}
		return &allocatorv1.LocateSandboxResponse{Assignment: &allocatorv1.Assignment{
			Fence: &agentv1.Fence{SandboxUid: "u-" + in.GetName(), Attempt: 2, AgentUid: "agent-1"}, AgentAddress: agentAddress,
		}}, nil
	}
	g := start(t, f, append([]func(*app.Config){func(c *app.Config) { c.Kubeconfig = kubeconfigOf(t, api) }}, change...)...)
	a := &agentProcesses{targets: make(chan rpc.Target, 8), ended: make(chan struct{})}
	agentAddress = serveAgent(t, g.authority, a)
	return g, a, asked
}

func serveAgent(t *testing.T, authority *pki.Authority, a *agentProcesses) string {
	t.Helper()
	ctx := logr.NewContext(context.WithoutCancel(t.Context()), logr.Discard())
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Listener: listen(t), TLS: authority.Agent(t, rpc.AgentID{Namespace: "ns1", Pod: "agent", UID: "agent-1"}), DrainTimeout: 10 * time.Millisecond,
		Allow: map[string][]rpc.Role{"fastsandbox.process.v1.ProcessService": {rpc.RoleGateway}},
	})
	require.NoError(t, err)
	processv1.RegisterProcessServiceServer(server, a)
	stop := background(ctx, server.Run)
	t.Cleanup(func() { require.NoError(t, stop()) })
	return server.Addr().String()
}

// connectError is an error of the Connect protocol.
type connectError struct {
	Code, Message string
	Details       []struct{ Type string }
}

func (a answer) connectError(t *testing.T) connectError {
	t.Helper()
	var e connectError
	require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
	return e
}

const processService = "/fastsandbox.process.v1.ProcessService/"

// TestConnect makes Connect calls as curl does, by users with certificates and with tokens.
func TestConnect(t *testing.T) {
	var callers []auth.Caller
	g, _, asked := startWithAgent(t, &fake{get: func(ctx context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		c, _ := auth.CallerOf(ctx)
		callers = append(callers, c)
		return &sandboxv1.GetSandboxResponse{Sandbox: &sandboxv1.Sandbox{Name: in.GetName()}}, nil
	}})
	anonymous := *g
	anonymous.client = g.as(t, rpc.TLS{CAFile: g.authority.User(t, "x").CAFile})
	headers := func(token string) []string {
		return []string{"Content-Type", "application/json", "Authorization", "Bearer " + token}
	}
	const get = "/fastsandbox.sandbox.v1.SandboxService/GetSandbox"

	requireJSON(t, `{"sandbox":{"name":"a"}}`, g.do(t, "POST", get, `{"namespace":"ns1","name":"a"}`, "Content-Type", "application/json"))
	requireJSON(t, `{"sandbox":{"name":"a"}}`, anonymous.do(t, "POST", get, `{"namespace":"ns1","name":"a"}`, headers("token-bob")...))
	require.Len(t, callers, 2)
	require.Equal(t, []string{"alice", "bob"}, []string{callers[0].User, callers[1].User})
	for _, c := range callers {
		host, _, err := net.SplitHostPort(c.Address)
		require.NoError(t, err, "the address of the client arrives")
		require.Equal(t, "127.0.0.1", host)
	}

	const run = processService + "RunProcess"
	a := anonymous.do(t, "POST", run, `{"namespace":"ns1","name":"a","process":{"args":["echo","hi"]}}`, headers("token-bob")...)
	requireJSON(t, `{"stdout":"ZWNobyBoaQ=="}`, a)
	last := asked()[len(asked())-1]
	require.Equal(t, "bob", last.User)
	require.Equal(t, "exec", last.ResourceAttributes.Subresource)
	require.Equal(t, "ns1", last.ResourceAttributes.Namespace)

	for name, tc := range map[string]struct {
		path, body, token string
		code              int
		want              string
	}{
		"wrong token":       {run, `{}`, "bad", 401, "unauthenticated"},
		"not permitted":     {run, `{"namespace":"ns1","name":"a","process":{"args":["echo"]}}`, "token-carol", 403, "permission_denied"},
		"invalid":           {run, `{"namespace":"ns1","name":"a","process":{}}`, "token-bob", 400, "invalid_argument"},
		"unknown field":     {run, `{"namespace":"ns1","nam":"a"}`, "token-bob", 400, "invalid_argument"},
		"no JSON":           {run, `nonsense`, "token-bob", 400, "invalid_argument"},
		"no such sandbox":   {run, `{"namespace":"ns2","name":"a","process":{"args":["echo"]}}`, "token-bob", 404, "not_found"},
		"error of an agent": {run, `{"namespace":"ns1","name":"a","process":{"args":["missing"]}}`, "token-bob", 404, "not_found"},
		"for components":    {"/fastsandbox.allocator.v1.AllocatorService/Release", `{"fence":{"sandboxUid":"u","attempt":"1","agentUid":"a"}}`, "token-bob", 403, "permission_denied"},
	} {
		t.Run(name, func(t *testing.T) {
			a := anonymous.do(t, "POST", tc.path, tc.body, headers(tc.token)...)
			require.Equal(t, tc.code, a.code, a.body)
			require.Equal(t, tc.want, a.connectError(t).Code, a.body)
			require.NotEmpty(t, a.connectError(t).Details, a.body)
			require.Equal(t, "google.rpc.ErrorInfo", a.connectError(t).Details[0].Type)
		})
	}
	a = anonymous.do(t, "POST", run, `{}`, "Content-Type", "application/json")
	require.Equal(t, http.StatusUnauthorized, a.code)
	require.Equal(t, "UNAUTHENTICATED", a.failure(t).Details[0].Reason)
	require.NotEmpty(t, a.header.Get("WWW-Authenticate"))
	for _, path := range []string{processService + "Nothing", processService, "/fastsandbox.agent.v1.AgentService/CreateSandbox"} {
		require.Equal(t, http.StatusNotFound, g.do(t, "POST", path, `{}`, "Content-Type", "application/json").code, path)
	}
}

// TestBrowserProtocols follows a process by each protocol, over HTTP/1.1 and HTTP/2.
func TestBrowserProtocols(t *testing.T) {
	g, agent, _ := startWithAgent(t, &fake{})
	old := g.as(t, g.authority.User(t, "alice"))
	transport, ok := old.Transport.(*http.Transport)
	require.True(t, ok)
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(true)
	for name, options := range map[string][]connect.ClientOption{
		"connect": nil, "connect with JSON": {connect.WithProtoJSON()}, "grpc-web": {connect.WithGRPCWeb()}, "grpc-web with JSON": {connect.WithGRPCWeb(), connect.WithProtoJSON()},
		"connect with gzip": {connect.WithSendGzip()},
	} {
		for version, client := range map[string]*http.Client{"HTTP/1.1": old, "HTTP/2": g.client} {
			t.Run(name+" over "+version, func(t *testing.T) {
				c := connect.NewClient[processv1.StartProcessRequest, processv1.StartProcessResponse](client, g.url+processService+"StartProcess", options...)
				request := &processv1.StartProcessRequest{Namespace: "ns1", Name: "a", Process: &processv1.ProcessSpec{Args: []string{"one", "two"}}}
				stream, err := c.CallServerStream(t.Context(), connect.NewRequest(request))
				require.NoError(t, err)
				var got []string
				for stream.Receive() {
					got = append(got, string(stream.Msg().GetEvent().GetOutput().GetData()))
				}
				require.NoError(t, stream.Err())
				require.NoError(t, stream.Close())
				require.Equal(t, []string{"one", "two"}, got)
				require.Equal(t, rpc.Target{SandboxUID: "u-a", Attempt: 2, AgentUID: "agent-1"}, <-agent.targets)

				run := connect.NewClient[processv1.RunProcessRequest, processv1.RunProcessResponse](client, g.url+processService+"RunProcess", options...)
				_, err = run.CallUnary(t.Context(), connect.NewRequest(&processv1.RunProcessRequest{
					Namespace: "ns1", Name: "a", Process: &processv1.ProcessSpec{Args: []string{"missing"}},
				}))
				var failed *connect.Error
				require.ErrorAs(t, err, &failed)
				require.Equal(t, connect.CodeNotFound, failed.Code())
				require.Len(t, failed.Details(), 1)
			})
		}
	}
	t.Run("a caller that leaves", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		c := connect.NewClient[processv1.StartProcessRequest, processv1.StartProcessResponse](g.client, g.url+processService+"StartProcess", connect.WithGRPCWeb())
		stream, err := c.CallServerStream(ctx, connect.NewRequest(&processv1.StartProcessRequest{
			Namespace: "ns1", Name: "a", Process: &processv1.ProcessSpec{Args: []string{"one", "wait"}},
		}))
		require.NoError(t, err)
		require.True(t, stream.Receive(), stream.Err())
		cancel()
		<-agent.ended
		require.False(t, stream.Receive())
		require.True(t, errors.Is(stream.Err(), context.Canceled) || connect.CodeOf(stream.Err()) == connect.CodeCanceled)
		_ = stream.Close()
	})
}

func TestAllowedOrigins(t *testing.T) {
	const console = "https://console.example.com"
	get := &fake{get: func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		return &sandboxv1.GetSandboxResponse{}, nil
	}}
	const path = "/fastsandbox.sandbox.v1.SandboxService/GetSandbox"
	closed := start(t, get)
	open := start(t, get, func(c *app.Config) { c.AllowedOrigins = []string{console} })
	for name, tc := range map[string]struct {
		g       *gateway
		origin  string
		code    int
		allowed string
	}{
		"allowed":        {open, console, 200, console},
		"another site":   {open, "https://evil.example.com", 403, ""},
		"off by default": {closed, console, 403, ""},
	} {
		t.Run(name, func(t *testing.T) {
			preflight := tc.g.do(t, "OPTIONS", path, "", "Origin", tc.origin, "Access-Control-Request-Method", "POST",
				"Access-Control-Request-Headers", "authorization,connect-protocol-version,content-type")
			require.Equal(t, tc.allowed, preflight.header.Get("Access-Control-Allow-Origin"))
			require.Empty(t, preflight.header.Get("Access-Control-Allow-Credentials"))
			a := tc.g.do(t, "POST", path, `{"namespace":"ns1","name":"a"}`, "Content-Type", "application/json", "Origin", tc.origin, "Sec-Fetch-Site", "cross-site")
			require.Equal(t, tc.code, a.code, a.body)
			require.Equal(t, tc.allowed, a.header.Get("Access-Control-Allow-Origin"))
		})
	}
}

func TestAllowedOriginsAreChecked(t *testing.T) {
	for _, origin := range []string{"", "*", "https://*.example.com", "console.example.com", "https://a.example.com/", "https://a.example.com/x", "ftp://a", "null"} {
		c := app.Config{AllowedOrigins: []string{origin}}
		require.ErrorContains(t, c.Validate(), "--allowed-origins", origin)
	}
	c := app.Config{AllowedOrigins: []string{"https://a.example.com:8443", "http://localhost:3000"}}
	require.NotContains(t, c.Validate().Error(), "--allowed-origins")
}

// TestLimitsOfConnect uses up what a user may ask for. Calls without valid credentials count against their connection.
func TestLimitsOfConnect(t *testing.T) {
	g, _, _ := startWithAgent(t, &fake{}, func(c *app.Config) { c.Limits.Rate, c.Limits.Burst = 0.001, 2 })
	const body = `{"namespace":"ns1","name":"a","process":{"args":["echo"]}}`
	for _, code := range []int{200, 200, 429} {
		a := g.do(t, "POST", processService+"RunProcess", body, "Content-Type", "application/json")
		require.Equal(t, code, a.code, a.body)
		if code == http.StatusTooManyRequests {
			require.Equal(t, "resource_exhausted", a.connectError(t).Code)
		}
	}
	stranger := g.as(t, rpc.TLS{CAFile: g.authority.User(t, "x").CAFile})
	closed := false
	for range 40 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+processService+"RunProcess", strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer bad")
		resp, err := stranger.Do(req)
		if closed = err != nil; closed {
			break
		}
		require.Equal(t, http.StatusUnauthorized, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
	}
	require.True(t, closed, "the connection of a stranger stays open")
}
