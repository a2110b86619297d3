package rest_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// failure is a google.rpc.Status as JSON.
type failure struct {
	Code    codes.Code
	Message string
	Details []struct {
		Reason, RetryDelay string
		Metadata           map[string]string
	}
}

func failureOf(t *testing.T, w *httptest.ResponseRecorder) failure {
	t.Helper()
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	var f failure
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &f), w.Body.String())
	require.NotEmpty(t, f.Details)
	return f
}

// TestEveryCodeHasDetails returns each gRPC code without details, as a library or a proxy may: the caller gets an ErrorInfo, and
// nothing of an internal text.
func TestEveryCodeHasDetails(t *testing.T) {
	const secret = "dial 10.0.0.7:9090"
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		t.Run(code.String(), func(t *testing.T) {
			c := clocktesting.NewFakeClock(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))
			h := newHarness(t, c)
			for range 5 {
				h.allocator.replies = append(h.allocator.replies, status.Error(code, secret))
			}
			done := make(chan *httptest.ResponseRecorder, 1)
			go func() { done <- h.do(t, "GET", "/v1/namespaces/ns/pools/p", "") }()
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
			f := failureOf(t, w)
			require.NotEmpty(t, f.Details[0].Reason)
			switch code {
			case codes.Unavailable:
				require.Equal(t, "the allocator cannot be reached", f.Message)
				require.NotEmpty(t, w.Header().Get("Retry-After"))
			case codes.Internal, codes.Unknown:
				require.Equal(t, codes.Internal, f.Code)
				require.Equal(t, "internal error", f.Message)
			case codes.DeadlineExceeded, codes.Canceled:
				require.NotContains(t, f.Message, secret)
			default:
				require.Equal(t, code, f.Code)
			}
		})
	}
}

func TestRetryAfter(t *testing.T) {
	for want, delay := range map[string]time.Duration{"1": 10 * time.Millisecond, "3": 2500 * time.Millisecond} {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full").RetryIn(delay)}
		w := h.do(t, "GET", "/v1/pools", "")
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Equal(t, want, w.Header().Get("Retry-After"))
	}
}

// TestStreamErrors ends streams with an error: before the first message, after it, and in raw output.
func TestStreamErrors(t *testing.T) {
	broken := fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too slow")
	h := newHarness(t, clock.RealClock{})
	h.allocator.replies = []any{broken}
	w := h.do(t, "POST", "/v1/namespaces/ns/pools/p/images:pull", `{"image":"x"}`)
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "OVERLOADED", failureOf(t, w).Details[0].Reason)

	piece := &sandboxv1.StreamLogsResponse{Data: []byte("half")}
	h.allocator.replies = []any{failingStream{messages: []proto.Message{piece}, err: broken}}
	w = h.do(t, "GET", "/v1/namespaces/ns/sandboxes/a:logs", "")
	lines := strings.Split(strings.TrimSpace(w.Body.String()), "\n")
	require.Len(t, lines, 2)
	require.Equal(t, `{"result":{"data":"aGFsZg=="}}`, lines[0])
	require.Contains(t, lines[1], `{"error":{"code":8,`)

	h.allocator.replies = []any{failingStream{messages: []proto.Message{piece}, err: broken}}
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { h.do(t, "GET", "/v1/namespaces/ns/sandboxes/a:logs", "", "Accept", "text/plain") },
		"net/http aborts the connection")
}

// TestPanicIsAnInternalError has an upstream's connection panic.
func TestPanicIsAnInternalError(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	h.allocator.replies = []any{panics("at the call")}
	w := h.do(t, "GET", "/v1/pools", "")
	require.Equal(t, http.StatusInternalServerError, w.Code)
	require.Equal(t, "internal error", failureOf(t, w).Message)
}

// TestPanicInAnAnswerAbortsIt has a stream panic after its first message: an answer that is cut must not look complete.
func TestPanicInAnAnswerAbortsIt(t *testing.T) {
	h := newHarness(t, clock.RealClock{})
	h.allocator.replies = []any{failingStream{messages: []proto.Message{&sandboxv1.StreamLogsResponse{Data: []byte("half")}}, panics: "in the stream"}}
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { h.do(t, "GET", "/v1/namespaces/ns/sandboxes/a:logs", "") })
}

func TestRequestIDs(t *testing.T) {
	for name, tc := range map[string]struct {
		id   string
		kept bool
	}{
		"kept":         {"mine-1", true},
		"missing":      {"", false},
		"with a space": {"two words", false},
		"not ASCII":    {"é", false},
		"too long":     {strings.Repeat("a", 129), false},
		"longest":      {strings.Repeat("a", 128), true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{&sandboxv1.DeleteSandboxResponse{}}
			w := h.do(t, "DELETE", "/v1/namespaces/ns/sandboxes/a", "", "X-Request-Id", tc.id)
			require.Equal(t, http.StatusOK, w.Code)
			used := w.Header().Get("X-Request-Id")
			if tc.kept {
				require.Equal(t, tc.id, used)
			} else {
				require.Len(t, used, 36)
			}
			request, ok := h.allocator.calls[0].request.(*sandboxv1.DeleteSandboxRequest)
			require.True(t, ok)
			require.Equal(t, used, request.GetRequestId())
		})
	}
}

func TestIdempotencyKeys(t *testing.T) {
	for name, tc := range map[string]struct {
		header, body string
		code         int
		want         string
	}{
		"header":         {"k", `{"spec":{"image":"x"}}`, 200, "k"},
		"body":           {"", `{"spec":{"image":"x"},"requestId":"r"}`, 200, "r"},
		"the same":       {"r", `{"spec":{"image":"x"},"requestId":"r"}`, 200, "r"},
		"different keys": {"k", `{"spec":{"image":"x"},"requestId":"r"}`, 400, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, clock.RealClock{})
			h.allocator.replies = []any{&sandboxv1.CreateSandboxResponse{}}
			w := h.do(t, "POST", "/v1/namespaces/ns/sandboxes", tc.body, "Idempotency-Key", tc.header)
			require.Equal(t, tc.code, w.Code, w.Body)
			if tc.code != http.StatusOK {
				require.Equal(t, "request_id", failureOf(t, w).Details[0].Metadata["field"])
				return
			}
			request, ok := h.allocator.calls[0].request.(*sandboxv1.CreateSandboxRequest)
			require.True(t, ok)
			require.Equal(t, tc.want, request.GetRequestId())
		})
	}
}

func TestUpdateMask(t *testing.T) {
	for query, want := range map[string][]string{
		"":                                    {"labels", "spec.expire_time"},
		"?updateMask=spec.ttlAfterFinished":   {"spec.ttl_after_finished"},
		"?updateMask=labels,spec.expire_time": {"labels", "spec.expire_time"},
		"?updateMask=spec.nonsense":           {"spec.nonsense"}, // for the server to refuse
	} {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{&sandboxv1.UpdateSandboxResponse{}}
		w := h.do(t, "PATCH", "/v1/namespaces/ns/sandboxes/a"+query, `{"labels":{"a":"b"},"spec":{"expireTime":null}}`)
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		request, ok := h.allocator.calls[0].request.(*sandboxv1.UpdateSandboxRequest)
		require.True(t, ok)
		require.Equal(t, want, request.GetUpdateMask().GetPaths(), query)
	}
}

// TestAccess checks who may call the API: users with a token, and no pages of other sites.
func TestAccess(t *testing.T) {
	registry := prometheus.NewRegistry()
	draining := make(chan struct{})
	ready := errors.New("not ready")
	handler, err := rest.New(rest.Config{
		Allocator: &upstream{}, Collector: &upstream{}, Ready: func(context.Context) error { return ready }, MaxBodyBytes: 100,
		RequestTimeout: testkit.Timeout, Tokens: users.Tokens{"good": {User: "alice"}}, Draining: draining, Registry: registry, Log: logr.Discard(),
		Clock: clock.RealClock{},
	})
	require.NoError(t, err)
	serve := func(path string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader("{}"))
		if strings.HasSuffix(path, "z") {
			r.Method = http.MethodGet
		}
		r.TLS = &tls.ConnectionState{}
		for i := 0; i+1 < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	w := serve("/v1/namespaces/ns/sandboxes")
	require.Equal(t, http.StatusUnauthorized, w.Code)
	require.Equal(t, "UNAUTHENTICATED", failureOf(t, w).Details[0].Reason)
	for _, bad := range []string{"Bearer", "Bearer bad", "Basic Z29vZA==", "good"} {
		require.Equal(t, http.StatusUnauthorized, serve("/v1/namespaces/ns/sandboxes", "Authorization", bad).Code, bad)
	}
	require.Equal(t, http.StatusNotFound, serve("/v1/unknown", "Authorization", "bearer good").Code, "the token is good")
	w = serve("/v1/namespaces/ns/sandboxes", "Sec-Fetch-Site", "cross-site")
	require.Equal(t, "cross-origin requests are not allowed", failureOf(t, w).Message)

	require.Equal(t, http.StatusOK, serve("/healthz").Code)
	require.Equal(t, http.StatusServiceUnavailable, serve("/readyz").Code)
	ready = nil
	require.Equal(t, http.StatusOK, serve("/readyz").Code)
	close(draining)
	require.Equal(t, http.StatusServiceUnavailable, serve("/readyz").Code, "a gateway that stops is not ready")
}

// TestCredentialsStayHere: the server that is called learns who the caller is from the gateway alone.
func TestCredentialsStayHere(t *testing.T) {
	called := &upstream{replies: []any{&sandboxv1.GetSandboxResponse{}}}
	handler, err := rest.New(rest.Config{
		Allocator: called, Collector: &upstream{}, RequestTimeout: testkit.Timeout, Tokens: users.Tokens{"good": {User: "alice"}},
		Registry: prometheus.NewRegistry(), Log: logr.Discard(), Clock: clock.RealClock{},
	})
	require.NoError(t, err)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/namespaces/ns/sandboxes/one", http.NoBody)
	forged := base64.StdEncoding.EncodeToString([]byte(`{"User":"admin","Groups":["system:masters"]}`))
	for key, value := range map[string]string{
		"Authorization": "bearer good", "Grpc-Metadata-Authorization": "bearer good",
		"Grpc-Metadata-Fast-Sandbox-Caller-Bin": forged, "Fast-Sandbox-Caller-Bin": forged,
	} {
		r.Header.Set(key, value)
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code, w.Body.String())
	require.Empty(t, called.sent.Get("authorization"))
	named := called.sent.Get("fast-sandbox-caller-bin")
	require.Len(t, named, 1)
	require.Contains(t, named[0], `"User":"alice"`)
	require.NotContains(t, named[0], "admin")
}
