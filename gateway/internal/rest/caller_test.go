package rest_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// observer is an upstream that notes on whose behalf it is called, and with what metadata.
type observer struct {
	upstream
	callers []auth.Caller
}

func (o *observer) Invoke(ctx context.Context, method string, in, out any, opts ...grpc.CallOption) error {
	c, _ := auth.CallerOf(ctx)
	o.callers = append(o.callers, c)
	return o.upstream.Invoke(ctx, method, in, out, opts...)
}

// TestCallers: a request passes with the identity and the address of its caller, and one without an identity is recorded here, for no
// other server sees it.
func TestCallers(t *testing.T) {
	var logs strings.Builder
	registry, allocator := prometheus.NewRegistry(), &observer{}
	handler, err := rest.New(rest.Config{
		Allocator: allocator, Collector: &upstream{}, MaxBodyBytes: 1 << 10, RequestTimeout: testkit.Timeout,
		Tokens:   users.Tokens{"good": {User: "alice", Groups: []string{"devs"}, Method: auth.Token}},
		Registry: registry, Log: logr.FromSlogHandler(slog.NewJSONHandler(&logs, nil)), Clock: clock.RealClock{},
	})
	require.NoError(t, err)
	do := func(headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/namespaces/ns/sandboxes/n", nil)
		r.RemoteAddr = "192.0.2.1:5"
		for i := 0; i+1 < len(headers); i += 2 {
			r.Header.Add(headers[i], headers[i+1])
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	audited := func() (all []map[string]any) {
		for line := range strings.Lines(logs.String()) {
			record := map[string]any{}
			require.NoError(t, json.Unmarshal([]byte(line), &record))
			if record["logger"] == "audit" {
				all = append(all, record)
			}
		}
		return all
	}

	do("Authorization", "Bearer good", "X-Forwarded-For", "192.0.2.99")
	require.Equal(t, []auth.Caller{{User: "alice", Groups: []string{"devs"}, Method: auth.Token, Address: "192.0.2.1:5"}}, allocator.callers)
	require.Empty(t, audited(), "the server that authorizes a call records it")

	for name, headers := range map[string][]string{
		"none": nil, "unknown": {"Authorization", "Bearer bad-t0ken"}, "not a token": {"Authorization", "Basic bad-t0ken"},
		"two": {"Authorization", "Bearer good", "Authorization", "Bearer bad-t0ken"},
	} {
		t.Run(name, func(t *testing.T) {
			logs.Reset()
			w := do(append(headers, "X-Request-Id", "r1")...)
			require.Equal(t, http.StatusUnauthorized, w.Code)
			require.Contains(t, w.Header().Get("WWW-Authenticate"), "Bearer")
			got := audited()
			require.Len(t, got, 1)
			require.Subset(t, got[0], map[string]any{
				obs.KeyUser: "", obs.KeyAddress: "192.0.2.1:5", obs.KeyMethod: "GET /v1/namespaces/ns/sandboxes/n", obs.KeyDecision: "deny",
				obs.KeyReason: "UNAUTHENTICATED", obs.KeyRequestID: "r1",
			})
			require.NotContains(t, logs.String(), "t0ken")
		})
	}
	require.Len(t, allocator.callers, 1)
}
