package rest_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// failingStream is a reply with messages and then an error.
type failingStream struct {
	messages []proto.Message
	err      error
	// opened: headers come before the first message.
	opened bool
	// block, if set, runs after the messages; then the stream waits for the end of the call.
	block func()
	// panics: after the messages, the stream panics.
	panics panics
}

// panics is a reply that panics.
type panics string

// call is one call that an upstream received.
type call struct {
	method  string
	request proto.Message
}

// upstream is a connection to a component that answers each call with the next of its replies, without a network. A reply
// is a proto.Message, a list of them for a stream, an error, a failingStream or panics.
type upstream struct {
	mu      sync.Mutex
	replies []any
	calls   []call
	sent    metadata.MD // with the last call
}

func (u *upstream) next(method string, in any) any {
	u.mu.Lock()
	defer u.mu.Unlock()
	request, _ := in.(proto.Message)
	u.calls = append(u.calls, call{method, proto.CloneOf(request)})
	if len(u.replies) == 0 {
		return rpc.ToStatus(errors.New("no reply is left"))
	}
	reply := u.replies[0]
	u.replies = u.replies[1:]
	return reply
}

// Invoke implements grpc.ClientConnInterface.
func (u *upstream) Invoke(ctx context.Context, method string, in, out any, _ ...grpc.CallOption) error {
	u.mu.Lock()
	u.sent, _ = metadata.FromOutgoingContext(ctx)
	u.mu.Unlock()
	switch reply := u.next(method, in).(type) {
	case panics:
		panic(string(reply))
	case error:
		return rpc.ToStatus(reply)
	case proto.Message:
		proto.Merge(out.(proto.Message), reply) //nolint:forcetypeassert // a test
	}
	return nil
}

// NewStream implements grpc.ClientConnInterface.
func (u *upstream) NewStream(ctx context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return &stream{ctx: ctx, upstream: u, method: method}, nil
}

// stream is a stream of an upstream.
type stream struct {
	grpc.ClientStream
	ctx      context.Context //nolint:containedctx // as every gRPC stream
	upstream *upstream
	method   string
	rest     []proto.Message
	err      error
	opened   bool
	block    func()
	panics   panics
}

func (s *stream) SendMsg(m any) error {
	switch reply := s.upstream.next(s.method, m).(type) {
	case error:
		s.err = rpc.ToStatus(reply)
	case []proto.Message:
		s.rest, s.err = reply, io.EOF
	case failingStream:
		s.rest, s.opened, s.block = reply.messages, reply.opened, reply.block
		if s.err = reply.err; !errors.Is(s.err, io.EOF) {
			s.err = rpc.ToStatus(s.err)
		}
		s.panics = reply.panics
	}
	return nil
}

func (s *stream) CloseSend() error { return nil }

func (s *stream) Header() (metadata.MD, error) {
	if s.opened {
		return metadata.MD{}, nil
	}
	return nil, nil
}

func (s *stream) RecvMsg(m any) error {
	switch {
	case len(s.rest) == 0 && s.block != nil:
		s.block()
		<-s.ctx.Done()
		return rpc.ToStatus(s.ctx.Err())
	case len(s.rest) == 0 && s.panics != "":
		panic(string(s.panics))
	case len(s.rest) == 0:
		return s.err
	}
	proto.Merge(m.(proto.Message), s.rest[0]) //nolint:forcetypeassert // a test
	s.rest = s.rest[1:]
	return nil
}

// harness is a handler in front of two upstreams.
type harness struct {
	allocator, collector *upstream
	handler              http.Handler
	registry             *prometheus.Registry
	draining             chan struct{}
	// notReady is the result of the readiness check.
	notReady error
}

func newHarness(t *testing.T, c clock.Clock) *harness {
	t.Helper()
	h := &harness{allocator: &upstream{}, collector: &upstream{}, registry: prometheus.NewRegistry(), draining: make(chan struct{})}
	var err error
	h.handler, err = rest.New(rest.Config{
		Allocator: h.allocator, Collector: h.collector, Ready: func(context.Context) error { return h.notReady },
		JSON: []byte(`{"openapi":"3.1.0"}`), YAML: []byte("openapi: 3.1.0\n"), MaxBodyBytes: 1 << 10, RequestTimeout: testkit.Timeout,
		Draining: h.draining, Registry: h.registry, Log: logr.Discard(), Clock: c,
	})
	require.NoError(t, err)
	return h
}

func (h *harness) do(t *testing.T, method, path, body string, headers ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, r)
	return w
}

// object names a Deployment in the query of a request about garbage collection.
const object = "?object.place.kind.group=apps&object.place.kind.kind=Deployment&object.place.namespace=ns&object.place.name=web"

// deployment is the same as a message.
func deployment() *gcv1.Selector {
	return &gcv1.Selector{By: &gcv1.Selector_Place{Place: &gcv1.Place{
		Kind: &gcv1.Kind{Group: "apps", Kind: "Deployment"}, Namespace: "ns", Name: "web",
	}}}
}

func byUID(uid string) *gcv1.Selector { return &gcv1.Selector{By: &gcv1.Selector_Uid{Uid: uid}} }

// TestRoutes sends one request for each HTTP binding and checks the call that the upstream receives.
func TestRoutes(t *testing.T) {
	const sandboxes, pools = "/fastsandbox.sandbox.v1.SandboxService/", "/fastsandbox.allocator.v1.AllocatorService/"
	const collector = "/fastsandbox.gc.v1.GarbageCollectorService/"
	for _, tc := range []struct {
		method, path, body string
		call               string
		want               proto.Message
		reply              any
		answer             string
	}{
		{"GET", "/v1/namespaces/ns/sandboxes/a", "", sandboxes + "GetSandbox", &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"}, &sandboxv1.GetSandboxResponse{}, `{}`},
		{"GET", "/v1/sandboxes?pool=p", "", sandboxes + "ListSandboxes", &sandboxv1.ListSandboxesRequest{Pool: "p"}, &sandboxv1.ListSandboxesResponse{}, `{"sandboxes":[]}`},
		{"GET", "/v1/sandboxes:watch", "", sandboxes + "WatchSandboxes", &sandboxv1.WatchSandboxesRequest{}, []proto.Message{}, ``},
		{"GET", "/v1/namespaces/ns/agents?pool=p", "", pools + "ListAgents", &allocatorv1.ListAgentsRequest{Namespace: "ns", Pool: "p"},
			&allocatorv1.ListAgentsResponse{Agents: []*allocatorv1.Agent{{Allocated: 3}}}, `{"agents":[{"allocated":3}]}`},
		{"GET", "/v1/agents", "", pools + "ListAgents", &allocatorv1.ListAgentsRequest{}, &allocatorv1.ListAgentsResponse{}, `{"agents":[]}`},
		{"GET", "/v1/namespaces/ns/pools", "", pools + "ListPools", &allocatorv1.ListPoolsRequest{Namespace: "ns"}, &allocatorv1.ListPoolsResponse{}, `{"pools":[]}`},
		{"GET", "/v1/pools", "", pools + "ListPools", &allocatorv1.ListPoolsRequest{}, &allocatorv1.ListPoolsResponse{}, `{"pools":[]}`},
		{"GET", "/v1/namespaces/ns/pools/p", "", pools + "GetPool", &allocatorv1.GetPoolRequest{Namespace: "ns", Name: "p"},
			&allocatorv1.GetPoolResponse{Pool: &allocatorv1.Pool{Name: "p"}}, `{"pool":{"name":"p"}}`},
		{"GET", "/v1/namespaces/ns/pools/p/images", "", pools + "ListImages", &allocatorv1.ListImagesRequest{Namespace: "ns", Pool: "p"},
			&allocatorv1.ListImagesResponse{}, `{"images":[]}`},
		{"POST", "/v1/namespaces/ns/pools/p/images:pull", `{"image":"busybox"}`, pools + "PullImage",
			&allocatorv1.PullImageRequest{Namespace: "ns", Pool: "p", Image: "busybox"},
			[]proto.Message{&allocatorv1.PullImageResponse{NodeName: "n1", Progress: &agentv1.PullProgress{Phase: "done"}}},
			`{"result":{"nodeName":"n1","progress":{"phase":"done"}}}` + "\n"},
		{"GET", "/v1/gc/objects:explain" + object, "", collector + "ExplainObject", &gcv1.ExplainObjectRequest{Object: deployment()},
			&gcv1.ExplainObjectResponse{State: gcv1.State_STATE_FREE}, `{"state":"STATE_FREE"}`},
		{"GET", "/v1/gc/objects/u1:explain?maxBlockers=3", "", collector + "ExplainObject",
			&gcv1.ExplainObjectRequest{Object: byUID("u1"), MaxBlockers: 3}, &gcv1.ExplainObjectResponse{}, `{}`},
		{"GET", "/v1/gc/objects/u1:previewDelete?policy=PROPAGATION_POLICY_ORPHAN", "", collector + "PreviewDelete",
			&gcv1.PreviewDeleteRequest{Object: byUID("u1"), Policy: gcv1.PropagationPolicy_PROPAGATION_POLICY_ORPHAN},
			[]proto.Message{&gcv1.PreviewDeleteResponse{Part: &gcv1.PreviewDeleteResponse_Summary{Summary: &gcv1.PreviewSummary{}}}}, `{"result":{"summary":{}}}` + "\n"},
		{"GET", "/v1/gc/objects:previewDelete" + object, "", collector + "PreviewDelete", &gcv1.PreviewDeleteRequest{Object: deployment()}, []proto.Message{}, ``},
		{"GET", "/v1/gc/objects/u1:graph?depth=1", "", collector + "GetGraph", &gcv1.GetGraphRequest{Object: byUID("u1"), Depth: 1}, &gcv1.GetGraphResponse{}, `{}`},
		{"GET", "/v1/gc/objects:graph" + object, "", collector + "GetGraph", &gcv1.GetGraphRequest{Object: deployment()}, &gcv1.GetGraphResponse{}, `{}`},
		{"GET", "/v1/gc/graph", "", collector + "StreamGraph", &gcv1.StreamGraphRequest{},
			[]proto.Message{&gcv1.StreamGraphResponse{References: []*gcv1.Reference{{Owner: "o"}}}, &gcv1.StreamGraphResponse{}},
			`{"result":{"references":[{"owner":"o"}]}}` + "\n" + `{"result":{}}` + "\n"},
		{"GET", "/v1/gc/namespaces/ns/graph", "", collector + "StreamGraph", &gcv1.StreamGraphRequest{Namespace: "ns"}, []proto.Message{}, ``},
	} {
		t.Run(tc.method+" "+tc.path, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			up := h.allocator
			if strings.HasPrefix(tc.call, collector) {
				up = h.collector
			}
			up.replies = []any{tc.reply}
			w := h.do(t, tc.method, tc.path, tc.body)
			require.Equal(t, http.StatusOK, w.Code, w.Body)
			require.Equal(t, tc.answer, w.Body.String())
			require.Len(t, up.calls, 1)
			require.Equal(t, tc.call, up.calls[0].method)
			require.Empty(t, cmp.Diff(tc.want, up.calls[0].request, protocmp.Transform()))
		})
	}
}

// TestPrivateMethods sends requests for methods that are for components alone.
func TestPrivateMethods(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	for _, path := range []string{
		"/fastsandbox.allocator.v1.AllocatorService/Allocate", "/v1/agents:watch", "/v1/namespaces/ns/agents:watch", "/v1/allocate", "/v1/gc/status",
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			require.Equal(t, http.StatusNotFound, h.do(t, method, path, `{}`).Code, path)
		}
	}
	require.Empty(t, h.allocator.calls)
}

func TestRequestsThatAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		method, path, body string
		code               int
		want               string
	}{
		"unknown parameter of a pool":      {"GET", "/v1/pools?x=y", "", 400, `unknown field \"x\"`},
		"parameter of a pull":              {"POST", "/v1/namespaces/ns/pools/p/images:pull?image=x", `{}`, 400, `unknown field \"image\"`},
		"unknown field of a pull":          {"POST", "/v1/namespaces/ns/pools/p/images:pull", `{"imagee":"x"}`, 400, "imagee"},
		"unknown nested parameter":         {"GET", "/v1/gc/objects:graph?object.place.nam=x", "", 400, "object.place.nam"},
		"object of the path in the query":  {"GET", "/v1/gc/objects/u1:graph?object.uid=x", "", 400, "object.uid"},
		"field of the body in the query":   {"PATCH", "/v1/namespaces/ns/sandboxes/a?sandbox.uid=u", `{}`, 400, "sandbox.uid"},
		"wrong number":                     {"GET", "/v1/gc/objects/u1:graph?depth=deep", "", 400, "depth"},
		"get of a pull":                    {"GET", "/v1/namespaces/ns/pools/p/images:pull", "", 405, "GET is not allowed"},
		"delete of a pool":                 {"DELETE", "/v1/namespaces/ns/pools/p", "", 405, "DELETE is not allowed"},
		"body that is larger than allowed": {"POST", "/v1/namespaces/ns/sandboxes", `"` + strings.Repeat("a", 2000) + `"`, 413, "REQUEST_TOO_LARGE"},
		"compressed body":                  {"POST", "/v1/namespaces/ns/sandboxes", `{}`, 415, "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			var headers []string
			if tc.code == http.StatusUnsupportedMediaType {
				headers = []string{"Content-Encoding", "gzip"}
			}
			w := h.do(t, tc.method, tc.path, tc.body, headers...)
			require.Equal(t, tc.code, w.Code, w.Body)
			require.Contains(t, w.Body.String(), tc.want)
			require.Empty(t, h.allocator.calls)
			require.Empty(t, h.collector.calls)
		})
	}
}

func TestAllowHeader(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	for path, want := range map[string]string{
		"/v1/namespaces/ns/sandboxes":           "GET, POST",
		"/v1/namespaces/ns/sandboxes/a":         "GET, PATCH, DELETE",
		"/v1/namespaces/ns/sandboxes/a:logs":    "GET",
		"/v1/namespaces/ns/pools/p/images:pull": "POST",
		"/v1/namespaces/ns/pools/p":             "GET",
		"/v1/gc/objects/u1:explain":             "GET",
		"/openapi.yaml":                         "GET, HEAD",
	} {
		w := h.do(t, http.MethodPut, path, "")
		require.Equal(t, http.StatusMethodNotAllowed, w.Code, path)
		require.Equal(t, want, w.Header().Get("Allow"), path)
	}
}

// TestErrorsNameTheUpstream checks that an unreachable component is named, and its address is not.
func TestErrorsNameTheUpstream(t *testing.T) {
	away := fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "away")
	h := newHarness(t, clock.RealClock{})
	h.collector.replies = []any{away}
	w := h.do(t, "GET", "/v1/gc/graph", "")
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), "API_UNAVAILABLE", "an error of the component is passed on")

	h.collector.replies = []any{fault.New(errdefs.ErrInternal, "", "secret"), errors.New("secret")}
	for range 2 {
		w = h.do(t, "GET", "/v1/gc/objects/u1:explain", "")
		require.Equal(t, http.StatusInternalServerError, w.Code)
	}
	require.NotContains(t, w.Body.String(), "secret")
}

// TestRetry repeats calls that reach no leader, on a fake clock: five calls in all, under one request id.
func TestRetry(t *testing.T) {
	follower := fault.New(errdefs.ErrUnavailable, fault.NotLeader, "follows")
	for name, tc := range map[string]struct {
		method, path, body string
		replies            []any
		calls, code        int
	}{
		"a leader is found": {"POST", "/v1/namespaces/ns/sandboxes", `{"spec":{"image":"x"}}`, []any{follower, follower, &sandboxv1.CreateSandboxResponse{}}, 3, 200},
		"no leader":         {"DELETE", "/v1/namespaces/ns/sandboxes/a", "", []any{follower, follower, follower, follower, follower, follower}, 5, 503},
		"a stream":          {"GET", "/v1/sandboxes:watch", "", []any{follower, []proto.Message{}}, 2, 200},
		"another error":     {"GET", "/v1/pools", "", []any{fault.New(errdefs.ErrUnavailable, fault.Overloaded, "busy")}, 1, 503},
	} {
		t.Run(name, func(t *testing.T) {
			c := clocktesting.NewFakeClock(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))
			h := newHarness(t, c)
			h.allocator.replies = tc.replies
			done := make(chan *httptest.ResponseRecorder, 1)
			go func() { done <- h.do(t, tc.method, tc.path, tc.body) }()
			var w *httptest.ResponseRecorder
			require.Eventually(t, func() bool {
				if c.HasWaiters() {
					c.Step(time.Second)
				}
				select {
				case w = <-done:
					return true
				default:
					return false
				}
			}, testkit.Timeout, testkit.Tick)
			require.Equal(t, tc.code, w.Code, w.Body)
			require.Len(t, h.allocator.calls, tc.calls)
			if first, ok := h.allocator.calls[0].request.(*sandboxv1.CreateSandboxRequest); ok {
				for _, again := range h.allocator.calls {
					require.Equal(t, first.GetRequestId(), again.request.(*sandboxv1.CreateSandboxRequest).GetRequestId()) //nolint:forcetypeassert // a test
				}
				require.NotEmpty(t, first.GetRequestId())
			}
		})
	}
}

func TestLogFormats(t *testing.T) {
	pieces := []proto.Message{&sandboxv1.StreamLogsResponse{Data: []byte("a\xff")}, &sandboxv1.StreamLogsResponse{Data: []byte("b")}}
	for accept, want := range map[string]string{
		"":                                  "application/x-ndjson",
		"*/*":                               "application/x-ndjson",
		"text/plain":                        "text/plain; charset=utf-8",
		"text/*, application/json":          "text/plain; charset=utf-8",
		"application/json, text/plain":      "application/x-ndjson",
		"text/html, text/plain;q=0.5":       "text/plain; charset=utf-8",
		";broken, application/x-ndjson":     "application/x-ndjson",
		"application/octet-stream, text/ok": "application/x-ndjson",
	} {
		t.Run(accept, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{pieces}
			w := h.do(t, "GET", "/v1/namespaces/ns/sandboxes/a:logs", "", "Accept", accept)
			require.Equal(t, want, w.Header().Get("Content-Type"))
			if strings.HasPrefix(want, "text/plain") {
				require.Equal(t, "a\xffb", w.Body.String())
			} else {
				require.Equal(t, `{"result":{"data":"Yf8="}}`+"\n"+`{"result":{"data":"Yg=="}}`+"\n", w.Body.String())
			}
		})
	}
}

func TestPages(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	for path, want := range map[string]string{
		"/healthz": "ok\n", "/readyz": "ok\n", "/openapi.json": `{"openapi":"3.1.0"}`, "/openapi.yaml": "openapi: 3.1.0\n",
	} {
		w := h.do(t, http.MethodGet, path, "")
		require.Equal(t, http.StatusOK, w.Code, path)
		require.Equal(t, want, w.Body.String())
	}
}
