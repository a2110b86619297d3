package rest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestErrorClasses: each class of error has its HTTP status, keeps its gRPC code, reason, message and metadata, and says when to
// retry if that helps.
func TestErrorClasses(t *testing.T) {
	for _, tc := range []struct {
		class  error
		reason fault.Reason
		http   int
		grpc   codes.Code
		retry  bool
	}{
		{errdefs.ErrInvalidArgument, fault.InvalidField, 400, codes.InvalidArgument, false},
		{errdefs.ErrFailedPrecondition, fault.FenceMismatch, 400, codes.FailedPrecondition, false},
		{errdefs.ErrUnauthenticated, fault.PermissionDenied, 401, codes.Unauthenticated, false},
		{errdefs.ErrPermissionDenied, fault.PermissionDenied, 403, codes.PermissionDenied, false},
		{errdefs.ErrNotFound, fault.SandboxNotFound, 404, codes.NotFound, false},
		{errdefs.ErrAlreadyExists, fault.SandboxExists, 409, codes.AlreadyExists, false},
		{errdefs.ErrAborted, fault.SandboxTerminating, 409, codes.Aborted, false},
		{errdefs.ErrResourceExhausted, fault.NoCapacity, 429, codes.ResourceExhausted, true},
		{context.Canceled, fault.Cancelled, 499, codes.Canceled, false},
		{errdefs.ErrNotImplemented, fault.Internal, 501, codes.Unimplemented, false},
		{errdefs.ErrUnavailable, fault.APIUnavailable, 503, codes.Unavailable, true},
		{context.DeadlineExceeded, fault.DeadlineExceeded, 504, codes.DeadlineExceeded, false},
	} {
		t.Run(tc.grpc.String(), func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{fault.New(tc.class, tc.reason, "why it failed").With("sandbox", "ns/a")}
			w := h.do(t, "GET", "/v1/namespaces/ns/sandboxes/a", "")
			require.Equal(t, tc.http, w.Code, w.Body)
			f := failureOf(t, w)
			require.Equal(t, tc.grpc, f.Code)
			require.Equal(t, "why it failed", f.Message)
			require.Equal(t, string(tc.reason), f.Details[0].Reason)
			require.Equal(t, "ns/a", f.Details[0].Metadata["sandbox"])
			require.Equal(t, tc.retry, w.Header().Get("Retry-After") != "")
		})
	}
}

// TestAnswerHeaders: an answer of the API is not cached, and its type is declared and not sniffed.
func TestAnswerHeaders(t *testing.T) {
	for _, tc := range []struct {
		method, path, kind string
		code               int
	}{
		{"GET", "/v1/pools", "application/json", 200},
		{"GET", "/v1/sandboxes:watch", "application/x-ndjson", 200},
		{"GET", "/v1/pools?x=y", "application/json", 400},
		{"PUT", "/v1/pools", "application/json", 405},
		{"GET", "/v1/unknown", "application/json", 404},
		{"GET", "/healthz", "text/plain; charset=utf-8", 200},
		{"HEAD", "/readyz", "text/plain; charset=utf-8", 200},
		{"POST", "/healthz", "application/json", 405},
		{"GET", "/openapi.json", "application/json", 200},
		{"HEAD", "/openapi.yaml", "application/yaml", 200},
	} {
		t.Run(tc.method+" "+tc.path, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{&allocatorv1.ListPoolsResponse{}}
			if strings.HasSuffix(tc.path, ":watch") {
				h.allocator.replies = []any{[]proto.Message{}}
			}
			w := h.do(t, tc.method, tc.path, "", "X-Request-Id", "mine")
			require.Equal(t, tc.code, w.Code, w.Body)
			require.Equal(t, tc.kind, w.Header().Get("Content-Type"))
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			require.Equal(t, "nosniff", w.Header().Get("X-Content-Type-Options"))
			require.Equal(t, "mine", w.Header().Get("X-Request-Id"))
		})
	}
}

func TestReadiness(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	h.notReady = errors.New("dial 10.0.0.7:9090")
	w := h.do(t, "GET", "/readyz", "")
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.NotContains(t, w.Body.String(), "10.0.0.7")
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Equal(t, http.StatusOK, h.do(t, "GET", "/healthz", "").Code, "a gateway without an allocator is alive")

	h.notReady = nil
	require.Equal(t, http.StatusOK, h.do(t, "GET", "/readyz", "").Code)
	close(h.draining)
	w = h.do(t, "GET", "/readyz", "")
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "the gateway is stopping; connect again", failureOf(t, w).Message)
	require.Equal(t, http.StatusOK, h.do(t, "GET", "/healthz", "").Code)
}

// TestBodies: a body is exactly one JSON document of at most MaxBodyBytes (1 KiB here).
func TestBodies(t *testing.T) {
	const path = "/v1/namespaces/ns/sandboxes"
	padded := func(size int) string {
		body := `{"spec":{"image":"x"}}`
		return body + strings.Repeat(" ", size-len(body))
	}
	for name, tc := range map[string]struct {
		body    string
		code    int
		message string
	}{
		"a document":        {`{"spec":{"image":"x"}}`, 200, ""},
		"of the limit":      {padded(1 << 10), 200, ""},
		"above the limit":   {padded(1<<10 + 1), 413, "at most 1024 bytes"},
		"none":              {"", 200, ""},
		"white space":       {" \n", 200, ""},
		"two documents":     {`{"spec":{"image":"x"}} {}`, 400, "must be one JSON document"},
		"a broken document": {`{"spec":`, 400, "must be one JSON document"},
		"another type":      {`[]`, 400, "unexpected token"},
		"an unknown field":  {`{"spec":{"imge":"x"}}`, 400, `unknown field "imge"`},
		"a duplicate field": {`{"spec":{"image":"x","image":"y"}}`, 400, `duplicate field "image"`},
		"a wrong value":     {`{"spec":{"image":7}}`, 400, "invalid value for string field image"},
		"an unknown enum":   {`{"spec":{"network":"NETWORK_MODE_MOON"}}`, 400, "NETWORK_MODE_MOON"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{&sandboxv1.CreateSandboxResponse{}}
			w := h.do(t, "POST", path, tc.body, "Content-Encoding", "identity")
			require.Equal(t, tc.code, w.Code, w.Body)
			if tc.code == http.StatusOK {
				require.Len(t, h.allocator.calls, 1)
				return
			}
			require.Contains(t, failureOf(t, w).Message, tc.message)
			require.Empty(t, h.allocator.calls)
		})
	}
}

// A body that does not arrive gets an answer, and its connection is closed: the rest of it may still come.
func TestBodyThatDoesNotArrive(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/namespaces/ns/sandboxes", io.MultiReader(strings.NewReader(`{"spec"`), brokenReader{}))
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, r)
	require.Equal(t, http.StatusRequestTimeout, w.Code)
	require.Equal(t, "close", w.Header().Get("Connection"))
	require.Equal(t, "body: did not arrive within 30s", failureOf(t, w).Message)
	require.Empty(t, h.allocator.calls)
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("i/o timeout") }

func TestQueries(t *testing.T) {
	for query, message := range map[string]string{
		"":               "",
		"?pool=p":        "",
		"?pageSize=3":    "",
		"?page_size=3":   "",
		"?pool=p&pool=q": "must not be set more than once, is set 2 times",
		"?pageSize=many": "many",
		// Which of them would apply depended on the order of a map.
		"?pageSize=3&page_size=4": "must not be set more than once, is set 2 times",
		"?pool=%zz":               "invalid query",
		"?Pool=p":                 `unknown field "Pool" in the query`,
		"?sandboxes=x":            `unknown field "sandboxes" in the query`,
		"?pool.name=p":            `unknown field "pool.name" in the query`,
	} {
		t.Run(query, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{&sandboxv1.ListSandboxesResponse{}}
			w := h.do(t, "GET", "/v1/namespaces/ns/sandboxes"+query, "")
			if message == "" {
				require.Equal(t, http.StatusOK, w.Code, w.Body)
				return
			}
			require.Equal(t, http.StatusBadRequest, w.Code, w.Body)
			require.Contains(t, failureOf(t, w).Message, message)
			require.Empty(t, h.allocator.calls)
		})
	}
}

// Text that is not UTF-8 cannot be sent to an upstream, nor repeated in an error.
func TestTextThatIsNotUTF8(t *testing.T) {
	for _, target := range []string{
		"/v1/namespaces/ns/sandboxes?%f1", "/v1/namespaces/ns/sandboxes?pool=%ff", "/v1/namespaces/%ff/sandboxes", "/v1/namespaces/ns/sandboxes/%c3%28",
	} {
		t.Run(target, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{&sandboxv1.ListSandboxesResponse{}}
			w := h.do(t, "GET", target, "")
			require.Equal(t, http.StatusBadRequest, w.Code, w.Body)
			require.Contains(t, failureOf(t, w).Message, "must be UTF-8")
			require.Empty(t, h.allocator.calls)
		})
	}
}

// TestStreamEnds ends streams in every way that is not an error of the server.
func TestStreamEnds(t *testing.T) {
	message := &sandboxv1.WatchSandboxesResponse{}
	t.Run("without a message", func(t *testing.T) {
		for _, opened := range []bool{false, true} {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{failingStream{opened: opened, err: io.EOF}}
			w := h.do(t, "GET", "/v1/sandboxes:watch", "")
			require.Equal(t, http.StatusOK, w.Code)
			require.Empty(t, w.Body.String())
			require.True(t, w.Flushed)
		}
	})
	t.Run("an error after the headers", func(t *testing.T) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{failingStream{opened: true, err: fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "is being deleted")}}
		w := h.do(t, "GET", "/v1/sandboxes:watch", "")
		require.Equal(t, http.StatusOK, w.Code)
		require.Contains(t, w.Body.String(), `{"error":{"code":10,"message":"is being deleted"`)
		require.Contains(t, w.Body.String(), `"reason":"SANDBOX_TERMINATING"`)
		require.True(t, strings.HasSuffix(w.Body.String(), "}}\n"))
	})
	t.Run("the gateway stops", func(t *testing.T) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{failingStream{messages: []proto.Message{message}, block: func() { close(h.draining) }}}
		w := h.do(t, "GET", "/v1/sandboxes:watch", "")
		lines := strings.Split(w.Body.String(), "\n")
		require.Equal(t, `{"result":{}}`, lines[0])
		require.Contains(t, lines[1], `"message":"the gateway is stopping; connect again"`)
		require.Contains(t, lines[1], `{"error":{"code":14,`)
	})
	t.Run("the gateway stops before the first message", func(t *testing.T) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{failingStream{block: func() {}}}
		close(h.draining)
		w := h.do(t, "GET", "/v1/sandboxes:watch", "")
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, "the gateway is stopping; connect again", failureOf(t, w).Message)
	})
	t.Run("the caller leaves", func(t *testing.T) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{failingStream{messages: []proto.Message{message, message}, block: func() {}}}
		w := &leavingWriter{ResponseRecorder: httptest.NewRecorder(), after: 2} // the headers, and one message
		h.handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/v1/sandboxes:watch", nil))
		require.Equal(t, "{\"result\":{}}\n", w.Body.String())
	})
}

// leavingWriter fails all writes after the first ones.
type leavingWriter struct {
	*httptest.ResponseRecorder
	after int
}

func (w *leavingWriter) Write(p []byte) (int, error) {
	if w.after--; w.after < 0 {
		return 0, errors.New("broken pipe")
	}
	return w.ResponseRecorder.Write(p)
}

// TestRequestsAreCounted: labels are bounded, whatever callers send.
func TestRequestsAreCounted(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	h.allocator.replies = []any{&sandboxv1.GetSandboxResponse{}, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "not found"), []proto.Message{}}
	h.do(t, "GET", "/v1/namespaces/ns/sandboxes/a", "")
	h.do(t, "GET", "/v1/namespaces/ns/sandboxes/b", "")
	h.do(t, "GET", "/v1/sandboxes:watch", "")
	h.do(t, "GET", "/v1/secret-path", "")
	h.do(t, "BREW", "/healthz", "")
	const sandbox = "/v1/namespaces/{namespace=*}/sandboxes/{name=*}"
	require.Equal(t, map[string]float64{
		"200 GET " + sandbox: 1, "404 GET " + sandbox: 1, "200 GET /v1/sandboxes:watch": 1, "404 GET unmatched": 1, "405 other /healthz": 1,
	}, samples(t, h, "fastsandbox_gateway_requests_total"))
	require.Equal(t, map[string]float64{"": 0}, samples(t, h, "fastsandbox_gateway_streams"))
	_, err := rest.New(rest.Config{Registry: h.registry})
	require.ErrorContains(t, err, "registering metrics")
}

// samples returns the values of a metric by the values of its labels, which are in the order of their names.
func samples(t *testing.T, h *harness, name string) map[string]float64 {
	t.Helper()
	families, err := h.registry.Gather()
	require.NoError(t, err)
	out := map[string]float64{}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			out[strings.Join(labels, " ")] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return out
}

// TestRetryEndsWithTheCall: a caller that leaves gets the error of the last call, and no further call is made.
func TestRetryEndsWithTheCall(t *testing.T) {
	c := clocktesting.NewFakeClock(time.Unix(0, 0))
	h := newHarness(t, c)
	follower := fault.New(errdefs.ErrUnavailable, fault.NotLeader, "follows")
	h.allocator.replies = []any{follower, follower}
	ctx, cancel := context.WithCancel(t.Context())
	w := httptest.NewRecorder()
	var serving sync.WaitGroup
	serving.Go(func() { h.handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "GET", "/v1/pools", nil)) })
	require.Eventually(t, c.HasWaiters, testkit.Timeout, testkit.Tick) // for the delay, which does not pass
	cancel()
	serving.Wait()
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "NOT_LEADER", failureOf(t, w).Details[0].Reason)
	require.Len(t, h.allocator.calls, 1)
}

// healthConn is a connection whose health service answers with the next of its results: a status, or an error.
type healthConn struct {
	grpc.ClientConnInterface
	mu      sync.Mutex
	results []any
}

func (c *healthConn) Invoke(_ context.Context, _ string, in, out any, _ ...grpc.CallOption) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if name := in.(*healthv1.HealthCheckRequest).GetService(); name != "fastsandbox.sandbox.v1.SandboxService" { //nolint:forcetypeassert // a test
		return fmt.Errorf("unexpected service %s", name)
	}
	result := c.results[0]
	if len(c.results) > 1 {
		c.results = c.results[1:]
	}
	if err, ok := result.(error); ok {
		return rpc.ToStatus(err)
	}
	out.(*healthv1.HealthCheckResponse).Status = result.(healthv1.HealthCheckResponse_ServingStatus) //nolint:forcetypeassert // a test
	return nil
}

const (
	serving    = healthv1.HealthCheckResponse_SERVING
	notServing = healthv1.HealthCheckResponse_NOT_SERVING
)

func TestUpstreamCheck(t *testing.T) {
	for name, tc := range map[string]struct {
		result  any
		message string
	}{
		"serving":     {serving, ""},
		"not serving": {notServing, "checking the health of the allocator: status is NOT_SERVING"},
		"away":        {errors.New("refused"), "checking the health of the allocator: "},
	} {
		t.Run(name, func(t *testing.T) {
			err := rest.NewUpstream(&healthConn{results: []any{tc.result}}).Check(t.Context())
			if tc.message == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tc.message)
		})
	}
}

// TestUpstreamFollow: the first result and each change are reported, on a fake clock.
func TestUpstreamFollow(t *testing.T) {
	c := clocktesting.NewFakeClock(time.Unix(0, 0))
	u := rest.NewUpstream(&healthConn{results: []any{serving, serving, notServing, errors.New("refused"), serving}})
	ctx, cancel := context.WithCancel(t.Context())
	reports := make(chan bool, 10)
	var following sync.WaitGroup
	following.Go(func() { u.Follow(ctx, c, func(err error) { reports <- err == nil }) })
	for range 5 {
		require.Eventually(t, c.HasWaiters, testkit.Timeout, testkit.Tick)
		c.Step(3 * time.Second)
	}
	require.Eventually(t, c.HasWaiters, testkit.Timeout, testkit.Tick)
	cancel()
	following.Wait()
	close(reports)
	var got []bool
	for r := range reports {
		got = append(got, r)
	}
	require.Equal(t, []bool{true, false, true}, got)
}
