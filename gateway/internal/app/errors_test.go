package app_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/app"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const collection = "/v1/namespaces/ns1/sandboxes"

func TestErrorsKeepCodeReasonAndRetryDelay(t *testing.T) {
	cases := map[string]struct {
		err        error
		http       int
		code       codes.Code
		reason     string
		retryAfter string
	}{
		"invalid argument":    {fault.Field("spec.image", "it is empty"), 400, codes.InvalidArgument, "INVALID_FIELD", ""},
		"not found":           {fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "no such pool"), 404, codes.NotFound, "POOL_NOT_FOUND", ""},
		"already exists":      {fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "taken"), 409, codes.AlreadyExists, "SANDBOX_EXISTS", ""},
		"aborted":             {fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "going"), 409, codes.Aborted, "SANDBOX_TERMINATING", ""},
		"failed precondition": {fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "no"), 400, codes.FailedPrecondition, "COMMAND_NOT_FOUND", ""},
		"no capacity":         {fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full").RetryIn(2500 * time.Millisecond), 429, codes.ResourceExhausted, "NO_CAPACITY", "3"},
		"overloaded":          {fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "busy"), 429, codes.ResourceExhausted, "OVERLOADED", "1"},
		"unavailable":         {fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "away").RetryIn(time.Second), 503, codes.Unavailable, "AGENT_UNAVAILABLE", "1"},
		"deadline":            {fault.New(context.DeadlineExceeded, fault.DeadlineExceeded, "late"), 504, codes.DeadlineExceeded, "DEADLINE_EXCEEDED", ""},
		"permission":          {fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "no"), 403, codes.PermissionDenied, "PERMISSION_DENIED", ""},
		"internal":            {errors.New("secret of the server"), 500, codes.Internal, "INTERNAL", ""},
	}
	var current error
	g := start(t, &fake{get: func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		return nil, current
	}})
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			current = c.err
			a := g.do(t, "GET", collection+"/a", "")
			require.Equal(t, c.http, a.code, a.body)
			require.Equal(t, c.retryAfter, a.header.Get("Retry-After"))
			f := a.failure(t)
			require.EqualValues(t, c.code, f.Code)
			require.Equal(t, c.reason, f.Details[0].Reason)
			require.NotContains(t, a.body, "secret")
			if c.retryAfter != "" {
				require.Equal(t, "type.googleapis.com/google.rpc.RetryInfo", f.Details[len(f.Details)-1].Type)
			}
			if name == "invalid argument" {
				require.Equal(t, "spec.image", f.Details[0].Metadata["field"])
				require.Equal(t, "type.googleapis.com/google.rpc.BadRequest", f.Details[1].Type)
				require.Equal(t, "spec.image", f.Details[1].FieldViolations[0].Field)
			}
		})
	}
}

// TestBadRequestsNameTheField also checks the patterns by which the gateway finds the field in errors of the libraries.
func TestBadRequestsNameTheField(t *testing.T) {
	g := start(t, &fake{}) // a call that reaches it panics and is answered with 500
	name := collection + "/a"
	cases := map[string]struct {
		method, path, body, field string
	}{
		"unknown field in a body":        {"POST", collection, `{"spec":{"image":"x","imagee":"y"}}`, "imagee"},
		"unknown field at the top":       {"POST", collection, `{"nam":"x"}`, "nam"},
		"duplicate field":                {"POST", collection, `{"name":"x","name":"y"}`, "name"},
		"wrong type":                     {"POST", collection, `{"spec":{"image":5}}`, "image"},
		"number out of range":            {"POST", collection, `{"spec":{"ports":[99999999999]}}`, "ports"},
		"unknown enum value":             {"POST", collection, `{"spec":{"network":"NETWORK_MODE_MOON"}}`, "network"},
		"wrong duration":                 {"POST", collection, `{"spec":{"terminationGracePeriod":"soon"}}`, "body"},
		"not JSON":                       {"POST", collection, `image: x`, "body"},
		"half a document":                {"POST", collection, `{"name":"x"`, "body"},
		"two documents":                  {"POST", collection, `{"name":"x"} {"name":"y"}`, "body"},
		"rules of the API":               {"POST", collection, `{"name":"UPPER","spec":{"image":"x","pool":"p"}}`, "name"},
		"port out of range":              {"POST", collection, `{"spec":{"image":"x","pool":"p","ports":[70000]}}`, "spec.ports[0]"},
		"namespace in the path":          {"POST", "/v1/namespaces/Not_One/sandboxes", `{"spec":{"image":"x","pool":"p"}}`, "namespace"},
		"query on a create":              {"POST", collection + "?name=b", `{"spec":{"image":"x","pool":"p"}}`, "name"},
		"unknown query on a delete":      {"DELETE", name + "?gracePeriot=5s", "", "gracePeriot"},
		"wrong value in a query":         {"DELETE", name + "?gracePeriod=soon", "", "grace_period"},
		"field of the path in the query": {"DELETE", name + "?name=b", "", "name"},
		"unknown query on a list":        {"GET", collection + "?pagesize=5", "", "pagesize"},
		"wrong number on a list":         {"GET", collection + "?pageSize=many", "", "page_size"},
		"unknown phase on a list":        {"GET", collection + "?phases=PHASE_HAPPY", "", "phases"},
		"query on a get":                 {"GET", name + "?x=y", "", "x"},
		"unknown query on a watch":       {"GET", collection + ":watch?nam=b", "", "nam"},
		"unknown query on logs":          {"GET", name + ":logs?tail=5", "", "tail"},
		"wrong value on logs":            {"GET", name + ":logs?tailLines=all", "", "tail_lines"},
		"the same parameter twice":       {"GET", name + ":logs?tailLines=1&tailLines=2", "", "tailLines"},
		"query that cannot be parsed":    {"GET", collection + "?a=%zz", "", "query"},
		"unknown field in an update":     {"PATCH", name, `{"spec":{"expireTime":null,"x":1}}`, "x"},
		"unknown custom verb":            {"GET", name + ":reboot", "", "name"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			a := g.do(t, c.method, c.path, c.body)
			require.Equal(t, http.StatusBadRequest, a.code, a.body)
			f := a.failure(t)
			require.Equal(t, "INVALID_FIELD", f.Details[0].Reason, a.body)
			require.Equal(t, c.field, f.Details[0].Metadata["field"], a.body)
			require.Contains(t, f.Message, c.field)
		})
	}
}

func TestRoutingErrors(t *testing.T) {
	g := start(t, &fake{})
	cases := map[string]struct {
		method, path string
		http         int
		code         codes.Code
		allow        string
	}{
		"unknown path":      {"GET", "/v2/sandboxes", 404, codes.NotFound, ""},
		"root":              {"GET", "/", 404, codes.NotFound, ""},
		"put on one":        {"PUT", collection + "/a", 405, codes.Unimplemented, "GET, PATCH, DELETE"},
		"delete on all":     {"DELETE", collection, 405, codes.Unimplemented, "GET, POST"},
		"post on logs":      {"POST", collection + "/a:logs", 405, codes.Unimplemented, "GET"},
		"post on watch":     {"POST", collection + ":watch", 405, codes.Unimplemented, "GET"},
		"post on all":       {"POST", "/v1/sandboxes", 405, codes.Unimplemented, "GET"},
		"post on health":    {"POST", "/healthz", 405, codes.Unimplemented, "GET, HEAD"},
		"post on document":  {"POST", "/openapi.json", 405, codes.Unimplemented, "GET, HEAD"},
		"unknown method":    {"FROB", collection, 405, codes.Unimplemented, "GET, POST"},
		"method overridden": {"POST", collection + "/a", 405, codes.Unimplemented, "GET, PATCH, DELETE"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			a := g.do(t, c.method, c.path, "", "X-HTTP-Method-Override", "DELETE")
			require.Equal(t, c.http, a.code, a.body)
			require.Equal(t, c.allow, a.header.Get("Allow"))
			require.EqualValues(t, c.code, a.failure(t).Code)
		})
	}
}

func TestBodiesAreBounded(t *testing.T) {
	called := 0
	g := start(t, &fake{create: func(context.Context, *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		called++
		return &sandboxv1.CreateSandboxResponse{}, nil
	}}, func(c *app.Config) { c.MaxBodyBytes = 1000 })
	body := func(n int) string {
		head := `{"spec":{"image":"x","pool":"p","env":{"A":"`
		return head + strings.Repeat("a", n-len(head)-len(`"}}}`)) + `"}}}`
	}
	require.Len(t, body(1000), 1000)
	require.Equal(t, http.StatusOK, g.do(t, "POST", collection, body(1000)).code)
	a := g.do(t, "POST", collection, body(1001))
	require.Equal(t, http.StatusRequestEntityTooLarge, a.code)
	require.Equal(t, "REQUEST_TOO_LARGE", a.failure(t).Details[0].Reason)

	// The same without a Content-Length.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+collection, bufio.NewReader(strings.NewReader(body(5000))))
	require.NoError(t, err)
	require.Equal(t, http.StatusRequestEntityTooLarge, send(t, g.client, req).code)

	require.Equal(t, http.StatusUnsupportedMediaType, g.do(t, "POST", collection, "x", "Content-Encoding", "gzip").code)
	require.Equal(t, 1, called)
}

func TestOnlyClientsMayCallTheAPI(t *testing.T) {
	g := start(t, &fake{list: func(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
		return &sandboxv1.ListSandboxesResponse{}, nil
	}})
	get := func(client *http.Client, path string, headers ...string) answer {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, g.url+path, nil)
		require.NoError(t, err)
		for i := 0; i+1 < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		return send(t, client, req)
	}
	require.Equal(t, http.StatusOK, get(g.client, collection).code)
	agent := g.as(t, g.authority.TLS(t, rpc.RoleAgent)) // a component is no user
	a := get(agent, collection)
	require.Equal(t, http.StatusUnauthorized, a.code)
	require.Equal(t, "UNAUTHENTICATED", a.failure(t).Details[0].Reason)
	require.Contains(t, a.header.Get("WWW-Authenticate"), "Bearer")
	require.Equal(t, http.StatusOK, get(agent, "/healthz").code)

	t.Run("a connection of strangers ends", func(t *testing.T) {
		for _, http2 := range []bool{false, true} {
			cfg, err := g.authority.User(t, "alice").ClientConfig(rpc.RoleGateway.ServerName())
			require.NoError(t, err)
			cfg.GetClientCertificate = nil
			opened := 0
			transport := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: http2, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				opened++
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}}
			client := &http.Client{Transport: transport}
			for range 40 {
				require.Equal(t, http.StatusUnauthorized, get(client, collection).code)
			}
			transport.CloseIdleConnections()
			require.Equal(t, 3, opened, "16 requests on each")
		}
	})

	t.Run("no certificate", func(t *testing.T) {
		cfg, err := g.authority.User(t, "alice").ClientConfig(rpc.RoleGateway.ServerName())
		require.NoError(t, err)
		cfg.GetClientCertificate = nil
		transport := &http.Transport{TLSClientConfig: cfg}
		defer transport.CloseIdleConnections()
		client := &http.Client{Transport: transport}
		require.Equal(t, http.StatusUnauthorized, get(client, collection).code)
		require.Equal(t, http.StatusOK, get(client, "/healthz").code)
		a := get(client, collection, "Authorization", "Bearer x")
		require.Equal(t, http.StatusServiceUnavailable, a.code, "no API server says whose token this is")
		require.Equal(t, "API_UNAVAILABLE", a.failure(t).Details[0].Reason)
	})
	t.Run("cross-origin request", func(t *testing.T) {
		a := g.do(t, "POST", collection, `{}`, "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site")
		require.Equal(t, http.StatusForbidden, a.code)
		require.Equal(t, "PERMISSION_DENIED", a.failure(t).Details[0].Reason)
		require.Empty(t, a.header.Get("Access-Control-Allow-Origin"))
	})
}

func TestUnreachableAllocatorIs503(t *testing.T) {
	g := start(t, &fake{})
	require.Equal(t, http.StatusOK, g.do(t, "GET", "/readyz", "").code)
	g.allocator()
	a := g.do(t, "GET", collection+"/a", "")
	require.Equal(t, http.StatusServiceUnavailable, a.code)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.NotContains(t, a.body, "127.0.0.1", "addresses of the cluster are private")
	require.Equal(t, "the allocator cannot be reached", a.failure(t).Message)
	require.Equal(t, http.StatusServiceUnavailable, g.do(t, "GET", "/readyz", "").code)
	require.Equal(t, http.StatusOK, g.do(t, "GET", "/healthz", "").code)
}

func TestRetriesUseOneRequestID(t *testing.T) {
	var ids []string
	watches := 0
	g := start(t, &fake{watch: func(*sandboxv1.WatchSandboxesRequest, sandboxv1.SandboxService_WatchSandboxesServer) error {
		if watches++; watches < 3 {
			return fault.New(errdefs.ErrUnavailable, fault.NotLeader, "not the leader")
		}
		return nil
	}, create: func(_ context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		ids = append(ids, in.GetRequestId())
		if len(ids) < 3 {
			return nil, fault.New(errdefs.ErrUnavailable, fault.NotLeader, "not the leader")
		}
		return &sandboxv1.CreateSandboxResponse{}, nil
	}})
	require.Equal(t, http.StatusOK, g.do(t, "POST", collection, `{"spec":{"image":"x","pool":"p"}}`).code)
	require.Len(t, ids, 3)
	require.NotEmpty(t, ids[0])
	require.Equal(t, http.StatusOK, g.do(t, "GET", "/v1/sandboxes:watch", "").code)
	require.Equal(t, 3, watches)
	require.Equal(t, fmt.Sprint([]string{ids[0], ids[0], ids[0]}), fmt.Sprint(ids))
}

func TestDeadlines(t *testing.T) {
	g := start(t, &fake{get: func(ctx context.Context, _ *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}, func(c *app.Config) { c.RequestTimeout = 100 * time.Millisecond })
	for name, headers := range map[string][]string{"the gateway's": nil, "the caller's": {"Grpc-Timeout", "50m"}} {
		t.Run(name, func(t *testing.T) {
			a := g.do(t, "GET", collection+"/a", "", headers...)
			require.Equal(t, http.StatusGatewayTimeout, a.code, a.body)
			require.Equal(t, "DEADLINE_EXCEEDED", a.failure(t).Details[0].Reason)
		})
	}
	require.Equal(t, http.StatusBadRequest, g.do(t, "GET", collection+"/a", "", "Grpc-Timeout", "soon").code)
}
